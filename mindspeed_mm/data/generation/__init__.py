"""Data of generation models: captioned clips, shapes in buckets, precomputed features."""
