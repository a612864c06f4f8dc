"""Trained parts of generation models: diffusers' transformers, unmodified, one file for each family."""
