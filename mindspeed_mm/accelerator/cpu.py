"""The host's CPU: gloo, no queue; memory figures are the process's resident set."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from mindspeed_mm.accelerator import host_products
from mindspeed_mm.accelerator.attention.cpu import CPUFlashAttention
from mindspeed_mm.accelerator.attention.host_operator import choose_host_kernels
from mindspeed_mm.accelerator.attention.jit_cpu import JITCPUAttention, jit_attention, why_not_jit
from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, PaddedHeads
from mindspeed_mm.accelerator.base import Accelerator
from mindspeed_mm.accelerator.host_memory import keep_freed_memory


class CPUAccelerator(Accelerator):
    """The machine's CPU."""

    name = "cpu"
    collective_backend = "gloo"
    is_host = True
    sum_dtype = torch.float64
    _jit: JITCPUAttention | None = None

    def device(self) -> torch.device:
        return torch.device("cpu")

    def attention_kernel(self, query: torch.Tensor, value: torch.Tensor) -> AttentionKernel:
        if self._jit is not None and self._jit.takes_tensors(query, value):
            return self._jit
        return PaddedHeads(CPUFlashAttention())

    def compiled_attention_kernel(self, query: torch.Tensor, value: torch.Tensor) -> AttentionKernel:
        return jit_attention() or self.attention_kernel(query, value)

    def prepare_steps(self, modules: Sequence[nn.Module], *, compiles: bool = False) -> None:
        host_products.use_onednn(modules)
        self._jit = jit_attention() if compiles else None
        choose_host_kernels(self._jit)
        keep_freed_memory()

    def float32_products(self) -> str:
        return host_products.library()

    def small_products(self) -> AbstractContextManager[None]:
        return host_products.by_blas()

    def why_no_inductor(self) -> str | None:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "kernels for the host are compiled by g++ or clang++, or by what CXX names, and none is there"
        return None

    def kernels_not_taken(self) -> dict[str, str]:
        found = {
            "FlashAttention-2, FlashAttention-3": "they run on CUDA",
            "npu_fusion_attention": "it runs on Ascend devices",
        }
        why = why_not_jit()
        return {**found, JITCPUAttention.name: why} if why else found

    def prepare_megatron(self) -> None:
        from mindspeed_mm.accelerator.megatron_cpu import apply_cpu_adaptor

        apply_cpu_adaptor()

    def memory_allocated(self) -> int:
        try:
            with open("/proc/self/statm", encoding="ascii") as f:
                return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return self.max_memory_allocated()

    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def max_memory_allocated(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
