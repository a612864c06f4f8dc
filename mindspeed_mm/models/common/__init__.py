"""Pieces that all models share: base module, registry, loss, idle towers."""
