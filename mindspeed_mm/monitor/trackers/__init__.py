"""Experiment trackers, which get the figures of metrics.jsonl: a module each, imported where a run asks for it."""
