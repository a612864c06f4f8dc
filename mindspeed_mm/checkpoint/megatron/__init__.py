"""Checkpoints of the Megatron backend, in the layout of the other one. Imports megatron."""
