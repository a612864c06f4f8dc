"""A tiny Wan transformer on the FSDP2 backend, trained on numbers that depend on the step only, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.runs import run_of
from tests.support.tiny_diffusers import build_diffusers, diffusers_class, diffusers_config, wan_inputs

ROWS = 4  # of a global batch
WAN_BLOCKS = ["blocks.{*}"]


def write_wan_dir(folder: Path, seed: int = 0, **how: Any) -> Path:
    """A diffusers directory of the tiny Wan transformer; `how` is `save_pretrained`'s."""
    build_diffusers("wan", seed).save_pretrained(folder, **how)
    return folder


class Generator(nn.Module):
    """What `SoRAModel` is to a backend: not sharded itself, around a transformer that is."""

    def __init__(self, source: str | None = None, layout: Any = None, ema_decay: float | None = None) -> None:
        from mindspeed_mm.models.common.base_model import adapt_class
        from mindspeed_mm.models.common.meta_build import build_on_meta

        super().__init__()
        self.source = self.pending_weights = source
        self.layout, self.ema_decay = layout, ema_decay
        self.predictor = build_on_meta(adapt_class(diffusers_class("wan")), diffusers_config("wan"))

    @property
    def sharded_module(self) -> Any:
        return self.predictor

    def export_layout(self) -> Any:
        return self.layout

    def fully_shard(self, process_group: Any = None, fsdp2_config_path: str | None = None) -> bool:
        self.predictor.weights_come_later = self.weights_come_later
        return self.predictor.fully_shard(process_group, fsdp2_config_path)


class TrainedWan:
    """A backend with a model, an optimizer and a saver, on this rank."""

    def __init__(
        self, root: str, *, sharding_size: int | str = "auto", model: dict[str, Any] | None = None, **flags: Any
    ) -> None:
        from mindspeed_mm.backends.fsdp2 import FSDP2Backend

        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        # A file of this rank's own: one that another rank is just writing would be read empty, as all defaults.
        file = self.root / f"fsdp2-{sharding_size}-rank{dist.get_rank()}.yaml"
        file.write_text(f"sharding_size: {sharding_size}\nsub_modules_to_wrap: {WAN_BLOCKS}\n")
        resumes = flags.pop("resumes", False)
        self.backend = FSDP2Backend()
        run = run_of(world_size=dist.get_world_size(), use_torch_fsdp2=True, fsdp2_config_path=str(file), **flags)
        self.backend.setup(run)
        self.backend.build_model(lambda: Generator(**(model or {})), load_weights=not resumes)
        self.backend.build_optimizer(self.backend.model, run)
        self.iteration = 0
        self._savers: dict[bool, Any] = {}

    def step(self, spoilt: bool = False) -> float:
        """Train a step; a spoilt one is skipped, as its loss is not finite."""
        from mindspeed_mm.data.loading.counting import BatchCounts

        rank, size = self.backend.world.batch.rank, self.backend.world.batch.size
        rows = range(rank, ROWS, size)

        def forward_step(data: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
            number = self.iteration * ROWS + next(data)
            target = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(number))
            predicted = model.predictor(**wan_inputs(seed=number))[0]
            error = (predicted - target).square().mean() * (float("nan") if spoilt else 1.0)
            return error, lambda output: (output, 1, {})

        self.backend.forward_backward(forward_step, iter(rows), len(rows))
        result = self.backend.step(BatchCounts(), False).result()
        assert result.skipped == spoilt
        self.iteration += 1
        return result.loss

    def save(self, *, in_background: bool) -> None:
        """Save a checkpoint and wait for it."""
        from mindspeed_mm.checkpoint.saver import CheckpointSaver

        if in_background not in self._savers:
            self._savers[in_background] = CheckpointSaver(self.root, in_background=in_background)
        saver, extra = self._savers[in_background], {"iteration": self.iteration}
        saver.save(self.iteration, lambda detached: self.backend.snapshot(extra, detached=detached))
        saver.wait()
        assert saver.last_saved == self.iteration

    def load(self, directory: str) -> None:
        """Go on after a checkpoint."""
        extra = self.backend.load(Path(directory), optimizer=True, rng=False, schedule=True)
        self.iteration = extra["iteration"]

    def whole(self) -> dict[str, torch.Tensor]:
        """Weights and averages, whole."""
        from torch.distributed.tensor import DTensor

        from mindspeed_mm.checkpoint.tensors import model_tensors

        tensors = model_tensors(self.backend._root)
        if self.backend.ema is not None:
            tensors |= self.backend.ema.tensors()
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()}
