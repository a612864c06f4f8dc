"""Frozen autoencoders: diffusers' classes, and one that passes pixels through."""
