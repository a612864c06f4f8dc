"""Ring attention on 1, 2 and 4 ranks against plain attention of whole documents in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.accelerator.attention import PlainAttention
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.parallel import ring as ring_module
from mindspeed_mm.parallel.ring import ring_attention
from mindspeed_mm.parallel.world import RankSet
from tests.support.live_bytes import LiveBytes
from tests.support.workers import RankPool

SCALE = 0.3
PACKED = ((1, 7, 29, 16), (40, 13))


@dataclass(frozen=True)
class Case:
    """Rows of documents, and the attention over them.

    Attributes:
        documents: for each row the lengths of its documents.
        heads: query heads and key heads.
        sizes: head size of queries and keys, and of values.
        padding: tokens of padding at the end of each rank's rows, beyond what rows of different lengths need.
        packs: with a kernel that takes packed sequences.
    """

    documents: tuple[tuple[int, ...], ...] = PACKED
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (8, 8)
    window: int | None = None
    sinks: bool = False
    padding: int = 0
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    packs: bool = False

    def chunks(self, ranks: int) -> list[list[int]]:
        return [[-(-length // (2 * ranks)) for length in row] for row in self.documents]

    def inputs(self) -> dict[str, Tensor]:
        """Query, key, value, the gradient of the output, of whole rows `[batch, heads, tokens, size]`, and sinks."""
        generator = torch.Generator().manual_seed(0)
        tokens = max(sum(row) for row in self.documents)
        (query_heads, key_heads), (size, value_size) = self.heads, self.sizes

        def draw(heads: int, size: int) -> Tensor:
            return torch.randn(len(self.documents), heads, tokens, size, generator=generator).to(self.dtype)

        tensors = {"query": draw(query_heads, size), "key": draw(key_heads, size), "value": draw(key_heads, value_size)}
        tensors["grad_out"] = draw(query_heads, value_size)
        if self.sinks:
            tensors["sinks"] = torch.randn(query_heads, generator=generator).to(self.dtype)
        return tensors

    def places(self, ranks: int, rank: int) -> list[list[tuple[int, int]]]:
        """For each row (place on the rank, place in the row) of the rank's tokens, those of padding left out."""
        found = []
        for row, chunks in zip(self.documents, self.chunks(ranks)):
            here, document, places = 0, 0, []
            for length, chunk in zip(row, chunks):
                for part in (rank, 2 * ranks - 1 - rank):
                    inside = range(part * chunk, (part + 1) * chunk)
                    places += [(here + i, document + x) for i, x in enumerate(inside) if x < length]
                    here += chunk
                document += length
            found.append(places)
        return found

    def local_tokens(self, ranks: int) -> int:
        return max(2 * sum(row) for row in self.chunks(ranks)) + self.padding


CASES = {
    "packed rows": Case(padding=3),
    "equal rows": Case(((24, 9), (24, 9)), heads=(2, 2)),
    "one key head": Case(heads=(4, 1)),
    "sinks": Case(sinks=True),
    "window of 5": Case(window=5),
    "window of 2": Case(window=2),
    "wide window and sinks": Case(window=19, sinks=True),
    "window over several queries at a time": Case(((3000,),), heads=(1, 1), window=300),
    "smaller values (MLA)": Case(sizes=(12, 8)),
    "larger values": Case(sizes=(4, 8)),
    "recompute": Case(sinks=True, recompute=True),
    "packing kernel": Case(padding=3, packs=True, sinks=True),
    "packing kernel, equal rows, a window": Case(((24, 9, 5), (24, 9, 5)), packs=True, window=6),
    "bf16": Case(dtype=torch.bfloat16, sinks=True),
    "fp16 window": Case(dtype=torch.float16, window=19),
}


class PackingKernel(PlainAttention):
    """Takes packed sequences, one after the other."""

    takes_packed = True

    def forward(self, query, key, value, *, lengths=None, **how):  # type: ignore[no-untyped-def]
        if lengths is None:
            return super().forward(query, key, value, **how)
        assert query.shape[0] == 1
        parts = zip(query.split(lengths.queries, 1), *(t.split(lengths.keys, 1) for t in (key, value)))
        return tuple(
            torch.cat(part, 1) for part in zip(*(super(PackingKernel, self).forward(*p, **how) for p in parts))
        )

    def backward(self, grad_out, query, key, value, out, lse, *, lengths=None, **how):  # type: ignore[no-untyped-def]
        if lengths is None:
            return super().backward(grad_out, query, key, value, out, lse, **how)
        of_queries = (t.split(lengths.queries, 1) for t in (grad_out, query))
        of_keys = (t.split(lengths.keys, 1) for t in (key, value))
        parts = zip(*of_queries, *of_keys, *(t.split(lengths.queries, 1) for t in (out, lse)))
        return tuple(
            torch.cat(part, 1) for part in zip(*(super(PackingKernel, self).backward(*p, **how) for p in parts))
        )


def reference(case: Case) -> dict[str, Tensor]:
    """The output and all gradients, in fp32, document by document."""
    given = {name: tensor.float().requires_grad_(name != "grad_out") for name, tensor in case.inputs().items()}
    groups = case.heads[0] // case.heads[1]
    out = torch.zeros_like(given["grad_out"])
    for row, lengths in enumerate(case.documents):
        start = 0
        for length in lengths:
            query, key, value = (given[name][row, :, start : start + length] for name in ("query", "key", "value"))
            key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            unseen = (distance < 0) | (distance >= (case.window or length))
            scores = (query @ key.mT * SCALE).masked_fill(unseen, -torch.inf)
            if "sinks" in given:
                scores = torch.cat([scores, given["sinks"].view(-1, 1, 1).expand(-1, length, 1)], -1)
            out[row, :, start : start + length] = scores.softmax(-1)[..., :length] @ value
            start += length
    out.backward(given["grad_out"])
    return {"out": out.detach()} | {name: tensor.grad for name, tensor in given.items() if tensor.grad is not None}


def cut(tensor: Tensor, places: list[list[tuple[int, int]]], tokens: int) -> Tensor:
    """A rank's tokens; padding holds numbers too, which nothing may see."""
    local = torch.full((*tensor.shape[:2], tokens, tensor.shape[3]), 3.0, dtype=tensor.dtype)
    for row, pairs in enumerate(places):
        here, there = (list(of) for of in zip(*pairs)) if pairs else ([], [])
        local[row, :, here] = tensor[row, :, there]
    return local


def run_case(case: Case) -> dict[str, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ring = RankSet(rank, ranks, dist.group.WORLD)
    places = case.places(ranks, rank)
    whole = case.inputs()
    sinks = whole.pop("sinks", None)
    local = {name: cut(tensor, places, case.local_tokens(ranks)) for name, tensor in whole.items()}
    seen = torch.zeros_like(local["grad_out"])
    for row, pairs in enumerate(places):
        seen[row, :, [here for here, _ in pairs]] = 1
    grad_out = local.pop("grad_out") * seen
    leaves = [tensor.requires_grad_() for tensor in local.values()]
    if sinks is not None:
        sinks.requires_grad_()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(
            query, key, value, chunks=case.chunks(ranks), ring=ring, scale=SCALE, window=case.window, sinks=sinks
        )

    kernel = PackingKernel() if case.packs else CPUAccelerator().attention_kernel(*leaves[:2])
    with mock.patch.object(CPUAccelerator, "attention_kernel", lambda *_: kernel), elements_sent() as sent:
        out = checkpoint(attend, *leaves, use_reentrant=False) if case.recompute else attend(*leaves)
        forward = sum(sent)
        out.backward(grad_out)
    of_keys = sum(leaf.numel() for leaf in leaves[1:])
    assert forward == (ranks - 1) * of_keys
    if not case.recompute:
        assert sum(sent) == forward + (ranks - 1) * of_keys + (ranks * of_keys if ranks > 1 else 0)
    found = {"out": out.detach()} | {name: tensor.grad for name, tensor in local.items()}
    return found | ({} if sinks is None else {"sinks": sinks.grad})


@contextmanager
def elements_sent() -> Iterator[list[int]]:
    """The elements of each tensor that this rank sends."""
    sent: list[int] = []
    send = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(each.tensor.numel() for each in operations if each.op is dist.isend)
        return send(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        yield sent


def run_cases(cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    return [run_case(case) for case in cases]


def assemble(case: Case, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole rows out of what each rank returned."""
    found = {}
    for name in ranks[0]:
        if name == "sinks":
            found[name] = sum(rank[name].float() for rank in ranks)
            continue
        shape = list(ranks[0][name].shape)
        shape[2] = max(sum(row) for row in case.documents)
        found[name] = torch.zeros(shape)
        for rank, tensors in enumerate(ranks):
            for row, pairs in enumerate(case.places(len(ranks), rank)):
                if pairs:
                    here, there = (list(of) for of in zip(*pairs))
                    found[name][row, :, there] = tensors[name][row, :, here].float()
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ring_equals_plain_attention(size: int, request: pytest.FixtureRequest) -> None:
    """Documents of one token, of fewer than there are chunks, of odd lengths; rows that differ; padding."""
    pool: RankPool = request.getfixturevalue(f"ranks{size}")
    by_rank = pool.run(run_cases, list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        found = assemble(case, [rank[number] for rank in by_rank])
        limit = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}[case.dtype]
        for what, expected in reference(case).items():
            off = ((found[what] - expected).norm() / expected.norm()).item()
            assert off <= limit, f"{name}: {what} is off by {off:.1e}"


# --- memory, on tensors without any


class Attention(nn.Module):
    """Projections, attention over a ring, or over whole rows where there is none, and a projection."""

    def __init__(self, ring: RankSet, window: int | None) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.key, self.value = nn.Linear(64, 32), nn.Linear(64, 32)
        self.ring, self.window = ring, window

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.ring.size == 1:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            chunks = [[hidden.shape[1] // 2]] * hidden.shape[0]
            out = ring_attention(query, key, value, chunks=chunks, ring=self.ring, scale=SCALE, window=self.window)
        return self.out(out.transpose(1, 2).flatten(2))


def memory_of(tokens: int, ring: RankSet, *, layers: int, window: int | None = None) -> LiveBytes:
    """What the activations of a stack of attention take on one rank; nothing is computed, nothing is sent."""
    silent = SimpleNamespace(
        P2POp=lambda *_, **__: None, isend=None, irecv=None, batch_isend_irecv=lambda operations: []
    )
    with FakeTensorMode(), mock.patch.object(ring_module, "dist", silent):
        model = nn.Sequential(*(Attention(ring, window) for _ in range(layers)))
        hidden = torch.empty(1, tokens // ring.size, 64)
        with LiveBytes() as live:
            model(hidden).sum().backward()
    return live


def ring_of_four(rank: int) -> RankSet:
    return RankSet(rank, 4, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_four_needs_a_third_of_the_memory(rank: int) -> None:
    """Of 16k tokens and four layers; a quarter of that is kept, the rest are blocks on their way."""
    alone = memory_of(16384, RankSet(0, 1, None), layers=4)  # type: ignore[arg-type]
    assert memory_of(16384, ring_of_four(rank), layers=4).peak <= 0.35 * alone.peak


def test_no_tensor_grows_with_the_square_of_the_length() -> None:
    """Without a window none is larger than the hidden states; under one, scores are [256, 256 + window] a head."""
    for rank in (0, 3):
        assert memory_of(8192, ring_of_four(rank), layers=1).largest == 2048 * 64
        assert memory_of(8192, ring_of_four(rank), layers=1, window=500).largest <= 4 * 256 * (256 + 500)
