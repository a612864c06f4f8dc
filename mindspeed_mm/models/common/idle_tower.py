"""Any batch trains: a tower without input in a batch runs a pass that contributes zero.

Sharded towers are gathered and reduced by collectives. A rank whose rows are text only would skip those of the vision
tower while its peers wait in them: an abort on gloo, a hang elsewhere. So each rank runs every tower in every
micro-batch; without input it runs on a smallest dummy, and the result joins the text embeddings with zero gradient.
One mechanism for all towers, through a forward pre-hook on the language model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Tower:
    """One encoder of a multimodal model.

    Attributes:
        path: module path of the tower, relative to the model (`model.visual`).
        modalities: what it encodes, as the data adapter counts it (`image`, `video`, `audio`).
        input_keys: batch fields whose presence means that the tower runs.
        run_dummy: (model, device) → an output tensor of the tower, computed through its own forward on a smallest
            input. None: not known (see `models/transformers/inferred.py`).
        beside: paths of modules and parameters outside of it that work on its output alone (a projector).
        patches_per_row: configuration → patches in a row of its media tensor.
    """

    path: str
    modalities: tuple[str, ...]
    input_keys: tuple[str, ...]
    run_dummy: Callable[[Any, torch.device], torch.Tensor] | None
    beside: tuple[str, ...] = ()
    patches_per_row: Callable[[Any], int] = lambda config: 1

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of the tower and of what stands beside it, which nothing else uses."""
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
        """The embeddings' gradient unchanged, zeros for the tower."""
        return grad, torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)


class IdleTowers:
    """Runs the towers that a batch leaves idle; `for_batch` announces each batch.

    The towers are given in the order in which the model runs them, and an idle one has its turn there too: ranks that
    leave different towers idle would else go through them in different orders.
    """

    def __init__(self, model: nn.Module, towers: Iterable[Tower]) -> None:
        self._model = model
        self._towers = tuple(tower for tower in towers if tower.run_dummy is not None)
        self._pending: tuple[Tower, ...] = ()
        self._outputs: list[torch.Tensor] = []

    def install(self, language_model: nn.Module) -> None:
        """Hook onto `language_model`, which receives `inputs_embeds`. To be called after the model has been wrapped.

        The hook goes before FSDP's own: the towers are then gathered where a busy tower would be, after the token
        embedding and before the language model, in forward and in backward; any other place would order the
        collectives differently from rank to rank.
        """
        if self._towers:
            language_model.register_forward_pre_hook(self._hook, prepend=True, with_kwargs=True)
        for number, tower in enumerate(self._towers[1:], start=1):
            module = self._model.get_submodule(tower.path)
            before = functools.partial(self._run_those_before, self._towers[:number])
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    def for_batch(self, batch: dict[str, Any]) -> None:
        """Note which towers the next forward of the model leaves idle.

        One tower may serve several kinds of input (images and videos); any of them keeps it busy.
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
