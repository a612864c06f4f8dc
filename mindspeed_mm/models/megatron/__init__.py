"""Models out of Megatron-core's modules. Imports megatron: for the Megatron backend only."""
