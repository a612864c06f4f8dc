"""Data sets and loaders: from plans to micro-batches."""
