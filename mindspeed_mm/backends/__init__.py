"""The backends: the protocol of the training loop and its implementations for Megatron-core and FSDP2."""
