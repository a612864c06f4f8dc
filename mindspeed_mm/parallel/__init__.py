"""Meshes, module-path patterns, and the transformations that run a model on many ranks."""
