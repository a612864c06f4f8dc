"""Language models built of Megatron-core's modules."""
