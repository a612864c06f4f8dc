"""The recipes of the entry scripts, and their start."""
