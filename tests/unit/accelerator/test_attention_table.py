"""The table of kernels says what is chosen, and FlashAttention-3 is taken where it is there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.accelerator import cuda
from mindspeed_mm.accelerator.attention import cuda as flash
from mindspeed_mm.accelerator.attention.table import attention_table
from mindspeed_mm.accelerator.base import Accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.accelerator.cuda import CUDAAccelerator
from mindspeed_mm.accelerator.fused import NPUFusedKernels
from mindspeed_mm.accelerator.npu import NPUAccelerator

ROWS = "plain, padded and packed rows"
WINDOW = "rows longer than a sliding window"
COMPILED = "all of these in runs that compile blocks"


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One of Ascend, and a host with AVX-512."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=None))
    flash.flash_kernel.cache_clear()
    yield
    flash.flash_kernel.cache_clear()


@pytest.mark.parametrize(
    ("device", "use", "dtypes", "kernel"),
    [
        (CPUAccelerator, ROWS, "bf16, fp16, fp32", "flash attention of PyTorch for the host, document by document"),
        (CPUAccelerator, WINDOW, "bf16, fp16, fp32", "matrix products in fp32"),
        (CPUAccelerator, COMPILED, "bf16, fp16, fp32", "C++ compiled for this processor, all documents at once"),
        (CUDAAccelerator, COMPILED, "bf16, fp16", "FlashAttention-2 of PyTorch, all documents at once"),
        (CUDAAccelerator, ROWS, "bf16, fp16", "FlashAttention-2 of PyTorch, all documents at once"),
        (CUDAAccelerator, ROWS, "fp32", "scaled_dot_product_attention of PyTorch, document by document"),
        (CUDAAccelerator, WINDOW, "bf16, fp16", "FlashAttention-2 of PyTorch, all documents at once"),
        (CUDAAccelerator, "context parallelism, ring", "fp32", "matrix products in fp32"),
        (NPUAccelerator, ROWS, "bf16, fp16, fp32", "npu_fusion_attention, all documents at once"),
        (NPUAccelerator, WINDOW, "bf16, fp16, fp32", "matrix products in fp32"),
    ],
)
def test_each_device_says_what_it_takes(device: type[Accelerator], use: str, dtypes: str, kernel: str) -> None:
    lines = attention_table(device())
    assert (use, dtypes, kernel) in lines
    assert [line for line in lines if line.use == use] != lines


def with_flash_3(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> list[str]:
    """A machine with its package; returns what PyTorch is told to take."""
    taken: list[str] = []
    find = importlib.util.find_spec
    there = lambda name, *rest: object() if name == flash.FLASH_3 else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", taken.append, raising=False)
    return taken


def test_flash_attention_3_is_taken_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, device = with_flash_3(monkeypatch, (9, 0)), CUDAAccelerator()
    assert (ROWS, "bf16, fp16", "FlashAttention-3, all documents at once") in attention_table(device)
    assert taken == ["FA3"] and "FlashAttention-3" not in device.kernels_not_taken()


@pytest.mark.parametrize(
    ("capability", "missing", "why"),
    [((8, 0), None, "compute capability 9"), ((9, 0), "activate_flash_attention_impl", "this release of torch")],
)
def test_why_flash_attention_3_is_not_taken(
    capability: tuple[int, int], missing: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CUDAAccelerator().kernels_not_taken()["FlashAttention-3"] == "flash_attn_interface is not installed"
    taken = with_flash_3(monkeypatch, capability)
    if missing:
        monkeypatch.delattr(torch.nn.attention, missing)
    assert why in CUDAAccelerator().kernels_not_taken()["FlashAttention-3"]
    assert flash.flash_kernel().name == "FlashAttention-2 of PyTorch" and not taken


def test_fused_kernels_are_liger_s_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    liger, ascend = object(), NPUFusedKernels()
    monkeypatch.setattr(cuda, "_liger", lambda: liger)
    for installed in (True, False):
        monkeypatch.setattr(cuda, "has_extra", lambda extra, found=installed: found)
        assert CUDAAccelerator().fused_kernels() is (liger if installed else None)
    assert CUDAAccelerator().why_no_fused_kernels().endswith("pip install 'mindspeed_mm[liger]'")
    assert CPUAccelerator().fused_kernels() is None
    assert type(NPUAccelerator().fused_kernels()) is type(ascend)
