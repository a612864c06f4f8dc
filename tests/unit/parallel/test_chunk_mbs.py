"""A module on chunks of a micro-batch: how often it runs, on what, what is refused, and that numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.parallel.chunk_mbs import ChunkPlan, apply_chunks
from mindspeed_mm.parallel.offload import apply_offload
from mindspeed_mm.parallel.recompute import apply_recompute
from mindspeed_mm.utils.errors import ConfigError
from tests.support.live_bytes import LiveBytes

ROWS, TOKENS, WIDTH = 4, 8, 16
SHARED = torch.full((ROWS,), 0.2)  # not named, so that no chunk has a part of it


class Block(nn.Module):
    """Attention with a mask and tables of positions, as transformers calls its layers."""

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.linear, self.out, self.dim = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH), dim
        self.runs: list[int] = []

    def forward(self, x: torch.Tensor, shared: Any, mask: Any = None, tables: Any = None, **kwargs: Any) -> Any:
        self.runs.append(x.shape[self.dim])
        cos, sin = tables
        y = (x * cos + x.flip(-1) * sin) * shared.sum()
        scores = (y @ y.transpose(-1, -2)).masked_fill(mask, -1e9).softmax(-1)
        return x + self.out(self.linear(scores @ y).relu())


def arguments(rows: int = ROWS, dim: int = 0) -> tuple[torch.Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, TOKENS, WIDTH, generator=generator).transpose(0, dim)
    mask = torch.rand(rows, TOKENS if dim == 0 else rows, TOKENS if dim == 0 else rows, generator=generator) < 0.2
    tables = tuple(torch.randn(1, TOKENS, WIDTH, generator=generator).transpose(0, dim) for _ in range(2))
    return x.contiguous().requires_grad_(), {"mask": mask, "tables": tables}


def block_with(plan: ChunkPlan | None, use_reentrant: bool = False, offload: bool = False) -> Block:
    torch.manual_seed(0)
    block = Block()
    apply_recompute({"layers.0": block}, use_reentrant)
    if offload:
        apply_offload({"layers.0": block})
    if plan is not None:
        apply_chunks({"layers.0": block}, plan)
    return block


def step(block: Block) -> tuple[list[torch.Tensor], int]:
    """Loss and gradients; most bytes alive at once."""
    x, kwargs = arguments()
    with LiveBytes() as live:
        loss = block(x, SHARED, **kwargs).square().sum()
        loss.backward()
    return [loss, x.grad, *(p.grad for p in block.parameters())], live.peak  # type: ignore[list-item]


PLAN = ChunkPlan(1, kwargs=("mask", "tables"))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(("size", "runs"), [(1, [1] * 4), (3, [3, 1]), (4, [4]), (9, [4])])
def test_numbers_stay(size: int, runs: list[int], use_reentrant: bool) -> None:
    expected, most = step(block_with(None))
    plan = ChunkPlan(size, kwargs=("mask", "tables"))
    block = block_with(plan, use_reentrant, offload=True)
    found, peak = step(block)
    assert block.runs == runs + sorted(runs)  # those of backward: each chunk again, in the opposite order
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], expected[0]) or abs(found[0] / expected[0] - 1) < 1e-6
    assert size > 1 or peak < 0.8 * most


def test_a_forward_pass_of_evaluation_is_whole() -> None:
    block = block_with(PLAN)
    x, kwargs = arguments()
    with torch.no_grad():
        block(x, SHARED, **kwargs)
    block.eval()(x, SHARED, **kwargs)
    assert block.runs == [ROWS, ROWS]


def refused(plan: ChunkPlan = PLAN, rows: int = ROWS, **changes: Any) -> str:
    x, kwargs = arguments(rows)
    with pytest.raises(ConfigError) as caught:
        block_with(plan)(x, SHARED, **{**kwargs, **changes})
    return str(caught.value)


def test_what_can_not_work_is_a_sentence() -> None:
    assert "'layers.0' is given one row only" in refused(rows=1)
    lengths = torch.tensor([0, 3, 32])
    assert "'cu_seq_lens_q', the boundaries of samples in all rows" in refused(cu_seq_lens_q=lengths)
    assert "has shape [3, 8, 16]; expected 4 rows" in refused(tables=(torch.ones(3, TOKENS, WIDTH),) * 2)
    in_time = torch.ones(3, 3, TOKENS, WIDTH)  # a dimension of time, height and width, before that of the rows
    assert "has shape [3, 3, 8, 16]; expected 3 rows" in refused(rows=3, tables=(in_time, in_time))
    assert "positional arguments and the keyword arguments mask, tables" in refused(ChunkPlan(1, args=(4,)))
    not_named = ChunkPlan(1, kwargs=("tables",))
    assert "returns a tensor of shape [4, 8, 16] for a chunk of 1 rows" in refused(not_named)
