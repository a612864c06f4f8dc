"""Frozen text encoders: captions become states as in the model's diffusers pipeline."""
