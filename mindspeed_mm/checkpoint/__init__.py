"""Checkpoints of a run, and weights in the hub's layout."""
