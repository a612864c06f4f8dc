"""Vision towers built of Megatron-core's modules."""
