"""Tiny predictors of each family, and plain training losses written with diffusers alone."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """A tiny model of a family and task.

    Attributes:
        config: of the diffusers class.
        latent: [channels, frames, height, width] of a sample.
        text: shapes of a sample's text states; of those whose name ends in `mask`, the first half is 1.
        plain: (diffusers model, latents, noise, draws, text, conditions) → mean loss over the samples, computed by
            diffusers' means only, as its training examples do it.
        task: of model.json.
        conditions: (latents) → what an image-to-video model is told, by name.
        diffusion: of model.json.
        integers: names of text states that are whole numbers.
    """

    config: Mapping[str, Any]
    latent: tuple[int, int, int, int]
    text: Mapping[str, tuple[int, ...]]
    plain: Callable[..., torch.Tensor]
    task: str = "t2v"
    conditions: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None
    diffusion: Mapping[str, Any] = field(default_factory=dict)

    def model_json(self, name: str) -> dict[str, Any]:
        """model.json for a predictor from scratch, on features."""
        return {
            "task": self.task,
            "load_video_features": True,
            "load_text_features": True,
            "predictor": {"model_id": name, "config": dict(self.config), "train_from_scratch": True},
            "diffusion": dict(self.diffusion),
        }

    def batch(self, rows: list[int], epoch: int = 0) -> dict[str, Any]:
        """A micro-batch of features; a row's are the same in every batch."""
        from mindspeed_mm.utils.sample_random import sample_key

        samples = [self._sample(row) for row in rows]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        if self.conditions is not None:
            batch.update({f"cond.{n}": v for n, v in self.conditions(batch["latents"]).items()})
        keys = [sample_key(1234, row, epoch) for row in rows]
        return {**batch, "sample_keys": torch.tensor(keys), "sample_weights": torch.ones(len(rows))}

    def _sample(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        sample = {"latents": torch.randn(self.latent, generator=generator)}
        for name, shape in self.text.items():
            if name.endswith("mask"):
                value = torch.ones(shape)
                value[-(row % 3) or len(value) :] = 0
            else:
                value = torch.randn(shape, generator=generator)
            sample[f"text.{name}"] = value
        return sample


def cases() -> dict[str, tuple[str, Case]]:
    """All cases: "family-task" → (family, case)."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        content = importlib.import_module(f"{__name__}.{module.name}")
        for label, case in content.CASES.items():
            found[f"{module.name}-{label}"] = (content.NAME, case)
    return found
