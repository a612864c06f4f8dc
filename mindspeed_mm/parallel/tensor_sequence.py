"""Sequence parallelism: between split layers, tensor-parallel ranks have different tokens of the same rows.

Attention and MLP receive whole rows, gathered, and their sums over ranks come back scattered, so that norms, residuals
and what is kept of them for backward exist once. Rows of any length are padded to a multiple of the ranks inside.

Source: Reducing Activation Recomputation in Large Transformer Models (Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.parallel import collectives
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.errors import ConfigError

_SEQUENCE = 1  # dimension of [batch, sequence, hidden]


class RowCut:
    """Cuts the rows of a forward pass over ranks, and joins them; all tensors are [batch, sequence, hidden]."""

    def __init__(self, ranks: RankSet) -> None:
        self._ranks = ranks
        self._length = 0

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of whole rows, whose length the other methods use until the next call."""
        self._length = x.shape[_SEQUENCE]
        return self.cut(x)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of rows that all ranks have."""
        return collectives.cut(self._padded(x), self._ranks, _SEQUENCE)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole rows for a computation that every rank does whole."""
        return self._trimmed(collectives.gather(x, self._ranks, _SEQUENCE, is_partial=False))

    def join_for_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole rows for a computation of which each rank does a part."""
        return self._trimmed(collectives.gather(x, self._ranks, _SEQUENCE, is_partial=True))

    def sum_and_cut(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of the sum of `x` over the ranks."""
        return collectives.reduce_scatter(self._padded(x), self._ranks, _SEQUENCE)

    def _trimmed(self, x: torch.Tensor) -> torch.Tensor:
        # contiguous, as blocks of experts view it as [batch * sequence, hidden]
        return x[:, : self._length].contiguous()

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = -x.shape[_SEQUENCE] % self._ranks.size
        return F.pad(x, (0, 0, 0, missing)) if missing else x


@dataclass(frozen=True)
class SequenceRegions:
    """The modules of decoder layers that work on cut rows, or around which rows are joined.

    Attributes:
        first, last: the layers at which rows are cut, and after which they are joined.
        split: attention and MLP modules whose layers are split, by path.
        whole: modules that every rank computes whole (blocks of experts).
        norms: modules that are applied to this rank's tokens, whose gradients are parts of a sum.
    """

    first: nn.Module
    last: nn.Module
    split: Mapping[str, nn.Module] = field(default_factory=dict)
    whole: Mapping[str, nn.Module] = field(default_factory=dict)
    norms: tuple[nn.Module, ...] = ()


def find_regions(
    layers: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module], split_paths: Iterable[str]
) -> SequenceRegions | None:
    """Find what sequence parallelism changes in decoder layers; None: there are no layers.

    Args:
        layers: path → layer, in the order of execution, between which the model does nothing else.
        blocks: attention and MLP modules of decoder layers that tensor parallelism splits.
        split_paths: paths of the linear layers that it splits.
    """
    if not layers:
        return None
    parents = {path.rpartition(".")[0] for path in split_paths}
    split: dict[str, nn.Module] = {}
    whole: dict[str, nn.Module] = {}
    norms: list[nn.Module] = []
    for layer_path, layer in layers.items():
        if layer_path in parents:
            raise ConfigError(
                f"--sequence-parallel: '{layer_path}' has split layers of its own; expected them in modules of the "
                "layer, such as self_attn and mlp"
            )
        if any(p is not None for p in layer._parameters.values()):
            norms.append(layer)
        for name, child in layer.named_children():
            path = f"{layer_path}.{name}"
            if path in blocks:
                split[path] = child
            elif any(True for _ in child.children()) and any(True for _ in child.parameters()):
                whole[path] = child
            elif any(True for _ in child.parameters()):
                norms.append(child)
    ends = list(layers.values())
    return SequenceRegions(ends[0], ends[-1], split, whole, tuple(norms))


def join_rows_around(regions: SequenceRegions, cut: RowCut) -> None:
    """Cut rows at the first layer, join them around blocks of experts, and after the last layer.

    The split modules must do their part: `RowCut.join_for_parts` of their input, and `RowCut.sum_and_cut` in the place
    of a sum.
    """
    regions.first.register_forward_pre_hook(
        lambda module, args, kwargs: _with_first_input(args, kwargs, cut.begin), with_kwargs=True
    )
    for module in regions.whole.values():
        change_input(module, cut.join, cut.cut)
    regions.last.register_forward_hook(lambda module, args, output: _with_first_output(output, cut.join))


Change = Callable[[torch.Tensor], torch.Tensor]


def change_input(module: nn.Module, before: Change | None, after: Change | None = None) -> None:
    """Apply `before` to the hidden states that `module` receives, and `after` to those that it returns."""
    if before is None and after is None:
        return
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args, kwargs = _with_first_input(args, kwargs, before)
        output = forward(*args, **kwargs)
        return output if after is None else _with_first_output(output, after)

    module.forward = run


def _with_first_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _with_first_output(output: Any, change: Change) -> Any:
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)
