"""Float32 products of the host by oneDNN, which must be those of float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator import host_products
from mindspeed_mm.accelerator.attention import host_operator

LARGE = [nn.Linear(256, 256), nn.Linear(64, 64)]
pytestmark = pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch has the setting since 2.9")
SETTING = "mindspeed_mm.accelerator.host_products."


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is known of this machine's processor is asked anew."""
    host_products.why_not_onednn.cache_clear()
    yield
    host_products.why_not_onednn.cache_clear()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing is against oneDNN, whatever this one is."""
    _machine(monkeypatch, tmp_path, "AVX512", "vendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(SETTING + "_is_exact", lambda: True)
    accelerator.current().prepare_steps(LARGE)


def _machine(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: str, said: str) -> None:
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    (folder / "cpuinfo").write_text("processor\t: 0\n" + said)
    monkeypatch.setattr(SETTING + "_PROCESSORS", folder / "cpuinfo")


@pytest.mark.parametrize(
    ("capability", "said", "is_exact", "why"),
    [
        ("AVX2", "vendor_id\t: AuthenticAMD\n", True, "no AVX-512"),
        ("AVX512", "vendor_id\t: GenuineIntel\n", True, "Intel's"),
        ("AVX512", "", True, "Intel's"),
        ("AVX512", "vendor_id\t: AuthenticAMD\n", False, "shorter format"),
        ("AVX512", "vendor_id\t: AuthenticAMD\n", True, None),
    ],
)
def test_when_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: str, said: str, is_exact: bool, why: str | None
) -> None:
    _machine(monkeypatch, tmp_path, capability, said)
    monkeypatch.setattr(SETTING + "_is_exact", lambda: is_exact)
    accelerator.current().prepare_steps(LARGE)
    assert torch.get_float32_matmul_precision() == ("highest" if why else "medium")
    found = host_products.why_not_onednn()
    assert found is None if why is None else why in str(found)
    assert accelerator.current().float32_products().startswith("oneDNN, MKL where" if why is None else "PyTorch's BLAS")


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(("sizes", "library"), [([16, 255], "highest"), ([256, 255], "medium"), ([], "highest")])
def test_models_of_small_matrices_keep_blas(sizes: list[int], library: str) -> None:
    torch.set_float32_matmul_precision("highest")
    accelerator.current().prepare_steps([nn.Sequential(*(nn.Linear(size, size) for size in sizes))])
    assert torch.get_float32_matmul_precision() == library


@pytest.mark.usefixtures("taken")
def test_small_products_are_by_blas() -> None:
    with accelerator.current().small_products():
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("holds", [torch.float32, torch.bfloat16])
def test_products_in_a_shorter_format_are_recognised(monkeypatch: pytest.MonkeyPatch, holds: torch.dtype) -> None:
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda left, right: product(left.to(holds).float(), right.to(holds).float())
    )
    monkeypatch.setattr(SETTING + "torch.set_float32_matmul_precision", lambda name: None)
    assert host_products._is_exact() == (holds == torch.float32)


@pytest.mark.parametrize("shape", [(3, 5, 7), (64, 256, 704), (1, 300, 96), (1024, 64, 1024)])
def test_products_are_those_of_float32(shape: tuple[int, int, int]) -> None:
    """As a run multiplies here, by whatever library: within float32's rounding of the exact product."""
    accelerator.current().prepare_steps(LARGE)
    rows, inner, columns = shape
    left, right, bias = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(columns)
    exact, largest = left.double() @ right.double(), left.abs().double() @ right.abs().double()
    limit = 2.0**-24 * inner * largest
    for product in (
        left @ right,
        (right.t() @ left.t()).t(),
        torch.addmm(bias, left, right) - bias,
        left[None] @ right,
    ):
        assert bool(((product.squeeze(0) - exact).abs() <= limit + 1e-6).all())


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(("tokens", "library"), [(399, "ieee"), (400, "bf16")])
def test_attention_to_few_keys_multiplies_by_blas(monkeypatch: pytest.MonkeyPatch, tokens: int, library: str) -> None:
    """In both passes, whoever calls it; a call of oneDNN takes longer than such products. All is as before then."""
    settings = torch.backends.mkldnn.matmul
    seen: list[tuple[str, str]] = []

    class Watched:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def call_boxed(self, *given: Any, **named: Any) -> Any:
            seen.append((self.name, settings.fp32_precision))
            return self.kernel.call_boxed(*given, **named)

    get_kernel = torch.library.get_kernel
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Watched(name, get_kernel(name, key)))
    host_operator._replaced.cache_clear()
    try:
        host_operator.choose_host_kernels()
        query, key, value = torch.randn(3, 1, 2, tokens, 8)
        nn.functional.scaled_dot_product_attention(query.requires_grad_(), key, value).sum().backward()
    finally:
        host_operator._replaced.cache_clear()
        host_operator.choose_host_kernels()
    operator = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert seen == [(operator, library), (f"{operator}_backward", library)]
    assert settings.fp32_precision == "bf16"
    torch.set_float32_matmul_precision("highest")
    with host_products.by_blas():
        assert settings.fp32_precision != "bf16"
    assert torch.get_float32_matmul_precision() == "highest"
