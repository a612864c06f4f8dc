"""Float32 matrix products of the host: by oneDNN where PyTorch's BLAS library lacks code for the processor.

PyTorch multiplies float32 matrices by MKL, which has AVX-512 code for Intel's processors only; oneDNN, which PyTorch
has for other dtypes, has it for all. It takes float32 where `torch.set_float32_matmul_precision("medium")` admits
shorter formats inside of products. Only Intel's AMX computes in one then (oneDNN, Developer Guide, "Floating-point math
mode"); on other processors products are those of float32, which is tried before it is relied on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

_PROCESSORS = Path("/proc/cpuinfo")
_INTEL = "GenuineIntel"
_ADMITTED = "bf16"
"""The setting of oneDNN's products that "medium" stands for."""
_LARGE = 2**16
"""Elements of a large matrix. A call of oneDNN takes 50 µs more than one of MKL, and 0.5 ms more with new sizes."""
_ROUNDED_AWAY = 2.0**-12
"""1 and this is 1 in bfloat16 and in TF32."""


def use_onednn(modules: Sequence[nn.Module]) -> None:
    """Let oneDNN multiply float32 matrices in this process, if nothing is against it.

    Args:
        modules: what is to be computed; models whose weights are small matrices take longer by oneDNN.
    """
    if why_not_onednn() is None and _are_large(modules):
        torch.set_float32_matmul_precision("medium")


def _are_large(modules: Sequence[nn.Module]) -> bool:
    """Whether at least half of the parameters are elements of large matrices."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    large = sum(p.numel() for p in parameters if p.dim() > 1 and p.numel() >= _LARGE)
    return 0 < sum(p.numel() for p in parameters) <= 2 * large


def library() -> str:
    """Return which library multiplies float32 matrices in training here, and why."""
    why = why_not_onednn()
    return f"PyTorch's BLAS library ({why})" if why else "oneDNN, MKL where a model's matrices are small"


@functools.cache
def why_not_onednn() -> str | None:
    """Return why PyTorch's BLAS library multiplies float32 matrices here; None: oneDNN does."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        return "this release of torch has no setting for it"
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return "this build of torch has not both MKL and oneDNN"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512"
    if _vendor() in (None, _INTEL):
        return "MKL has AVX-512 code for Intel's processors"
    return None if _is_exact() else "oneDNN would compute in a shorter format on this processor"


def _vendor() -> str | None:
    """Return the vendor of this machine's processors as the system states it; None: it doesn't."""
    if not _PROCESSORS.is_file():
        return None
    with open(_PROCESSORS, encoding="utf-8", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), None)


def _is_exact() -> bool:
    """Whether "medium" leaves products in float32: those of values that a shorter format doesn't hold."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        size = 64
        left, right = torch.full((size, size), 1 + _ROUNDED_AWAY), torch.ones(2, size, size)
        products = (left @ right[0], right[0].t() @ left.t(), left.expand_as(right) @ right)
        return all(torch.equal(product, torch.full_like(product, size * (1 + _ROUNDED_AWAY))) for product in products)
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def by_blas() -> Iterator[None]:
    """Context in which PyTorch's BLAS library multiplies float32 matrices, for many small ones: a call takes less."""
    if why_not_onednn() is not None or torch.backends.mkldnn.matmul.fp32_precision != _ADMITTED:
        yield
        return
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = _ADMITTED
