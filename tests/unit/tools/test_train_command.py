"""What `mindspeed-mm train` starts where it is the launcher inside of a script that another one runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from unittest import mock

import pytest

from mindspeed_mm.accelerator import environment
from mindspeed_mm.configs.environment import STARTER
from mindspeed_mm.tools.train import command, processes
from tests.support.launch import ROOT

WORDS = ["--nproc_per_node", "8", "--nnodes", "1", "pretrain_transformers.py", "--lr", "1e-3"]


class Ranks:
    """Ranks that are not started."""

    options: argparse.Namespace
    starter: str | None

    def __init__(self, options: argparse.Namespace) -> None:
        Ranks.options, Ranks.starter = options, os.environ.get(STARTER)

    def run(self) -> int:
        return 3


@pytest.mark.parametrize("launcher, starter", [("main", "mindspeed-mm train"), ("stand_in", None)])
def test_inside_of_a_script_the_options_and_signals_of_the_outer_command_count(
    launcher: str, starter: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As torchrun, whose lines stay the published ones, and as itself, whose lines are for people."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(STARTER, raising=False)
    state = tmp_path / "launcher"
    outer = {"MINDSPEED_MM_LAUNCHER_OPTIONS": "--nproc-per-node\x1f2", "MINDSPEED_MM_LAUNCHER_STATE": str(state)}
    with mock.patch.dict(os.environ, outer), mock.patch.object(command, "LaunchedRanks", Ranks):
        assert getattr(command, launcher)(WORDS) == 3
        assert outer.keys().isdisjoint(os.environ)  # the ranks are no launchers
    assert Ranks.options.nproc_per_node == "2" and Ranks.options.nnodes == "1"
    program = [Ranks.options.training_script, *Ranks.options.training_script_args]
    assert program[-2:] == ["--lr", "1e-3"] and "pretrain_transformers" in program[0]
    assert Ranks.starter == starter
    assert state.read_text() == "ended 3"


@pytest.mark.parametrize(
    "count, has_device, stated, threads",
    [
        ("1", False, None, "6"),
        ("4", False, None, "1"),
        ("8", False, None, "1"),
        ("2", False, "5", "5"),
        ("1", True, None, "1"),
        ("auto", False, None, "1"),
    ],
)
def test_processes_of_the_host_share_its_cores(
    count: str, has_device: bool, stated: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 6)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: has_device)
    with mock.patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        if stated is not None:
            os.environ["OMP_NUM_THREADS"] = stated
        processes.share_cores(count)
        assert os.environ["OMP_NUM_THREADS"] == threads
