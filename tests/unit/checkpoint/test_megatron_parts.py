"""Rectangles of transformers' tensors that ranks hold, whatever the layout: each element is in exactly one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.checkpoint.megatron.parts import (
    LocalParameter,
    MainParameter,
    local_parameters,
    own_names,
    rectangles,
    to_write,
)
from mindspeed_mm.models.common.megatron_names import ParamMapping, interleaved, regrouped, same
from mindspeed_mm.utils.errors import CheckpointError

# name → (how it is made, shapes of the sources, whole shape, dimension that is split)
MAPPINGS: dict[str, tuple[ParamMapping, dict[str, tuple[int, ...]], tuple[int, ...], int | None]] = {
    "the same, by rows": (same("a"), {"a": (8, 3)}, (8, 3), 0),
    "the same, by columns": (same("a"), {"a": (3, 8)}, (3, 8), 1),
    "the same, whole": (same("a"), {"a": (5,)}, (5,), None),
    "a scalar": (same("a"), {"a": ()}, (), None),
    "a convolution": (same("a"), {"a": (4, 3, 2, 5)}, (4, 3, 2, 5), None),
    "queries, keys, values": (
        interleaved(("q", "k", "v"), 4),
        {"q": (24, 3), "k": (8, 3), "v": (8, 3)},
        (40, 3),
        0,
    ),
    "their biases": (interleaved(("q", "k", "v"), 4), {"q": (24,), "k": (8,), "v": (8,)}, (40,), 0),
    "one after the other": (regrouped("qkv", 3, 4), {"qkv": (24, 2)}, (24, 2), 0),
}


def parameters_by_rank(name: str, tensor_size: int) -> tuple[list[LocalParameter], dict[str, torch.Tensor]]:
    """What each tensor-parallel rank holds, and the sources: every element is another number."""
    mapping, shapes, whole_shape, dim = MAPPINGS[name]
    values: dict[str, torch.Tensor] = {}
    base = 0
    for source, shape in shapes.items():
        values[source] = torch.arange(base, base + math.prod(shape), dtype=torch.float32).view(shape)
        base += math.prod(shape)
    whole = mapping.join([values[s] for s in mapping.sources])
    assert tuple(whole.shape) == whole_shape
    found = []
    for rank in range(tensor_size):
        part = whole if dim is None else whole.chunk(tensor_size, dim)[rank]
        param: Any = nn.Parameter(part.clone())
        if dim is not None:
            param.tensor_model_parallel, param.partition_dim = True, dim
        chunk: Any = nn.Module()
        chunk.weight = param
        chunk.param_mapping = lambda _: mapping
        found += local_parameters([chunk], shapes, rank, tensor_size)
    return found, values


def cut(total: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    ends = [0, *[c * total // 100 for c in cuts], total]
    return [(a, b) for a, b in itertools.pairwise(ends) if a < b]


@pytest.mark.parametrize("cuts", [(), (50,), (7, 9, 61), (3, 20, 21, 22, 40, 97)], ids=lambda c: f"{len(c)} cuts")
@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("name", MAPPINGS)
def test_ranges_of_elements_become_rectangles_of_the_sources(name: str, tensor_size: int, cuts: Sequence[int]) -> None:
    """Out of a rank's flat elements and back, in every layout; and no element twice."""
    ranks, values = parameters_by_rank(name, tensor_size)
    writers = ranks if ranks[0].is_split else ranks[:1]
    counts = {source: torch.zeros(value.shape) for source, value in values.items()}
    for parameter in writers:
        for span in cut(parameter.param.numel(), cuts):
            flat = parameter.param.detach().flatten()[span[0] : span[1]]
            filled = torch.full_like(flat, torch.nan)
            for part in parameter.parts(span):
                where = tuple(slice(start, start + length) for start, length in part.region)
                expected = values[part.source][where]
                counts[part.source][where] += 1
                assert torch.equal(part.value(parameter.param.detach()), expected)
                assert torch.equal(part.value(flat), expected)
                part.put(filled, expected)
            assert torch.equal(filled, flat)
    for source, count in counts.items():
        assert bool((count == 1).all()), source


def test_rows_that_are_neighbours_are_one_part() -> None:
    """Queries of all groups lie together in their tensor; a checkpoint holds them as one piece."""
    (parameter,), values = parameters_by_rank("queries, keys, values", 1)
    parts = parameter.parts()
    assert [(p.source, p.region[0]) for p in parts] == [("q", (0, 24)), ("k", (0, 8)), ("v", (0, 8))]
    assert [len(p.pieces) for p in parts] == [4, 4, 4]
    assert torch.equal(parts[0].value(parameter.param.detach()), values["q"])


@pytest.mark.parametrize(
    ("shape", "start", "end", "expected"),
    [
        ((4, 3), 0, 12, [((0, 4), (0, 3))]),
        ((4, 3), 1, 2, [((0, 1), (1, 1))]),
        ((4, 3), 3, 5, [((1, 1), (0, 2))]),
        ((4, 3), 2, 10, [((0, 1), (2, 1)), ((1, 2), (0, 3)), ((3, 1), (0, 1))]),
        ((4, 3), 5, 5, []),
        ((2, 2, 3), 4, 12, [((0, 1), (1, 1), (1, 2)), ((1, 1), (0, 2), (0, 3))]),
        ((7,), 2, 6, [((2, 4),)]),
        ((), 0, 1, [()]),
    ],
)
def test_rectangles(shape: tuple[int, ...], start: int, end: int, expected: list[Any]) -> None:
    assert rectangles(shape, start, end) == expected
    index = torch.arange(math.prod(shape)).view(shape)
    found = [index[tuple(slice(s, s + n) for s, n in region)].reshape(-1) for region in rectangles(shape, start, end)]
    assert torch.cat(found or [index[:0].view(-1)]).tolist() == list(range(start, end))


def model(tied_copy: bool = False) -> list[LocalParameter]:
    """A large, a replicated, a frozen and, on a last stage, a copied tensor."""
    chunk: Any = nn.Module()
    chunk.large, chunk.norm, chunk.frozen = (nn.Parameter(torch.zeros(s)) for s in ((90, 7), (7,), (40, 3)))
    chunk.frozen.requires_grad_(False)
    chunk.large.tensor_model_parallel, chunk.large.partition_dim = True, 0
    if tied_copy:
        chunk.head = nn.Parameter(torch.zeros(5, 7))
        chunk.head.shared = True
    chunk.param_mapping = same
    return local_parameters([chunk], None, 0, 2)


@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_replicas_share_the_writing_evenly(data_size: int) -> None:
    parameters = model(tied_copy=True)
    written = {h: torch.zeros(h.param.numel()) for h in parameters}
    loads = []
    for rank in range(data_size):
        mine = to_write(parameters, {}, spread=False, tensor_rank=0, data_rank=rank, data_size=data_size)
        for h, (start, end) in mine:
            written[h][start:end] += 1
        loads.append(sum(end - start for _, (start, end) in mine))
    assert max(loads) - min(loads) <= 1
    assert [bool((count == 1).all()) for count in written.values()] == [True, True, True, False]
    assert not written[parameters[3]].any()  # the stage with the embedding answers for it
    (only, _), *others = to_write(parameters, {}, spread=False, tensor_rank=1, data_rank=0, data_size=1)
    assert only is parameters[0] and not others  # what is alike on tensor-parallel ranks is the first one's


def test_what_the_distributed_optimizer_owns_its_owner_writes() -> None:
    large, norm, frozen = parameters = model()
    mains = {large.param: MainParameter(torch.zeros(600), (30, 630), {}, {})}
    mine = to_write(parameters, mains, spread=True, tensor_rank=0, data_rank=1, data_size=2)
    assert mine == [(large, (30, 630)), (frozen, (60, 120))]  # the other rank steps the norm
    assert norm not in dict(mine)


def test_chunks_and_model_that_do_not_belong_together_are_refused() -> None:
    chunk: Any = nn.Module()
    chunk.weight = nn.Parameter(torch.zeros(4, 3))
    chunk.param_mapping = lambda _: same("a")
    with pytest.raises(CheckpointError, match=r"a give a tensor of shape \(5, 3\), and weight is \(4, 3\) as a whole"):
        local_parameters([chunk], {"a": (5, 3)}, 0, 1)
    with pytest.raises(CheckpointError, match="weight consists of a, which the transformers model does not have"):
        local_parameters([chunk], {"b": (4, 3)}, 0, 1)


def test_models_of_their_own_keep_their_names_with_global_layer_numbers() -> None:
    layers = [SimpleNamespace(layer_number=n) for n in (3, 4)]
    chunk: Any = nn.Module()
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList(nn.Linear(2, 2) for _ in layers)
    for layer, described in zip(chunk.decoder.layers, layers):
        layer.layer_number = described.layer_number
    name_of = own_names(chunk)
    assert name_of("decoder.layers.0.weight") == same("decoder.layers.2.weight")
    assert name_of("decoder.layers.1.bias") == same("decoder.layers.3.bias")
    assert name_of("output_layer.weight") == same("output_layer.weight")
    chunk.share_embeddings_and_output_weights = True
    assert own_names(chunk)("output_layer.weight") == same("embedding.word_embeddings.weight")
