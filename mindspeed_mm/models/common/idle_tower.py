"""A zero-contribution pass through towers that have no input in a micro-batch, so that any batch trains.

Sharded towers are gathered and reduced by collectives. A rank whose rows are text only would skip those of the vision
tower while its peers wait in them: an abort on gloo, a hang elsewhere. So each rank runs every tower in every
micro-batch; a tower without input runs on a smallest dummy input, and its output is tied to the text embeddings with
zero gradient. One mechanism, a forward pre-hook on the language model, serves all towers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_mm.parallel.media import MediaSplit


@dataclass(frozen=True)
class Tower:
    """One encoder of a multimodal model.

    Attributes:
        path: module path of the tower, relative to the model (`model.visual`).
        modalities: what it encodes, by the names of the data adapter's counts (`image`, `video`, `audio`).
        input_keys: batch fields whose presence means that the tower runs.
        run_dummy: (model, device) → an output tensor of the tower, computed through its own forward on a smallest
            input. None: not known (see `models/transformers/inferred.py`).
        beside: paths of modules and parameters outside of the tower that only process its output (a projector).
        patches_per_row: configuration → number of patches in a row of its media tensor.
        split: how its media are split over context-parallel ranks; None: each of these ranks encodes all media.
        grids: batch fields with a grid [time, height, width] for each of its media.
        grid_inputs: (vision configuration, grid [media, 3] int64 on the host) → keyword arguments of the tower that
            follow from it, on the host: tensors for the device, and `OnHost` values. None: the tower computes them.
        has_one_size: every picture is scaled to one size, that of `run_dummy`, whose output has as many rows as the
            picture takes tokens.
        projects_patches: the projector runs before patches are pooled or left out, on all of them.
    """

    path: str
    modalities: tuple[str, ...]
    input_keys: tuple[str, ...]
    run_dummy: Callable[[Any, torch.device], torch.Tensor] | None
    beside: tuple[str, ...] = ()
    patches_per_row: Callable[[Any], int] = lambda config: 1
    split: MediaSplit | None = None
    grids: tuple[str, ...] = ()
    grid_inputs: Callable[[Any, torch.Tensor], dict[str, Any]] | None = None
    has_one_size: bool = False
    projects_patches: bool = False

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the tower and of the modules beside it, which nothing else uses."""
        prefixes = (self.path, *self.beside)
        return [
            parameter
            for name, parameter in model.named_parameters()
            if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
        ]


class ZeroContribution(torch.autograd.Function):
    """Pass `embeddings` through; give `tower_output` a gradient of exactly zero, whatever its values."""

    @staticmethod
    def forward(ctx: Any, embeddings: torch.Tensor, tower_output: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """embeddings of any shape, tower_output of any shape → embeddings."""
        ctx.shape, ctx.dtype, ctx.device = tower_output.shape, tower_output.dtype, tower_output.device
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return the embeddings' gradient unchanged, and zeros for the tower."""
        return grad, torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)


class IdleTowers:
    """Runs the towers that a batch leaves idle; `for_batch` announces each batch.

    Towers are listed in the order in which the model runs them, and an idle tower runs at its place in that order:
    otherwise ranks with different idle towers would run the towers in different orders.
    """

    def __init__(self, model: nn.Module, towers: Iterable[Tower]) -> None:
        self._model = model
        self._towers = tuple(tower for tower in towers if tower.run_dummy is not None)
        self._pending: tuple[Tower, ...] = ()
        self._outputs: list[torch.Tensor] = []

    def install(self, language_model: nn.Module) -> None:
        """Register the hook on `language_model`, which receives `inputs_embeds`, after the model has been wrapped.

        The hook runs before FSDP's own: idle towers are then gathered where busy towers are, after the token embedding
        and before the language model, in forward and in backward. Any other place would give the collectives a
        different order on different ranks.
        """
        if self._towers:
            language_model.register_forward_pre_hook(self._hook, prepend=True, with_kwargs=True)
        for number, tower in enumerate(self._towers[1:], start=1):
            module = self._model.get_submodule(tower.path)
            before = functools.partial(self._run_those_before, self._towers[:number])
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    def for_batch(self, batch: dict[str, Any]) -> None:
        """Find the towers that the next forward of the model leaves idle.

        One tower may serve several modalities (images and videos); input of any of them keeps it busy.
        """
        self._pending = tuple(t for t in self._towers if all(batch.get(key) is None for key in t.input_keys))
        self._outputs = []

    def _hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._pending:
            self._run(self._pending, kwargs["inputs_embeds"].device)
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            if output.requires_grad:
                kwargs = {**kwargs, "inputs_embeds": ZeroContribution.apply(kwargs["inputs_embeds"], output)}
        return args, kwargs

    def _run_those_before(
        self, towers: tuple[Tower, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        self._run(tuple(tower for tower in self._pending if tower in towers), next(tensors).device)

    def _run(self, towers: tuple[Tower, ...], device: torch.device) -> None:
        for tower in towers:
            self._pending = tuple(other for other in self._pending if other is not tower)
            assert tower.run_dummy is not None, "towers without a smallest input were left out in __init__"
            self._outputs.append(tower.run_dummy(self._model, device))
