"""Meshes, module-path patterns, and what is applied to a model so that it runs on many ranks."""
