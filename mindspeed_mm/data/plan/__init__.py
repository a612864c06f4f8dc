"""Which samples make up each global batch: order, packs, balance."""
