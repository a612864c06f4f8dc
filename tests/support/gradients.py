"""Gradients of a run's steps, whole, and those of plain transformers on the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.launch import run_entry


@dataclass
class Gradients:
    """What `run_for_gradients` found on a rank.

    Attributes:
        steps: of each step, parameter → its whole gradient, on rank 0; elsewhere empty.
        parts: parameter → shape of this rank's part.
    """

    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)


def run_for_gradients(words: list[str]) -> Gradients:
    """Run the entry script on this rank with --clip-grad 0.

    Every gradient is divided as the step divides it: it is that of the step's loss.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from mindspeed_mm.backends.fsdp2 import FSDP2Backend
    from mindspeed_mm.optimizer.clip import local_tensor

    gradients = Gradients()
    apply = FSDP2Backend.apply

    def keep(self: FSDP2Backend, factor: torch.Tensor, finite: torch.Tensor, is_idle: Any) -> None:
        found = {}
        gradients.parts = {n: tuple(local_tensor(p).shape) for n, p in self._root.named_parameters()}
        for name, param in self._root.named_parameters():
            if param.grad is not None:
                grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                found[name] = (grad * factor).cpu().clone()
        gradients.steps.append(found if dist.get_rank() == 0 else {})
        apply(self, factor, finite, is_idle)

    with mock.patch.object(FSDP2Backend, "apply", keep):
        run_entry(words)
    return gradients


def reference_gradients(
    hf_dir: Path,
    inputs: list[dict[str, torch.Tensor]],
    outputs: Callable[[Any, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> dict[str, torch.Tensor]:
    """The gradient of the mean over all target tokens of all rows, by plain transformers, unclipped.

    Args:
        outputs: (model, inputs of a row) → logits [n, vocabulary] and labels [n]; None: those of a causal model.
    """
    import transformers

    architecture = json.loads((Path(hf_dir) / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(hf_dir, dtype=torch.float32).train()
    total = sum(int((row["labels"][0, 1:] != -100).sum()) for row in inputs)
    for row in inputs:
        if outputs is None:
            logits = model(**{name: value for name, value in row.items() if name != "labels"}).logits[0, :-1]
            labels = row["labels"][0, 1:]
        else:
            logits, labels = outputs(model, row)
        (torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / total).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def worst_difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], floor: float = 1e-12
) -> tuple[float, str]:
    """The largest ‖found − expected‖ ÷ ‖expected‖ over all gradients, and the parameter's name.

    A gradient that is zero (below `floor`) must be zero, or absent.
    """
    worst = (0.0, "")
    for name in expected.keys() | found.keys():
        zero = torch.zeros(())
        one, other = found.get(name, zero).double(), expected.get(name, zero).double()
        size, off = float(other.norm()), float((one - other).norm())
        worst = max(worst, (off / size if size > floor else off / floor, name))
    return worst
