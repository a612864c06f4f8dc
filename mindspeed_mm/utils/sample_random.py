"""Random numbers of a sample, from the run's seed, the sample and the epoch alone.

Which rank takes a sample, in which micro-batch, and whether the run was resumed in between don't change them. They are
drawn on the host, so that they are the same beside every accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash


def sample_key(seed: int, row: int, epoch: int) -> int:
    """Return the key of a sample in an epoch: 63 bits, so that it fits into int64.

    Args:
        seed: the run's.
        row: number of the sample in its data set.
        epoch: passes over the data before this one.
    """
    return _digest(f"{seed}/{row}/{epoch}")


def generator(key: int, purpose: str) -> torch.Generator:
    """A host generator for one use of a sample's randomness ("noise", "timestep", "caption" …)."""
    return torch.Generator().manual_seed(_digest(f"{key}/{purpose}"))


def normal(key: int, purpose: str, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal values, float32 on the host."""
    return torch.randn(tuple(shape), generator=generator(key, purpose))


def uniform(key: int, purpose: str) -> float:
    """A number in [0, 1)."""
    return float(torch.rand((), generator=generator(key, purpose), dtype=torch.float64))


def normals(keys: Sequence[int] | torch.Tensor, purpose: str, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal values of several samples: [samples, *shape] float32 on the host."""
    numbers = keys.tolist() if isinstance(keys, torch.Tensor) else list(keys)
    return torch.stack([normal(key, purpose, shape) for key in numbers])


def uniforms(keys: Sequence[int] | torch.Tensor, purpose: str) -> torch.Tensor:
    """A number in [0, 1) of each sample: [samples] float64 on the host."""
    numbers = keys.tolist() if isinstance(keys, torch.Tensor) else list(keys)
    return torch.tensor([uniform(key, purpose) for key in numbers], dtype=torch.float64)


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
