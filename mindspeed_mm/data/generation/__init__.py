"""Data of models that make images and videos: captioned clips, shapes in buckets, features made before."""
