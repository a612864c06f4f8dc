"""Run an entry script in workers and keep what its steps saw: whole gradients and whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from tests.support.launch import run_entry


def run_captured(words: list[str], script: str, folder: Path, steps: int) -> list[float]:
    """Run the script; rank 0 writes gradients.safetensors (first step, clipped) and weights.safetensors to `folder`.

    Args:
        steps: number of the step whose weights are kept.

    Returns:
        sums of squares of the tensors that were kept, which are the same on all ranks.
    """
    with capture(folder, steps) as sums:
        run_entry(words, script)
    return sums


@contextmanager
def capture(folder: Path, steps: int) -> Iterator[list[float]]:
    """Look into the FSDP2 backend's optimizer steps of this process."""
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend

    sums: list[float] = []
    applied = FSDP2Backend.apply
    counted = 0

    def keep(name: str, tensors: dict[str, torch.Tensor]) -> None:
        sums.extend(float(tensor.double().square().sum()) for tensor in tensors.values())
        if torch.distributed.get_rank() == 0:
            save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name)

    def apply(self: Any, factor: torch.Tensor, finite: torch.Tensor, is_idle: Any) -> None:
        nonlocal counted
        counted += 1
        named = dict(self._root.named_parameters())
        if counted == 1:
            grads = {name: p.grad for name, p in named.items() if p.grad is not None}
            keep("gradients.safetensors", {name: whole(grad).float() * factor.float() for name, grad in grads.items()})
        applied(self, factor, finite, is_idle)
        if counted == steps:
            keep("weights.safetensors", {name: whole(p) for name, p in named.items()})

    with mock.patch.object(FSDP2Backend, "apply", apply):
        yield sums


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be spread over ranks; a collective."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def captured(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """What `run_captured` has written: "gradients" or "weights"."""
    return load_file(folder / f"{name}.safetensors")
