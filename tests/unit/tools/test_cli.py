"""The commands of `mindspeed-mm`, and what `mindspeed-mm doctor` finds."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.accelerator.attention import AttentionKernel
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.tools import doctor
from mindspeed_mm.tools.cli import COMMANDS, main
from mindspeed_mm.tools.collective_check import Collectives
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.versions import TESTED

ROOT = Path(__file__).resolve().parents[3]
ALONE = ["doctor", "--no-collectives"]


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(doctor, "_limits", lambda found: [])
    assert main(ALONE) == 0
    printed = capsys.readouterr().out
    assert "nothing hinders a run" in printed
    assert "transformers" in printed
    assert "collectives: " in printed
    assert "plain, padded and packed rows (bf16, fp16, fp32): flash attention of PyTorch for the host, docum" in printed
    assert "not taken: FlashAttention-2, FlashAttention-3: they run on CUDA" in printed
    assert "attn_implementation flash_attention_2: it does not run on cpu" in printed


def test_doctor_finds_what_hurts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert main(ALONE) == 1
    assert "problem: CUDA_DEVICE_MAX_CONNECTIONS=1" in capsys.readouterr().out


def test_doctor_as_json_and_its_limits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_collectives", lambda ranks: Collectives(ranks, failure="RuntimeError: no route"))
    monkeypatch.setitem(doctor.TESTED, "numpy", "0.1")
    monkeypatch.setattr(doctor, "_FEW_FILES", 1 << 60)
    kernel = CPUAccelerator.attention_kernel

    def said(*given: Any) -> AttentionKernel:
        notice("a kernel isn't compiled here")
        return kernel(*given)

    monkeypatch.setattr(CPUAccelerator, "compiled_attention_kernel", said)
    assert main(["doctor", "--json"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "a kernel isn't compiled here" in printed.err
    assert found["device"]["memory_bytes"] > 1 << 30 and found["untested"]["numpy"] == "0.1"
    problems = " ".join(found["problems"])
    assert "collectives between 2 ranks fail: RuntimeError: no route" in problems
    assert "files only; loaders of media" in problems


@pytest.mark.full
def test_doctor_exchanges_tensors_between_ranks() -> None:
    found = doctor.check_collectives(2)
    assert (found.ranks, found.backend, found.failure) == (2, "gloo", "")
    assert found.latency_us > 0 and found.bytes_per_second > 0


def test_the_tested_set_is_that_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: pinned[name] for name in TESTED} == TESTED


def test_every_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS.values():
        assert callable(getattr(importlib.import_module(command.module), command.function))
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mindspeed-mm 0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tain"], "mindspeed-mm has no command 'tain'; did you mean 'train'"),
        (["data", "chek"], "mindspeed-mm data 'chek': expected check, convert or extract-features"),
        (["data"], "mindspeed-mm data: expected check, convert or extract-features"),
        (["dry-run", "nowhere.py"], "'nowhere.py' is no file that starts a run"),
    ],
)
def test_others_get_a_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_export_is_a_conversion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("mindspeed_mm.tools.convert.main", lambda words: given.append(list(words)) or 0)
    assert main(["export", "runs/x", "out", "--best", "true"]) == 0
    start = ["GenericDCPConverter", "dcp_to_hf"]
    assert given == [[*start, "--load_dir", "runs/x", "--save_dir", "out", "--best", "true"]]
    assert main(["export", "runs/x"]) == 0
    assert given[1] == [*start, "--help"] and "usage: mindspeed-mm export RUN OUT" in capsys.readouterr().out
