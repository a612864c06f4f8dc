"""Random numbers that depend on a seed and a name only."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Run the body with the host's default generator seeded from (seed, name); restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number_of(seed, name))
        yield


def number_of(seed: int, name: str) -> int:
    """Return 63 bits that depend on (seed, name)."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_host(number: int) -> None:
    """Seed the random states of the host: `random`, numpy's global state, torch's default generator.

    Unlike `torch.manual_seed` it leaves the generators of accelerators alone, which dropout draws from.
    """
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


@contextmanager
def host_seeded(number: int) -> Iterator[None]:
    """Run the body after `seed_host`; restore all three states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        seed_host(number)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
