"""A profile that a file switches on and off while steps go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.monitor import dynamic_profile
from mindspeed_mm.monitor.profiling import StepProfiler


class Steps:
    """Steps of a run on one rank, each with a product of matrices of its own size."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.file, self.traces, self.rank = folder / "profiler_config.json", folder / "traces", rank
        profile = {"enable": True, "profile_type": "dynamic", "dynamic_param": {"config_path": str(folder)}}
        self.profiler = StepProfiler(ToolsConfig.from_dict({"profile": profile}).profile, rank, 4)
        self.profiler.start()
        self.number = 4

    def run(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            torch.ones(self.number, 3) @ torch.ones(3, 2)
            self.profiler.step()

    def write(self, **keys: Any) -> None:
        self.file.write_text(json.dumps({"prof_dir": str(self.traces), "record_shapes": True, **keys}))

    def recorded(self) -> dict[str, list[int]]:
        """Of each trace, the steps whose product it has."""
        found = {}
        for trace in sorted(self.traces.glob("*.json")):
            events = json.loads(trace.read_text())["traceEvents"]
            shapes = [e["args"]["Input Dims"] for e in events if e.get("name") == "aten::matmul"]
            found[trace.name] = [int(shape[0][0]) for shape in shapes]
        return found


@pytest.fixture(autouse=True)
def looks_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_profile, "_POLL_SECONDS", 0.0)


def test_a_changed_file_begins_a_profile(tmp_path: Path) -> None:
    """Of the step after the one that saw it, or of `start_step`; the file that is there at the start begins none."""
    steps = Steps(tmp_path)
    assert json.loads(steps.file.read_text())["active"] == 1
    steps.run(2)
    assert steps.recorded() == {}
    steps.write(active=2)
    steps.run(5)  # step 7 sees it
    assert steps.recorded() == {"trace_rank00000_step8.json": [8, 9]}
    steps.write(start_step=15)
    steps.run(6)
    assert steps.recorded()["trace_rank00000_step15.json"] == [15]


def test_a_profile_is_ended_by_the_file(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.write(active=1000)
    steps.run(4)
    steps.write(active=0)
    steps.run(3)
    assert steps.recorded() == {"trace_rank00000_step6.json": [6, 7, 8, 9]}


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.write(is_rank=True, rank_list=[1])
    steps.run(3)
    assert steps.recorded() == {}
    other = Steps(tmp_path, rank=1)
    other.write(is_rank=True, rank_list=[1])
    other.run(3)
    assert list(other.recorded()) == ["trace_rank00001_step6.json"]


@pytest.mark.parametrize("content, part", [("{", "Expecting property name"), ('{"activ": 1}', "'active'")])
def test_a_file_that_cannot_be_used_is_said(tmp_path: Path, said: list[str], content: str, part: str) -> None:
    steps = Steps(tmp_path)
    steps.file.write_text(content)
    steps.run(2)
    assert steps.recorded() == {} and len(said) == 1
    assert "profiler_config.json has changed and can't be used" in said[0] and part in said[0]
