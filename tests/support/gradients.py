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
        weights: parameter → its whole values after the last step, on rank 0; elsewhere empty.
        parts: parameter → shape of this rank's part.
        meshes: parameter → names of the dimensions of its device mesh; () if it is whole.
        trained: names of the parameters that require gradients.
    """

    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    meshes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)


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

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()

    def mesh_of(tensor: torch.Tensor) -> tuple[str, ...]:
        return (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()

    def keep(self: FSDP2Backend, factor: torch.Tensor, finite: torch.Tensor, is_idle: Any) -> None:
        named = dict(self._root.named_parameters())
        gradients.parts = {name: tuple(local_tensor(param).shape) for name, param in named.items()}
        gradients.meshes = {name: mesh_of(param) for name, param in named.items()}
        gradients.trained = {name for name, param in named.items() if param.requires_grad}
        found = {name: whole(param.grad) * factor.cpu() for name, param in named.items() if param.grad is not None}
        apply(self, factor, finite, is_idle)
        weights = {name: whole(param) for name, param in named.items()}
        if dist.get_rank() == 0:
            gradients.steps.append(found)
            gradients.weights = weights

    with mock.patch.object(FSDP2Backend, "apply", keep):
        run_entry(words)
    return gradients


def run_for_megatron_gradients(words: list[str], script: str) -> list[dict[str, torch.Tensor]]:
    """Run an entry script on this rank; returns each step's gradients, whole, by transformers' names, on rank 0.

    They are those that the optimizer steps with, clipped. The run has no distributed optimizer.
    """
    import torch.distributed as dist

    from mindspeed_mm.backends.ptd import PTDBackend
    from mindspeed_mm.checkpoint.megatron.export import GatheredParts

    steps: list[dict[str, torch.Tensor]] = []
    apply = PTDBackend.apply

    def keep(self: PTDBackend, factor: torch.Tensor, finite: torch.Tensor, is_idle: Any) -> None:
        state, world = self._stored, self.world
        mine = [p for p in state._local if p.param.requires_grad and not p.is_copy]
        mine = [p for p in mine if world.batch.rank == 0 and (p.is_split or world.tensor.rank == 0)]
        parts: list[Any] = [(part, p.param.main_grad * factor) for p in mine for part in p.parts()]  # type: ignore[operator]
        gathered = GatheredParts(parts, state._shapes or {}, world.host.group)
        gathered.fetch(set(gathered.tensors()), 0)
        apply(self, factor, finite, is_idle)
        if dist.get_rank() == 0:
            steps.append(gathered._whole)

    with mock.patch.object(PTDBackend, "apply", keep):
        run_entry(words, script)
    return steps


def reference_gradients(
    hf_dir: Path,
    inputs: list[dict[str, torch.Tensor]],
    outputs: Callable[[Any, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]] | None = None,
    frozen: Callable[[str], bool] = lambda name: False,
) -> dict[str, torch.Tensor]:
    """The gradient of the mean over all target tokens of all rows, by plain transformers, unclipped.

    Args:
        inputs: each row alone.
        outputs: (model, inputs of a row) → logits [n, vocabulary] and labels [n]; None: those of a causal model.
        frozen: parameter name → not trained.
    """
    import transformers

    architecture = json.loads((Path(hf_dir) / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(hf_dir, dtype=torch.float32).train()
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and not frozen(name))
    total = sum(int((row["labels"][0, 1:] != -100).sum()) for row in inputs)
    for row in inputs:
        if outputs is None:
            logits = model(**{name: value for name, value in row.items() if name != "labels"}).logits[0, :-1]
            labels = row["labels"][0, 1:]
        else:
            logits, labels = outputs(model, row)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / total
        if loss.requires_grad:  # a row without an image reaches nothing that is trained if the decoder is frozen
            loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def worst_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest ‖found − expected‖ ÷ ‖expected‖ over all gradients, and the parameter's name.

    A gradient that is zero but for rounding (a bias of keys, which softmax takes away) is measured against 1e-6 of the
    norm of all; one that is absent is zero.
    """
    zero = torch.zeros(())
    least = 1e-6 * float(torch.stack([grad.double().norm() for grad in expected.values()]).norm())
    worst = (0.0, "")
    for name in expected.keys() | found.keys():
        one, other = found.get(name, zero).double(), expected.get(name, zero).double()
        worst = max(worst, (float((one - other).norm()) / max(least, float(other.norm())), name))
    return worst
