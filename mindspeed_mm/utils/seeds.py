"""Random numbers that depend on a seed and a name only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Run the body with the host's default generator seeded from (seed, name); restore it afterwards."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
