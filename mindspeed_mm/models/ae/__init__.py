"""Frozen autoencoders: diffusers' classes, and none at all."""
