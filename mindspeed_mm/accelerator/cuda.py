"""NVIDIA GPUs: nccl, torch.cuda."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from mindspeed_mm.accelerator.base import Accelerator, local_rank


class CUDAAccelerator(Accelerator):
    """A CUDA device."""

    name = "cuda"
    collective_backend = "nccl"

    def device(self) -> torch.device:
        return torch.device("cuda", local_rank() % torch.cuda.device_count())

    def set_device(self) -> None:
        torch.cuda.set_device(self.device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {**super().rng_state(), "cuda": torch.cuda.get_rng_state()}

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        super().set_rng_state(states)
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])

    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [*super().activities(), torch.profiler.ProfilerActivity.CUDA]

    def record_memory_history(self, stacks: str, max_entries: int | None) -> None:
        torch.cuda.memory._record_memory_history(stacks=stacks, max_entries=max_entries or sys.maxsize)

    def dump_memory_snapshot(self, path: str) -> None:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
