"""Regions of lazy tensors equal the same regions of the tensors that the same operations make."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from mindspeed_mm.checkpoint.lazy import LazyTensor, Region, leaf, whole

A = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
B = -torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
Maker = Callable[..., torch.Tensor]


def lazily(tensor: torch.Tensor, log: list[int] | None = None) -> LazyTensor:
    def read(name: str, region: Region) -> torch.Tensor:
        part = tensor[tuple(slice(s, s + n) for s, n in region)]
        if log is not None:
            log.append(part.numel())
        return part

    return leaf("x", tensor.shape, tensor.dtype, read)


OPERATIONS: dict[str, Maker] = {
    "cat": lambda a, b: torch.cat([a, b], dim=1),
    "cat of three, last dim": lambda a, b: torch.cat([a, b, a], dim=-1),
    "stack": lambda a, b: torch.stack([a, b, a], dim=1),
    "stack then cat (experts)": lambda a, b: torch.cat(
        [torch.stack(list(a.unbind(0))), torch.stack(list(b.unbind(0)))], dim=1
    ),
    "chunk": lambda a, b: torch.chunk(torch.cat([a, b], dim=1), 5, dim=1)[2],
    "split sizes": lambda a, b: a.split([1, 2, 3], dim=1)[2],
    "transpose": lambda a, b: a.transpose(0, 2).contiguous(),
    "permute": lambda a, b: torch.cat([a, b], dim=0).permute(2, 0, 1),
    "t of select": lambda a, b: a[1].t(),
    "slice and negative select": lambda a, b: a[1:3, -1],
    "squeeze": lambda a, b: a[:, 2:3].squeeze(1),
    "unsqueeze": lambda a, b: a.unsqueeze(-2)[:, 1:],
    "ellipsis, to": lambda a, b: a[...].to("cpu", torch.float64),
    "reshape (computed)": lambda a, b: torch.cat([a, b], dim=1).reshape(8, 30),
    "step (computed)": lambda a, b: a[:, ::2],
    "arithmetic (computed), then chunk": lambda a, b: torch.chunk(a * 2 + b[:, :1], 2, dim=1)[1],
    "view and permute for rope": lambda a, b: a.view(4, 3, 2, 5).transpose(1, 2).reshape(24, 5),
    "topk (several outputs)": lambda a, b: torch.topk(a, 2, dim=1)[0],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_region_is_that_of_the_whole(name: str) -> None:
    expected = OPERATIONS[name](A, B)
    made = OPERATIONS[name](lazily(A), lazily(B))
    assert isinstance(made, LazyTensor)
    assert made.shape == expected.shape and made.dtype == expected.dtype
    draw = random.Random(0)
    for _ in range(30):
        region = []
        for size in expected.shape:
            start = draw.randrange(size)
            region.append((start, draw.randint(0, size - start)))
        part = expected[tuple(slice(s, s + n) for s, n in region)]
        assert torch.equal(made.node.read(tuple(region)), part)
        out = torch.full(part.shape, torch.nan, dtype=expected.dtype)
        made.node.read_into(tuple(region), out)
        assert torch.equal(out, part)


def test_only_what_a_region_needs_is_read() -> None:
    log: list[int] = []
    experts = torch.cat([torch.stack([lazily(A[i], log) for i in range(4)])] * 2, dim=1)
    out = torch.empty(1, 12, 5)
    experts.node.read_into(((2, 1), (0, 12), (0, 5)), out)
    assert log == [30, 30]
    assert torch.equal(out[0, :6], A[2])


def test_a_region_of_one_leaf_shares_its_memory() -> None:
    lazy = lazily(A)[1:3].to(torch.float32)
    assert lazy.node.read(((0, 1), (0, 6), (0, 5))).data_ptr() == A[1].data_ptr()


def test_rounding_on_the_way_is_kept() -> None:
    value = torch.tensor([1.0 + 2**-12])
    rounded = lazily(value).to(torch.bfloat16).to(torch.float32)
    out = torch.empty(1)
    rounded.node.read_into(whole((1,)), out)
    assert out.item() == 1.0
    widened = lazily(value.bfloat16()).to(torch.float32)
    assert widened.node.read(whole((1,))).dtype == torch.float32


def test_parameters_of_modules_may_be_lazy() -> None:
    layer = torch.nn.Linear(5, 6, device="meta")
    layer.weight = torch.nn.Parameter(lazily(A[0]))
    assert isinstance(layer.weight, LazyTensor)
    assert torch.equal(layer.weight.node.read(whole((6, 5))), A[0])
