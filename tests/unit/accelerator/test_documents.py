"""Attention document by document against PyTorch's own under a dense mask: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_mm.accelerator.attention import AttentionKernel, Documents, PackedLengths, document_attention
from tests.unit.accelerator.test_attention import KERNELS, SCALE, off, operators  # noqa: F401

NUMBERS = {
    "packs": [[1, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4, 4, 0, 0], [1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]],
    "padding at either end": [[1] * 9 + [0] * 5, [0] * 6 + [1] * 8],
    "rows of one length": [[1] * 14, [1] * 14],
    "equal padding": [[0] * 3 + [1] * 11, [0] * 3 + [1] * 11],
    "equal packs": [[1] * 4 + [2] * 4 + [0] * 1 + [3] * 5, [1] * 4 + [2] * 4 + [0] * 1 + [3] * 5],
    "a row of padding": [[0] * 14, [1] * 10 + [2] * 4],
}


def dense(given: list[Tensor], numbers: Tensor, causal: bool, window: int | None, sinks: Tensor | None) -> Tensor:
    """[batch, tokens, heads, head size]; padding sees itself."""
    query, key, value = given
    places = torch.arange(numbers.shape[1])
    distance = places[:, None] - places
    seen = (numbers[:, :, None] == numbers[:, None]) & (distance.abs() < (window or 10_000))
    if causal:
        seen &= distance >= 0
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = (query @ key.mT * SCALE).masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : numbers.shape[1]] @ value).transpose(1, 2)


def draw() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, 14, size).requires_grad_() for heads, size in ((4, 12), (2, 12), (2, 6))]


def compare(kernel: AttentionKernel, numbers: Tensor, with_sinks: bool = False, **how: Any) -> None:
    given = draw()
    sinks = torch.randn(4).requires_grad_() if with_sinks else None
    leaves = given if sinks is None else [*given, sinks]
    is_token = (numbers > 0)[:, :, None, None]
    grad = torch.randn(2, 14, 4, 6) * is_token
    expected = dense(given, numbers, how.get("is_causal", True), how.get("window"), sinks)
    wanted = torch.autograd.grad(expected, leaves, grad)
    found = document_attention(kernel, *given, Documents.of(numbers), scale=SCALE, sinks=sinks, **how)
    assert found.isfinite().all() and off(found * is_token, expected * is_token) < 1e-6
    for each, gradient in zip(torch.autograd.grad(found, leaves, grad), wanted, strict=True):
        assert off(each, gradient) < 1e-5


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", KERNELS)
def test_documents_see_themselves(name: str, numbers: str, operators: None) -> None:  # noqa: F811
    """Causally, wholly, in a window, and with sinks."""
    documents = torch.tensor(NUMBERS[numbers])
    for how in ({}, {"is_causal": False}, {"window": 4}, {"window": 4, "with_sinks": True}, {"with_sinks": True}):
        compare(KERNELS[name], documents, **how)


def test_a_kernel_that_ignores_lengths_is_seen(operators: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    whole = PackedLengths((28,), (28,))
    monkeypatch.setattr(Documents, "packed", whole)
    with pytest.raises(AssertionError):
        compare(KERNELS["cuda"], torch.tensor(NUMBERS["packs"]))


def test_where_documents_are() -> None:
    documents = Documents.of(torch.tensor([[1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2]]))
    assert documents.rows == (((2, True), (2, True), (1, True), (1, False)), ((1, True), (5, True)))
    assert (documents.shape, documents.longest) == ((2, 6), 5)
    assert documents.packed.queries == (2, 2, 1, 1, 1, 5)
    assert [(block.rows.start, *map(tuple, block.runs)) for block in documents.blocks] == [
        (0, (2, 2, True), (1, 1, True), (1, 1, False)),
        (1, (1, 1, True), (5, 1, True)),
    ]
    (alike,) = Documents.of(torch.tensor([[1, 1, 2, 2, 0], [5, 5, 6, 6, 0]])).blocks
    assert alike.rows == slice(0, 2) and [tuple(run) for run in alike.runs] == [(2, 1, True)] * 2 + [(1, 1, False)]
    assert documents.of_rows(1, 1).rows == documents.rows[1:]
    assert Documents.in_one_row([3, 0, 2]).shape == (1, 5)


def test_reading_longer_rows_takes_no_more_operators() -> None:
    """`unique_consecutive` compares the tokens of several rows one by one."""

    def operators_of(tokens: int) -> int:
        with torch.profiler.profile() as profile:
            Documents.of(torch.arange(2 * tokens).view(2, tokens) // 4)
        return sum(event.count for event in profile.key_averages())

    assert operators_of(1024) == operators_of(8) < 100


def test_documents_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="for documents of 1 rows of 5 tokens"):
        document_attention(KERNELS["cpu"], *draw(), Documents.in_one_row([3, 2]), scale=SCALE)
