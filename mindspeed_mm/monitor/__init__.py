"""Monitoring of a run: console line, metrics.jsonl, trackers, profiler, memory, stop signals."""
