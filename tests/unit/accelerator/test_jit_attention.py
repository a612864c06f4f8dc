"""Attention of the host by C++ that is compiled for its processor, against PyTorch's own in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import CppCodeCache
from torch._inductor.exc import CppCompileError
from torch.nn import functional as F

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention import CAUSAL, Band, Documents, PackedLengths, jit_cpu
from mindspeed_mm.accelerator.attention.documents import AttentionWithin
from mindspeed_mm.accelerator.attention.host_operator import choose_host_kernels
from mindspeed_mm.accelerator.attention.jit_cpu import JITCPUAttention, compile_kernel
from mindspeed_mm.accelerator.cpu import CPUAccelerator

SCALE = 0.3
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture
def kernel() -> JITCPUAttention:
    found = compile_kernel()
    assert found is not None
    return found


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One with AVX-512, whatever this one is; what this process chose for its attention is forgotten."""
    capability = ["AVX512"]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability[0])
    yield capability
    accelerator.current().prepare_steps([])


def draw(queries: int, keys: int, sizes: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output, [1, tokens, heads, head size]."""
    torch.manual_seed(0)
    shapes = (queries, heads[0], sizes[0]), (keys, heads[1], sizes[0]), (keys, heads[1], sizes[1])
    return [torch.randn(1, *shape).to(dtype) for shape in (*shapes, (queries, heads[0], sizes[1]))]


def off(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def in_float64(given: list[Tensor], lengths: PackedLengths, band: Band | None) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    query, key, value, grad_out = (tensor.double() for tensor in given)
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in (query, key, value)]
    outputs = []
    for q, k in zip(pairwise((0, *lengths.query_ends)), pairwise((0, *lengths.key_ends)), strict=True):
        distance = torch.arange(q[1] - q[0])[:, None] - torch.arange(k[1] - k[0])
        seen = torch.ones_like(distance, dtype=torch.bool)
        if band is not None:
            seen = (band.offset + distance >= 0) & (band.offset + distance < (band.window or 10**9))
        part = leaves[0][:, :, slice(*q)], *(leaf[:, :, slice(*k)] for leaf in leaves[1:])
        out = F.scaled_dot_product_attention(*part, attn_mask=seen, scale=SCALE, enable_gqa=True)
        outputs.append(out.masked_fill(~seen.any(-1, keepdim=True), 0.0))
    out = torch.cat(outputs, 2).transpose(1, 2)
    out.backward(grad_out)
    grads = [leaf.grad for leaf in leaves]
    return [out.detach(), *(grad.nan_to_num().transpose(1, 2) for grad in grads if grad is not None)]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "band"),
    [
        ((1, 17, 64, 65, 200), (1, 17, 64, 65, 200), CAUSAL),
        ((3, 130), (40, 5), None),
        ((1100,), (1100,), CAUSAL),  # three blocks of keys, so that sums are rescaled
        ((600,), (1100,), None),
        ((700, 90), (700, 90), Band(0, 100)),
        ((600,), (500,), Band(290, 300)),  # the last queries see nothing
        ((600,), (500,), Band(-400)),  # nor do the first ones
    ],
    ids=str,
)
def test_equals_attention_in_float64(
    kernel: JITCPUAttention, queries: tuple[int, ...], keys: tuple[int, ...], band: Band | None, dtype: torch.dtype
) -> None:
    lengths = PackedLengths(queries, keys)
    given = draw(sum(queries), sum(keys), (24, 40), (4, 2), dtype)
    query, key, value, grad_out = given
    out, lse = kernel.forward(query, key, value, band=band, scale=SCALE, lengths=lengths)
    grads = kernel.backward(grad_out, query, key, value, out, lse, band=band, scale=SCALE, lengths=lengths)
    for found, expected in zip((out, *grads), in_float64(given, lengths, band), strict=True):
        assert found.dtype == dtype and off(found, expected) < ROUNDING[dtype]


@pytest.mark.parametrize("size", [1, 8, 16, 80, 128])
def test_any_head_size(kernel: JITCPUAttention, size: int) -> None:
    given = draw(70, 70, (size, size), (6, 2), torch.float32)
    query, key, value, grad_out = given
    out, lse = kernel.forward(query, key, value, band=CAUSAL, scale=SCALE)
    grads = kernel.backward(grad_out, query, key, value, out, lse, band=CAUSAL, scale=SCALE)
    for found, expected in zip((out, *grads), in_float64(given, PackedLengths((70,), (70,)), CAUSAL), strict=True):
        assert off(found, expected) < 3e-6


def test_results_do_not_depend_on_threads_nor_on_what_is_in_memory(kernel: JITCPUAttention) -> None:
    """Rows, strided tensors and other threads give the same bits, and so does padding that isn't a number."""
    before = torch.get_num_threads()
    query, key, value, grad_out = draw(300, 300, (24, 24), (4, 2), torch.float32)
    rows = [torch.cat([tensor, tensor.flip(1)]) for tensor in (query, key, value, grad_out)]
    apart = [F.pad(tensor, (0, 9), value=torch.nan).transpose(1, 2).contiguous() for tensor in rows]
    strided = [tensor.transpose(1, 2)[..., :24] for tensor in apart]
    scattered = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in rows]
    found = []
    try:
        for threads, (q, k, v, g) in ((1, rows), (2, rows), (2, strided), (1, scattered)):
            torch.set_num_threads(threads)
            out, lse = kernel.forward(q, k, v, band=CAUSAL, scale=SCALE)
            found.append([out, lse, *kernel.backward(g, q, k, v, out, lse, band=CAUSAL, scale=SCALE)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
    alone, _ = kernel.forward(query, key, value, band=CAUSAL, scale=SCALE)
    assert torch.equal(found[0][0][:1], alone)


def test_what_is_no_number_stays_none(kernel: JITCPUAttention) -> None:
    query, key, value, _ = draw(40, 40, (16, 16), (1, 1), torch.float32)
    query[0, 7] = torch.nan
    out, lse = kernel.forward(query, key, value, band=CAUSAL, scale=SCALE)
    assert out[0, 7].isnan().all() and lse[0, 7].isnan().all()
    assert out.isnan().sum() == 16


def test_padding_of_rows_sees_nothing(kernel: JITCPUAttention) -> None:
    """It costs nothing, and has no part in gradients, whatever the gradient of its output is."""
    documents = Documents((((9, True), (6, True), (5, False)), ((20, True),)))
    how = AttentionWithin.of(kernel, documents, scale=SCALE, is_causal=True, window=None)
    rows = [torch.cat([tensor, tensor]) for tensor in draw(20, 20, (16, 16), (2, 2), torch.float32)]
    query, key, value, grad_out = rows
    grad_out[0, 15:] = torch.nan
    out, lse = how.forward(query, key, value, None)
    grads = how.backward(grad_out, query, key, value, None, out, lse)[:3]
    assert how.is_packed and how.all_at_once()["lengths"].keys == (9, 6, 5, 20)
    lengths, (q, k, v, g) = PackedLengths((9, 6), (9, 6)), (row[:1, :15] for row in rows)
    expected, lse = kernel.forward(q, k, v, band=CAUSAL, scale=SCALE, lengths=lengths)
    of_row = kernel.backward(g, q, k, v, expected, lse, band=CAUSAL, scale=SCALE, lengths=lengths)
    for tensor, without in zip((out, *grads), (expected, *of_row), strict=True):
        assert torch.equal(tensor[0, :15], without[0]) and not tensor[0, 15:].any()
        assert tensor[1].isfinite().all() and tensor[1].any()


def test_memory_that_is_missing_is_said() -> None:
    def without_memory(task: object, scale: float, tensors: object) -> int:
        return 123

    library = SimpleNamespace(attention_forward=without_memory, attention_backward=without_memory)
    query, key, value, _ = draw(4, 4, (16, 16), (1, 1), torch.float32)
    with pytest.raises(MemoryError, match="123 bytes"):
        JITCPUAttention(library).forward(query, key, value, band=None, scale=1.0)


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch has it since 2.9")
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorchs_operator_is_computed_so_in_runs_that_compile(kernel: JITCPUAttention, is_causal: bool) -> None:
    """Whoever calls it, where there is neither mask nor dropout; with either it stays PyTorch's."""
    accelerator.current().prepare_steps([], compiles=True)
    assert accelerator.current().attention_kernel(torch.empty(1), torch.empty(1)) is kernel
    query, key, value, grad_out = (t.transpose(1, 2) for t in draw(50, 50, (16, 16), (3, 3), torch.float32))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=SCALE)
    out.backward(grad_out)
    heads_last = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    band = CAUSAL if is_causal else None
    expected, lse = kernel.forward(*heads_last, band=band, scale=SCALE)
    grads = kernel.backward(grad_out.transpose(1, 2), *heads_last, expected, lse, band=band, scale=SCALE)
    assert torch.equal(out, expected.transpose(1, 2))
    for leaf, grad in zip(leaves, grads):
        assert leaf.grad is not None and torch.equal(leaf.grad, grad.transpose(1, 2))
    dense = [tensor.contiguous() for tensor in (query, key, value)]
    in_order = F.scaled_dot_product_attention(*dense, is_causal=is_causal, scale=SCALE)
    assert torch.equal(in_order, out) and in_order.stride() == dense[0].stride() != out.stride()
    mask = torch.ones(50, 50, dtype=torch.bool).tril(5)
    masked = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    accelerator.current().prepare_steps([])
    assert accelerator.current().attention_kernel(torch.empty(1), torch.empty(1)) is not kernel
    assert torch.equal(masked, F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    choose_host_kernels()
    again = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=SCALE)
    assert torch.allclose(out, again, atol=1e-6) and not torch.equal(out, again)


def test_processors_with_shorter_vectors_keep_pytorchs_attention(processor: list[str]) -> None:
    device, sample = CPUAccelerator(), torch.empty(1)
    assert JITCPUAttention.name not in device.kernels_not_taken()
    processor[0] = "AVX2"
    device.prepare_steps([], compiles=True)
    assert device.attention_kernel(sample, sample).name == "flash attention of PyTorch for the host"
    assert "no AVX-512" in device.kernels_not_taken()[JITCPUAttention.name]


@pytest.mark.usefixtures("processor")
def test_a_compiler_that_fails_leaves_pytorchs_attention(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(source: str) -> None:
        assert "attention_forward" in source
        raise CppCompileError(["g++"], "jit_cpu.cpp:1:2: note: no\njit_cpu.cpp:7:9: error: no such header\n")

    monkeypatch.setattr(CppCodeCache, "load", fail)
    said: list[str] = []
    monkeypatch.setattr(jit_cpu, "notice", said.append)
    compile_kernel.cache_clear()
    try:
        device, sample = CPUAccelerator(), torch.empty(1)
        device.prepare_steps([], compiles=True)
        assert device.attention_kernel(sample, sample).name == "flash attention of PyTorch for the host"
        assert device.compiled_attention_kernel(sample, sample).name == "flash attention of PyTorch for the host"
    finally:
        compile_kernel.cache_clear()
    (line,) = said
    assert "jit_cpu.cpp isn't compiled here" in line and line.endswith("error: no such header")
