"""Recipes of training, inference and evaluation."""
