"""Latents, text states and conditions of a data set, made once before training."""
