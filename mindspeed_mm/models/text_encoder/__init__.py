"""Frozen text encoders: captions become states as the model's diffusers pipeline makes them."""
