"""Compute latents, text states and conditions of a data set once before training."""
