"""What runs inside a run to watch it: console line, metrics.jsonl, tensorboard, profiler, memory."""
