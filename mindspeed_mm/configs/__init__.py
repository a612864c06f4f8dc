"""Configuration: flags, JSON and YAML files become one typed description (`docs/configuration.md` lists every key).

Nothing in this package imports torch, so that a mistake in a launch command is reported in a fraction of a second.
"""
