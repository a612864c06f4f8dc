"""`mindspeed-mm doctor` tells the device and what hinders a run."""

from __future__ import annotations

import pytest

from mindspeed_mm.tools.cli import main


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "nothing hinders a run" in printed
    assert "transformers" in printed
    assert "collectives: " in printed
    assert "plain, padded and packed rows (bf16, fp16, fp32): flash attention of PyTorch for the host, docum" in printed
    assert "not taken: FlashAttention-2, FlashAttention-3: they run on CUDA" in printed
    assert "attn_implementation flash_attention_2: it does not run on cpu" in printed


def test_doctor_finds_what_hurts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert main(["doctor"]) == 1
    assert "problem: CUDA_DEVICE_MAX_CONNECTIONS=1" in capsys.readouterr().out
