"""Noise schedules and training objectives of generation models."""
