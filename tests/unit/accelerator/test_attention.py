"""Every kernel of block attention against PyTorch's own gradients of plain attention.

Those of CUDA and of Ascend run here on stand-ins for the operators, which compute what the operators' documentation
says in the layouts it says; CUDA's layouts are also those that PyTorch itself registers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_mm.accelerator.attention import CAUSAL, AttentionKernel, Band, PackedLengths, PlainAttention
from mindspeed_mm.accelerator.attention.cpu import CPUFlashAttention
from mindspeed_mm.accelerator.attention.cuda import CUDAFlashAttention
from mindspeed_mm.accelerator.attention.host_operator import choose_host_kernels
from mindspeed_mm.accelerator.attention.kernel import PaddedHeads
from mindspeed_mm.accelerator.attention.npu import NPUFusionAttention
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.accelerator.cuda import CUDAAccelerator
from mindspeed_mm.accelerator.npu import NPUAccelerator

SCALE = 0.4
PLAIN = PlainAttention()


# --- stand-ins for operators that are not here


def each_sequence(
    query: Tensor, key: Tensor, query_ends: list[int], key_ends: list[int]
) -> Iterator[tuple[slice, slice]]:
    assert (query_ends[-1], key_ends[-1]) == (query.shape[0], key.shape[0])
    yield from zip((slice(*ends) for ends in pairwise([0, *query_ends])), (slice(*e) for e in pairwise([0, *key_ends])))


def plain_forward(tensors: list[Tensor], band: Band | None, ends: tuple[list[int], list[int]], scale: float) -> Any:
    query, key, value = tensors
    out, lse = torch.empty(*query.shape[:2], value.shape[-1]), torch.empty(query.shape[:2])
    for q, k in each_sequence(query, key, *ends):
        parts = PLAIN.forward(query[None, q], key[None, k], value[None, k], band=band, scale=scale)
        out[q], lse[q] = (part[0] for part in parts)
    return out.to(query.dtype), lse


def plain_backward(
    tensors: list[Tensor], lse: Tensor, band: Band | None, ends: tuple[list[int], list[int]], scale: float
) -> Any:
    grad_out, query, key, value, out = tensors
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)]
    for q, k in each_sequence(query, key, *ends):
        given = (grad_out[None, q], query[None, q], key[None, k], value[None, k], out[None, q], lse[None, q])
        for grad, where, part in zip(grads, (q, k, k), PLAIN.backward(*given, band=band, scale=scale)):
            grad[where] = part[0]
    return grads


class FlashOperators:
    """`aten::_flash_attention_forward` and `_backward` of packed sequences."""

    def _read(
        self, query: Tensor, offsets: tuple[Tensor, Tensor], sizes: tuple[int, int], causal: bool, how: dict[str, Any]
    ) -> Any:
        assert query.shape[-1] % 8 == 0 and all(o.dtype == torch.int32 and o[0] == 0 for o in offsets)
        assert sizes == tuple(int(o.diff().max()) for o in offsets)
        left, right = how.get("window_size_left"), how.get("window_size_right")
        assert (left is None) == (right is None) and right in (None, 0) and (causal or left is None)
        band = Band(0, None if left is None else left + 1) if causal else None
        return band, tuple(o[1:].tolist() for o in offsets)

    def forward(self, query, key, value, starts_q, starts_k, max_q, max_k, dropout, causal, debug, **how: Any) -> Any:  # type: ignore[no-untyped-def]
        assert (dropout, debug) == (0.0, False)
        band, ends = self._read(query, (starts_q, starts_k), (max_q, max_k), causal, how)
        out, lse = plain_forward([query, key, value], band, ends, how["scale"])
        return out, lse.T.contiguous(), None, None, None

    def backward(
        self,
        grad,
        query,
        key,
        value,
        out,
        lse,
        starts_q,
        starts_k,
        max_q,
        max_k,
        dropout,
        causal,
        seed,
        unused,
        **how: Any,
    ) -> Any:  # type: ignore[no-untyped-def]
        assert lse.shape == (query.shape[1], query.shape[0]) and lse.is_contiguous() and dropout == 0.0
        band, ends = self._read(query, (starts_q, starts_k), (max_q, max_k), causal, how)
        return plain_backward([grad, query, key, value, out], lse.T, band, ends, how["scale"])


class FusionOperators:
    """`torch_npu.npu_fusion_attention` and its gradient, in the layout TND."""

    def _band(self, how: dict[str, Any], layout: str, value: Tensor, key: Tensor) -> tuple[Band | None, Any]:
        assert layout == "TND" and value.shape == key.shape and how["keep_prob"] == 1.0
        mask = how["atten_mask"]
        if how["sparse_mode"] == 0:
            assert mask is None
        else:
            assert how["sparse_mode"] == 3 and torch.equal(mask, torch.ones(2048, 2048).triu(1).bool())
        return None if mask is None else CAUSAL, (how["actual_seq_qlen"], how["actual_seq_kvlen"])

    def npu_fusion_attention(
        self, query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, **how: Any
    ) -> Any:
        band, ends = self._band(how, layout, value, key)
        assert heads == query.shape[1]
        out, lse = plain_forward([query, key, value], band, ends, how["scale"])
        maximum = lse - 1.5  # any number is a maximum that the sum is taken above
        total = torch.full_like(lse, 1.5).exp()
        return out, *(t[..., None].expand(-1, -1, 8) for t in (maximum, total)), torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, heads: int, layout: str, **how: Any
    ) -> Any:
        band, ends = self._band(how, layout, value, key)
        maximum, total = how["softmax_max"], how["softmax_sum"]
        assert maximum.shape == total.shape == (*query.shape[:2], 8) and heads == query.shape[1]
        lse = maximum[..., 7] + total[..., 7].log()
        given = [grad, query, key, value, how["attention_in"]]
        return *plain_backward(given, lse, band, ends, how["scale_value"]), None, None


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins in the operators' places."""
    flash = FlashOperators()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    monkeypatch.setattr(torch.ops, "npu", FusionOperators(), raising=False)


KERNELS: dict[str, AttentionKernel] = {
    "plain": PLAIN,
    "cpu": PaddedHeads(CPUFlashAttention()),
    "cpu, heads repeated": PaddedHeads(CPUFlashAttention(takes_groups=False)),
    "cuda": PaddedHeads(CUDAFlashAttention(), multiple=8),
    "ascend": PaddedHeads(NPUFusionAttention()),
}


# --- the tests


def plain_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    groups = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(groups, 2).transpose(1, 2) for tensor in (key, value))
    scores = (query.transpose(1, 2) @ key.mT * SCALE).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def draw(rows: int, queries: int, keys: int, sizes: tuple[int, int]) -> list[Tensor]:
    """Query, key, value, and the gradient of the output, in fp32."""
    shapes = ((queries, 4, sizes[0]), (keys, 2, sizes[0]), (keys, 2, sizes[1]), (queries, 4, sizes[1]))
    return [torch.randn(rows, *shape) for shape in shapes]


def off(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def attend_by_blocks(
    kernel: AttentionKernel, given: list[Tensor], blocks: list[tuple[slice, Band | None]]
) -> list[Tensor]:
    """Output and gradients of query, key and value, out of blocks of the keys."""
    query, key, value, grad_out = given
    forwards = [kernel.forward(query, key[:, k], value[:, k], band=band, scale=SCALE) for k, band in blocks]
    lse = torch.stack([block for _, block in forwards]).logsumexp(0)
    out = sum((lse_block - lse).exp().unsqueeze(-1) * block for block, lse_block in forwards)
    assert isinstance(out, Tensor)
    grads = [torch.zeros_like(tensor) for tensor in given[:3]]
    for k, band in blocks:
        of_block = kernel.backward(grad_out, query, key[:, k], value[:, k], out, lse, band=band, scale=SCALE)
        for grad, where, part in zip(grads, (slice(None), k, k), of_block):
            grad[:, where] += part
    return [out, *grads]


@pytest.mark.parametrize("sizes", [(8, 8), (12, 6), (6, 12)], ids=["one size", "smaller values", "larger values"])
@pytest.mark.parametrize("name", KERNELS)
def test_blocks_make_up_attention_to_all_keys(name: str, sizes: tuple[int, int], operators: None) -> None:
    """13 keys that all queries see, then 19 that are seen causally."""
    torch.manual_seed(0)
    given = draw(2, 19, 32, sizes)
    found = attend_by_blocks(KERNELS[name], given, [(slice(0, 13), None), (slice(13, 32), CAUSAL)])
    leaves = [tensor.requires_grad_() for tensor in given[:3]]
    out = plain_attention(*leaves, torch.ones(19, 32, dtype=torch.bool).tril(13))
    out.backward(given[3])
    for what, expected in zip(found, [out.detach(), *(leaf.grad for leaf in leaves)]):
        assert expected is not None and off(what, expected) < 1e-6


@pytest.mark.parametrize("name", ["cuda", "ascend"])
def test_packed_sequences_do_not_see_each_other(name: str, operators: None) -> None:
    torch.manual_seed(0)
    kernel, lengths = KERNELS[name], PackedLengths((3, 9, 1), (5, 9, 2))
    assert kernel.takes_packed and not PLAIN.takes_packed
    query, key, value, grad_out = draw(1, 13, 16, (6, 6))
    out, lse = kernel.forward(query, key, value, band=None, scale=SCALE, lengths=lengths)
    grads = kernel.backward(grad_out, query, key, value, out, lse, band=None, scale=SCALE, lengths=lengths)
    for q, k in each_sequence(query[0], key[0], list(lengths.query_ends), list(lengths.key_ends)):
        leaves = [t.detach().requires_grad_() for t in (query[:, q], key[:, k], value[:, k])]
        expected = plain_attention(*leaves, torch.ones(q.stop - q.start, k.stop - k.start, dtype=torch.bool))
        expected.backward(grad_out[:, q])
        assert off(out[:, q], expected.detach()) < 1e-6
        for grad, where, leaf in zip(grads, (q, k, k), leaves):
            assert leaf.grad is not None and torch.allclose(grad[:, where], leaf.grad, atol=1e-6)


@pytest.mark.parametrize(
    "name, band",
    [
        ("plain", Band(0, 5)),
        ("plain", Band(290, 300)),
        ("plain", Band(40, 60)),
        ("plain", Band(-400)),
        ("cuda", Band(0, 5)),
    ],
)
def test_bands(name: str, band: Band, operators: None) -> None:
    """More queries than are computed at a time; some see nothing of the block, and get nothing from it."""
    torch.manual_seed(0)
    kernel = KERNELS[name]
    assert kernel.takes(band) and kernel.takes(CAUSAL) and kernel.takes(None)
    given = draw(1, 600, 500, (8, 8))
    distance = band.offset + torch.arange(600)[:, None] - torch.arange(500)
    seen = (distance >= 0) & (distance < (band.window or 10_000))
    if name == "cuda":
        given, seen = [tensor[:, :500] for tensor in given], seen[:500]
    query, key, value, grad_out = given
    out, lse = kernel.forward(query, key, value, band=band, scale=SCALE)
    some = seen.any(-1)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    expected = plain_attention(leaves[0][:, some], *leaves[1:], seen[some])
    expected.backward(grad_out[:, some])
    assert off(out[:, some], expected.detach()) < 1e-6
    assert not out[:, ~some].any() and (lse[:, ~some] == -torch.inf).all()
    finite = lse.masked_fill(~some[:, None], 0.0)
    for grad, leaf in zip(kernel.backward(grad_out, query, key, value, out, finite, band=band, scale=SCALE), leaves):
        assert leaf.grad is not None and off(grad, leaf.grad) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch has it since 2.9")
def test_the_host_computes_gradients_of_short_rows_in_float32(dtype: torch.dtype) -> None:
    """Bit for bit those that PyTorch's operator has for the same numbers in float32, rounded."""
    choose_host_kernels()
    torch.manual_seed(0)
    given = draw(2, 40, 40, (16, 16))
    query, key, value, grad_out = (tensor.to(dtype) for tensor in given)
    out, lse = CPUFlashAttention().forward(query, key, value, band=CAUSAL, scale=SCALE)
    grads = CPUFlashAttention().backward(grad_out, query, key, value, out, lse, band=CAUSAL, scale=SCALE)
    wider = [tensor.float().transpose(1, 2) for tensor in (grad_out, query, key, value, out)]
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for grad, expected in zip(grads, operator(*wider, lse.transpose(1, 2), 0.0, True, scale=SCALE)):
        assert expected.dtype == torch.float32 and torch.equal(grad, expected.transpose(1, 2).to(dtype))


def test_the_host_computes_gradients_of_float64_as_before() -> None:
    choose_host_kernels()
    torch.manual_seed(0)
    query, key, value, grad_out = (tensor.double() for tensor in draw(2, 40, 40, (16, 16)))
    key, value = (tensor.repeat_interleave(2, 2) for tensor in (key, value))
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, scale=SCALE).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, grad_out)
    expected = plain_attention(*(leaf.transpose(1, 2) for leaf in leaves), torch.ones(40, 40, dtype=torch.bool))
    for found, of in zip(grads, torch.autograd.grad(expected, leaves, grad_out), strict=True):
        assert off(found, of) < 1e-12


def test_kernels_take_what_they_say() -> None:
    for kernel in (CPUFlashAttention(), CUDAFlashAttention(), PaddedHeads(CPUFlashAttention())):
        assert kernel.takes(None) and kernel.takes(CAUSAL) and not kernel.takes(Band(3, 5))
    assert not CPUFlashAttention().takes(Band(0, 5))


def test_cuda_operators_return_what_the_kernel_expects() -> None:
    """PyTorch's own registration of the operators' shapes, on tensors without memory."""
    kernel, lengths = PaddedHeads(CUDAFlashAttention(), multiple=8), PackedLengths((10, 6), (10, 6))
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 16, heads, 20, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        out, lse = kernel.forward(query, key, value, band=Band(0, 5), scale=SCALE, lengths=lengths)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (query.shape, query.dtype, (1, 16, 4), torch.float32)
        grads = kernel.backward(out, query, key, value, out, lse, band=CAUSAL, scale=SCALE, lengths=lengths)
        assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_each_device_chooses_a_kernel() -> None:
    half, wide, single = (
        torch.empty(1, 1, 1, size, dtype=dtype)
        for size, dtype in ((128, torch.bfloat16), (320, torch.bfloat16), (128, torch.float32))
    )
    cuda = CUDAAccelerator()
    assert isinstance(cuda.attention_kernel(half, half), PaddedHeads)
    assert isinstance(cuda.attention_kernel(half, wide), PlainAttention)
    assert isinstance(cuda.attention_kernel(single, single), PlainAttention)
    assert isinstance(CPUAccelerator().attention_kernel(single, single), PaddedHeads)


def test_ascend_chooses_its_fused_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=None))  # type: ignore[arg-type]
    assert NPUAccelerator().attention_kernel(torch.empty(0), torch.empty(0)).takes_packed
