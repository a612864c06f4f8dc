"""Choosing a device and its collectives, and the sentence for torch_npu without CANN."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mindspeed_mm.accelerator.base import Accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.accelerator.cuda import CUDAAccelerator
from mindspeed_mm.accelerator.npu import NPUAccelerator
from mindspeed_mm.utils import log

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("requested", "expected", "said"),
    [
        (None, "gloo", False),
        ("gloo", "gloo", False),
        ("nccl", "gloo", True),
        ("hccl", "gloo", True),
        ("npu:hccl,cpu:gloo", "gloo", False),
    ],
)
def test_backend_on_cpu(requested: str | None, expected: str, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(log.logger, "warning", notices.append)
    device = CPUAccelerator()
    assert device.resolve_backend(requested) == expected
    assert device.resolve_backend(requested) == expected
    assert len(notices) == said  # once, however often it is asked


def test_backend_of_a_device_beside_the_host() -> None:
    device = CPUAccelerator()
    device.name, device.collective_backend, device.is_host = "cuda", "nccl", False
    assert device.resolve_backend("nccl") == "nccl"
    assert device.resolve_backend("nccl", needs_cpu_tensors=True) == "cuda:nccl,cpu:gloo"
    assert device.resolve_backend("cuda:nccl,cpu:gloo") == "cuda:nccl,cpu:gloo"
    assert device.resolve_backend("npu:hccl,cpu:gloo") == "cuda:nccl,cpu:gloo"


@pytest.mark.parametrize(
    ("name", "packages", "installed", "expected"),
    [
        (
            "cpu",
            None,
            [],
            {"flash_attention_2": "it does not run on cpu", "flash_attention_3": "it does not run on cpu"},
        ),
        ("cpu", None, ["flash_attn"], {"flash_attention_2": "it does not run on cpu"}),
        ("cuda", CUDAAccelerator, [], {"flash_attention_2": "flash_attn is not installed"}),
        ("cuda", CUDAAccelerator, ["flash_attn"], {"flash_attention_2": None, "flash_attention_4": "not run on cuda"}),
        ("cuda", CUDAAccelerator, ["flash_attn"], {"flash_attention_3": "flash_attn_interface is not installed"}),
        ("cuda", CUDAAccelerator, ["flash_attn_interface"], {"flash_attention_3": None}),
        ("npu", NPUAccelerator, [], {"flash_attention_2": None, "flash_attention_3": "it does not run on npu"}),
    ],
)
def test_attention_that_a_device_can_run(
    name: str,
    packages: type[Accelerator] | None,
    installed: list[str],
    expected: dict[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CPUAccelerator()
    device.name = name
    if packages is not None:
        device.attention_packages = packages.attention_packages
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package in installed or None)
    for implementation in ("eager", "sdpa", "flex_attention"):
        assert device.why_no_attention(implementation) is None
    for implementation, reason in expected.items():
        found = device.why_no_attention(implementation)
        assert found is None if reason is None else reason in (found or "")


def tf32_settings() -> list[str]:
    """PyTorch's settings of float32 products and convolutions, on CUDA."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert cuda.allow_tf32 == (cuda.fp32_precision == "tf32")  # both ways of asking are answered
    return [cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]


@pytest.mark.parametrize(("capability", "found"), [((8, 0), True), ((7, 5), False)])
def test_tf32_on_cuda(capability: tuple[int, int], found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(log.logger, "warning", notices.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A")
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32
    try:
        cuda.allow_tf32 = cudnn.allow_tf32 = False
        without = tf32_settings()
        CUDAAccelerator().allow_tf32()
        assert "tf32" not in without and tf32_settings() == (["tf32"] * 3 if found else without)
    finally:
        cuda.allow_tf32, cudnn.allow_tf32 = before
    assert ["NVIDIA A has no TF32" in notice for notice in notices] == ([] if found else [True])


def test_hf32_on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = SimpleNamespace(matmul=SimpleNamespace(allow_hf32=False), conv=SimpleNamespace(allow_hf32=False))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))  # type: ignore[arg-type]
    NPUAccelerator().allow_tf32()
    assert npu.matmul.allow_hf32 and npu.conv.allow_hf32


def test_tf32_on_the_host_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(log.logger, "warning", notices.append)
    CPUAccelerator().allow_tf32()
    assert len(notices) == 1 and "--allow-tf32 has no effect" in notices[0] and "cpu" in notices[0]


def test_memory_is_counted_in_bytes() -> None:
    device = CPUAccelerator()
    assert 2**20 < device.memory_allocated() <= device.max_memory_allocated() * 1.1


def test_torch_npu_without_cann_is_a_sentence(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    (package / "autoload.py").write_text("def start():\n    import torch_npu\n")
    meta = tmp_path / "torch_npu-2.7.1.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.7.1\n")
    (meta / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:start\n")
    run = subprocess.run(
        [sys.executable, "-c", "from mindspeed_mm.accelerator import current"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert "libhccl.so" in last
    for words in ("set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "pip uninstall torch_npu"):
        assert words in last
