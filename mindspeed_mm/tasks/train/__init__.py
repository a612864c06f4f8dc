"""Recipes of training: what the entry scripts train, and how they start."""
