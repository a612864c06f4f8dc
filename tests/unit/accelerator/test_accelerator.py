"""Choosing a device and its collectives, and the sentence for torch_npu without CANN."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.accelerator.cpu import CPUAccelerator
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
    device.name, device.collective_backend = "cuda", "nccl"
    assert device.resolve_backend("nccl") == "nccl"
    assert device.resolve_backend("nccl", needs_cpu_tensors=True) == "cuda:nccl,cpu:gloo"
    assert device.resolve_backend("cuda:nccl,cpu:gloo") == "cuda:nccl,cpu:gloo"
    assert device.resolve_backend("npu:hccl,cpu:gloo") == "cuda:nccl,cpu:gloo"


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
