"""Random numbers of a sample, from the run's seed, the sample and the epoch alone.

They don't depend on the rank, the micro-batch or a resume. They are drawn on the host, so that they are the same with
every accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash


def sample_key(seed: int, row: int, epoch: int) -> int:
    """Return the key of a sample in an epoch: 63 bits, so that it fits into int64.

    Args:
        seed: seed of the run.
        row: number of the sample in its data set.
        epoch: passes over the data before this one.
    """
    return _digest(f"{seed}/{row}/{epoch}")


def generator(key: int, purpose: str) -> torch.Generator:
    """Return a host generator for one use of a sample's randomness ("noise", "timestep", "caption" …)."""
    return torch.Generator().manual_seed(_digest(f"{key}/{purpose}"))


def normal(key: int, purpose: str, shape: Sequence[int]) -> torch.Tensor:
    """Return standard normal values, float32 on the host."""
    return torch.randn(tuple(shape), generator=generator(key, purpose))


def uniform(key: int, purpose: str) -> float:
    """Return a uniform number in [0, 1)."""
    return float(torch.rand((), generator=generator(key, purpose), dtype=torch.float64))


def normals(keys: Sequence[int] | torch.Tensor, purpose: str, shape: Sequence[int]) -> torch.Tensor:
    """Return standard normal values of several samples: [samples, *shape] float32 on the host."""
    numbers = keys.tolist() if isinstance(keys, torch.Tensor) else list(keys)
    return torch.stack([normal(key, purpose, shape) for key in numbers])


def uniforms(keys: Sequence[int] | torch.Tensor, purpose: str) -> torch.Tensor:
    """Return a uniform number in [0, 1) per sample: [samples] float64 on the host."""
    numbers = keys.tolist() if isinstance(keys, torch.Tensor) else list(keys)
    return torch.tensor([uniform(key, purpose) for key in numbers], dtype=torch.float64)


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
