"""Monitoring of a run: console line, metrics.jsonl, tensorboard, profiler, memory, stop signals."""
