"""Tensor parallelism: layers are split over ranks that process the same tokens.

Parameters become DTensors on the mesh "tensor", which remember the whole tensor for fully_shard, checkpoints and
exports; forward passes run on each rank's local part. Every rank has the whole gradient of each parameter that is not
split, as `collectives.copy` sums gradients where the path through split layers begins.

Source: Megatron-LM (Shoeybi et al., arXiv 1909.08053).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mindspeed_mm.parallel import collectives
from mindspeed_mm.parallel.tensor_plan import TensorSplit
from mindspeed_mm.parallel.tensor_sequence import RowCut, SequenceRegions, change_input, join_rows_around
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.adapter_names import ADAPTER

Step = Callable[[torch.Tensor], torch.Tensor]


def apply_tensor_parallel(
    model: nn.Module, split: TensorSplit, mesh: DeviceMesh, regions: SequenceRegions | None = None
) -> None:
    """Split the layers of `model` in place, before it is wrapped by fully_shard.

    Args:
        model: may be on the meta device.
        split: from `plan_tensor_parallel`.
        mesh: 1-D, the ranks that share each layer.
        regions: what works on cut rows, with sequence parallelism.
    """
    ranks = rank_set(mesh)
    parameters = _Parameters(model, mesh)
    rows = RowCut(ranks)
    cut = regions.split if regions is not None else {}
    copy = functools.partial(collectives.copy, ranks=ranks)
    for path, block in split.blocks.items():
        change_input(block, rows.join_for_parts if path in cut else copy)
    for path, layer in split.columns.items():
        parameters.shard(layer, "weight", 0)
        parameters.shard(layer, "bias", 0)
        run_on_local_parameters(layer)
        if path in split.adapted:
            _split_adapters_of_columns(split.adapted[path], parameters, ranks)
        before = None if path.rpartition(".")[0] in split.blocks else copy
        after = functools.partial(collectives.gather, ranks=ranks, dim=-1, is_partial=False)
        change_input(split.adapted.get(path, layer), before, after if path in split.gathered else None)
    for path, layer in split.rows.items():
        parameters.shard(layer, "weight", 1)
        if path in split.adapted:
            _split_adapters_of_rows(split.adapted[path], parameters, ranks)
        returns_cut = path.rpartition(".")[0] in cut
        combine = rows.sum_and_cut if returns_cut else functools.partial(collectives.total, ranks=ranks)
        _combine_rows(split.adapted.get(path, layer), layer, combine, copy if returns_cut else None)
    for embedding in split.embeddings.values():
        _split_vocabulary(embedding, mesh)
    for path, names in split.head_parameters.items():
        module = model.get_submodule(path)
        for name in names:
            parameters.shard(module, name, 0)
        run_on_local_parameters(module)
    for norm in split.head_norms.values():
        sum_gradients_of(norm, ranks)
    if regions is not None:
        for norm in regions.norms:
            sum_gradients_of(norm, ranks)
        join_rows_around(regions, rows)


def rank_set(mesh: DeviceMesh) -> RankSet:
    """Return the ranks of a 1-D mesh."""
    return RankSet(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter that tensor parallelism splits, with graph; another one as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Parameters:
    """The parameters of a model and all modules that have them, so that tied parameters stay tied."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append((module, name))

    def shard(self, module: nn.Module, name: str, dim: int) -> None:
        """Replace a parameter with a DTensor of which each rank has a part in `dim`, unless it is one or is None."""
        whole = module._parameters.get(name)
        if whole is None or isinstance(whole, DTensor):
            return
        part = whole.detach().chunk(self._mesh.size(), dim)[self._mesh.get_local_rank()].clone()
        sharded = DTensor.from_local(
            part, self._mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        parameter = nn.Parameter(sharded, requires_grad=whole.requires_grad)
        for owner, own_name in self._owners[id(whole)]:
            owner._parameters[own_name] = parameter


def run_on_local_parameters(module: nn.Module) -> None:
    """Let the forward method of `module` compute with this rank's parts of its own parameters."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        local = {name: own_part(p) for name, p in module._parameters.items() if p is not None}
        with replaced_parameters(module, local):
            return forward(*args, **kwargs)

    module.forward = run


def sum_gradients_of(module: nn.Module, ranks: RankSet) -> None:
    """Sum the gradients of the parameters of `module` itself over ranks that apply it to different parts.

    The sum is on the path of each parameter into a forward pass. (A hook of the accumulated gradient would sum the
    gradients of earlier micro-batches again.)
    """
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        used = {name: collectives.copy(p, ranks) for name, p in module._parameters.items() if p is not None}
        with replaced_parameters(module, used):
            return forward(*args, **kwargs)

    module.forward = run


@contextmanager
def replaced_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Replace parameters of `module` itself with other tensors inside the context."""
    kept = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(kept)


def _split_adapters_of_columns(adapted: nn.Module, parameters: _Parameters, ranks: RankSet) -> None:
    """Split B as the rows of the weight that B A is added to; every rank applies A to the same tokens, for its part."""
    down, up = (adapted.get_submodule(f"{name}.{ADAPTER}") for name in ("lora_A", "lora_B"))
    parameters.shard(up, "weight", 0)
    run_on_local_parameters(up)
    sum_gradients_of(down, ranks)


def _split_adapters_of_rows(adapted: nn.Module, parameters: _Parameters, ranks: RankSet) -> None:
    """Split A as the columns of the weight that B A is added to; every rank applies B to its part of a sum."""
    down, up = (adapted.get_submodule(f"{name}.{ADAPTER}") for name in ("lora_A", "lora_B"))
    parameters.shard(down, "weight", 1)
    run_on_local_parameters(down)
    sum_gradients_of(up, ranks)


def _combine_rows(outer: nn.Module, layer: nn.Linear, combine: Step, copy_bias: Step | None) -> None:
    """Let a row-parallel layer compute `combine(x @ weight.T) + bias`: the bias is added once, not by every rank.

    Args:
        outer: what the model calls, PEFT's layer around `layer` with its adapters, or `layer` itself.
        copy_bias: applied to the bias if each rank adds it to other tokens.
    """
    forward = outer.forward

    @functools.wraps(forward)
    def run(x: torch.Tensor) -> torch.Tensor:
        bias = layer.bias
        with replaced_parameters(layer, {"weight": own_part(layer.weight), "bias": None}):
            output = forward(x)
        output = combine(output)
        if bias is None:
            return output
        return output + (bias if copy_bias is None else copy_bias(bias))

    outer.forward = run


def _split_vocabulary(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Let an embedding with a split weight look up the tokens of this rank, and sum over ranks."""
    ranks = rank_set(mesh)
    own = embedding.num_embeddings // mesh.size()
    first = ranks.rank * own
    padding = embedding.padding_idx
    embedding.padding_idx = padding - first if padding is not None and first <= padding < first + own else None
    forward = embedding.forward

    @functools.wraps(forward)
    def run(tokens: torch.Tensor) -> torch.Tensor:
        index = tokens - first
        is_own = (index >= 0) & (index < own)
        with replaced_parameters(embedding, {"weight": own_part(embedding.weight)}):
            rows = forward(index.clamp(0, own - 1))
        return collectives.total(rows * is_own.unsqueeze(-1), ranks)

    embedding.forward = run
