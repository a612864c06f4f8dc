"""Helpers for all other packages: errors, logging, nearest names, files, dtypes, devices."""
