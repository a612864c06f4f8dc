"""Models built of Megatron-core's modules, for the Megatron backend only: importing them imports megatron."""
