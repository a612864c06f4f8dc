"""The benchmark on a device: its budget, its rows of what was not run, its folder of wheels, and figures of a trace."""

from __future__ import annotations

import json
import re
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm import accelerator

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
import device  # noqa: E402
import device_wheels  # noqa: E402
from device_contenders import Meter, innermost, watched_row  # noqa: E402
from device_runner import Part, Runner, Table, line_of  # noqa: E402
from device_trace import STEP, merged, read_trace, step_figures  # noqa: E402


def event(name: str, category: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": length, "pid": 0, "tid": 0}


TRACE = [
    event(STEP, "user_annotation", 0, 100),
    event(STEP, "gpu_user_annotation", 10, 190),
    event("void gemm", "kernel", 10, 40),
    event("elementwise", "kernel", 70, 30),
    event("ncclDevKernel_AllGather_RING_LL", "kernel", 40, 20),  # the first half beside gemm
    event("ncclDevKernel_ReduceScatter_Sum_bf16", "kernel", 80, 60),  # 20 of 60 beside elementwise
    event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 90, 20),  # within the one before: counted once
    event("Memcpy HtoD", "gpu_memcpy", 0, 200),
    event("cudaStreamSynchronize", "cuda_runtime", 20, 1),
    event("cudaEventSynchronize", "cuda_runtime", 30, 50),
    event("cudaEventSynchronize", "cuda_runtime", 90, 3),  # had passed
    event("cudaDeviceSynchronize", "cuda_runtime", 150, 50),  # after the step
    event("cudaMemcpyAsync", "cuda_runtime", 50, 5),
    event("cudaLaunchKernel", "cuda_runtime", 5, 5),
]


def test_figures_of_a_step(tmp_path: Path) -> None:
    figures = step_figures(TRACE)
    assert figures.hidden == pytest.approx((10 + 20) / (20 + 60))
    assert figures.busy == pytest.approx((50 + 70) / 140)  # 10 to 60 and 70 to 140, from 0 on
    assert figures.waits == 2
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *TRACE]}))
    assert read_trace(file) == figures


def test_a_step_without_collectives_or_without_a_device() -> None:
    alone = [one for one in TRACE if "nccl" not in one["name"]]
    assert step_figures(alone).hidden is None and step_figures(alone).busy == pytest.approx(0.7)
    host = [event(STEP, "user_annotation", 0, 10)]
    host += [event("aten::_local_scalar_dense", "cpu_op", at, 1) for at in (1, 5, 12)]
    figures = step_figures(host)
    assert (figures.hidden, figures.busy, figures.waits) == (None, None, 2)
    with pytest.raises(ValueError, match=STEP):
        step_figures(TRACE[2:])


def test_unions_of_spans() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]


# --- the meter


def test_waits_for_the_device_are_listed_and_then_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA, whose modes a step obeys as PyTorch's operators do."""
    modes = ["default"]
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = SimpleNamespace(name="cuda", synchronize=lambda: None, activities=lambda: activities)
    cuda.max_memory_allocated = lambda: 0
    monkeypatch.setattr(accelerator, "current", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    meter, done = Meter(tmp_path, 2, watches=True), 0
    with pytest.raises(RuntimeError) as caught:
        while meter.before_step(done):
            if modes[-1] == "warn":
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
                warnings.warn("another one", stacklevel=1)
            elif modes[-1] == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
            done += 1
    assert meter.is_strict and done == 3 + 2 + 1 + 2  # warm, timed, profiled and listed
    meter.close()
    assert modes == ["default", "warn", "default", "error", "default"] and not meter.is_strict
    (place,) = meter.waits
    assert re.fullmatch(r"tests/unit/benchmarks/test_device_benchmark.py:\d+", place)
    raised = innermost(caught.value)
    assert re.fullmatch(r"tests/unit/benchmarks/test_device_benchmark.py:\d+", raised) and raised != place
    assert watched_row(meter, f"waits at {raised}")["note"] == f"waits at {raised}; places in mode “warn”: {place}"
    assert meter.is_timed and meter.no_trace is None and meter.cells()["waits"] == 0

    activities[0] = None  # type: ignore[call-overload]
    without = Meter(tmp_path, 1, watches=False)
    assert [without.before_step(done) for done in range(6)] == [True] * 5 + [False]
    assert "TypeError" in str(without.no_trace) and set(without.cells()) == {"step_ms", "peak_bytes"}


def test_the_innermost_frames_of_an_error_are_named() -> None:
    """The library's own, and this repository's nearest to it."""
    with pytest.raises(ValueError) as caught:
        step_figures_of("{")
    raised, _, own = innermost(caught.value).partition(" from ")
    line = step_figures_of.__code__.co_firstlineno + 1
    assert re.search(r"json/decoder.py:\d+$", raised) and own == f"tests/unit/benchmarks/{Path(__file__).name}:{line}"


def step_figures_of(text: str) -> Any:
    return step_figures(json.loads(text))


# --- the runner

WORKER = """
import sys, time, json
name, results = sys.argv[1:]
assert sys.stdin.readline() == "go\\n"
def tell(**row):
    with open(results, "a") as file: file.write(json.dumps(row) + "\\n")
if "fails" in name:
    tell(step_ms=1.0)
    raise RuntimeError("out of memory")
if "refuses" in name:
    tell(note="not run: no such key")
elif "hangs" in name:
    tell(step_ms=2.0)
    time.sleep(60)
else:
    tell(device="a device of its own")
    tell(tokens_per_s=1000.0, note="fine")
"""


def run(folder: Path, parts: Sequence[Part], seconds: float = 10_000) -> list[dict[str, Any]]:
    """Run parts; an hour passes as soon as one that hangs has told something."""
    program = folder / "worker.py"
    program.write_text(WORKER)
    table = Table(folder / "out", "head", [part.name for part in parts])
    runner = Runner(
        table,
        lambda part, results: [sys.executable, "-S", "-E", str(program), part.name, str(results)],
        deadline=seconds,
        together=3,
        folder=folder,
        installed=lambda name: name != "absent",
        clock=lambda: 3600.0 if any(row.get("step_ms") == 2.0 for row in table.rows) else 0.0,
        say=lambda line: None,
    )
    runner.run(parts)
    assert [json.loads(line) for line in (folder / "out/rows.jsonl").read_text().splitlines()] == table.rows
    assert (written := (folder / "out/device.md").read_text()) == table.markdown()
    assert written.startswith("a device of its own; head\n" if len(parts) > 2 else "head\n")
    return table.rows


def test_nothing_ends_the_others(tmp_path: Path) -> None:
    parts = [
        Part("a", "refuses", least=0.1, alone=False),
        Part("a", "after it", after=("a: refuses",), least=0.1),
        Part("b", "fails", least=0.1),
        Part("c", "lacks", needs=("os", "absent"), least=0.1),
        Part("d", "late", least=20_000),
        Part("e", "works", least=0.1),
        Part("f", "hangs", least=0.1),
        Part("g", "after that", least=0.1),
    ]
    rows: dict[str, list[Any]] = {}
    for row in run(tmp_path, parts):
        rows.setdefault(f"{row['part']} {row['contender']}", []).append(row.get("note", row.get("step_ms")))
    assert rows["a refuses"] == ["not run: no such key"]
    assert rows["a after it"] == ["not run: “a: refuses” was not: no such key"]
    assert rows["b fails"] == [1.0, "not run: ended with status 1: RuntimeError: out of memory"]
    assert rows["c lacks"] == ["not run: absent is not installed"]
    assert rows["d late"] == ["not run: 10000 s are left, and it takes at least 20000 s"]
    assert rows["e works"] == rows["g after that"] == ["fine"]
    assert rows["f hangs"] == [2.0, "not run: ended, its time was over"]


def test_the_budget_ends_what_runs(tmp_path: Path) -> None:
    rows = run(tmp_path, [Part("a", "hangs", seconds=5000, least=0.1), Part("b", "works", least=2)], seconds=3000)
    late = "not run: 0 s are left, and it takes at least 2 s"
    assert [row.get("note") for row in rows] == [None, "not run: ended, its time was over", late]


def test_a_line_of_the_table() -> None:
    row = {"part": "a|b", "contender": "ours", "tokens_per_s": 12345.6, "step_ms": 1234.56, "mfu": 0.4567}
    row |= {"peak_bytes": 3 * 2**29, "hidden": 0.5, "busy": None, "waits": 0, "loss": 1.23456, "note": "x\ny"}
    expected = "| a/b | ours | 12,346 tokens/s | 1,234.6 ms | 45.7% | 1.50 GiB | 50% | – | 0 | 1.2346 | x y |"
    assert line_of(row) == expected
    assert line_of({"part": "a", "contender": "", "what": "w", "note": "n"}) == f"| a {'| – ' * 9}| w: n |"


def test_parts_that_are_asked_for_bring_what_they_need() -> None:
    names = [part.name for part in device.parts() if device.is_wanted(part, ["Wan: ours"])]
    assert names == ["Wan: model and rows", "Wan: ours", "Wan: ours compiled"]


def test_faults_of_the_smallest_form() -> None:
    def found(note: str | None) -> int:
        return len(device.unexpected([{"part": "a", "contender": "b", "note": note}]))

    assert not any(map(found, (None, "fine", "not run: mode needs CUDA", "not run: diffusers is not installed")))
    assert all(map(found, ("not run: out of memory", "packs; no trace: x", "waits (RuntimeError at a.py:1)")))


def test_a_host_is_refused_all_but_the_smallest_sizes() -> None:
    device.require_device(smallest=True)
    with pytest.raises(RuntimeError, match="a host runs --smallest"):
        device.require_device(smallest=False)


# --- wheels


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    told = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n{told}\n")
        archive.writestr(f"{name}/vendored/other-1.dist-info/METADATA", "Name: other\nVersion: 1\n")
    return path


def test_what_is_missing_or_older_is_installed_and_torch_never(tmp_path: Path) -> None:
    for name, version in (("torch", "9.0"), ("new_one", "1.0"), ("older", "1.10"), ("same", "2.0"), ("newer", "3.0")):
        wheel(tmp_path, name, version)
    here = {"torch": "2.11.0+cu130", "older": "1.9.3", "same": "2.0", "newer": "10.0"}
    chosen = device_wheels.wanted(device_wheels.wheels_of(tmp_path), here.get)
    assert [one.name for one in chosen] == ["new-one", "older"]
    wheel(tmp_path, "same", "2.1")
    with pytest.raises(SystemExit, match="more than one wheel of same"):
        device_wheels.wheels_of(tmp_path)
    with pytest.raises(SystemExit, match="no wheels"):
        device_wheels.wheels_of(tmp_path / "nowhere")


def test_needs_that_nothing_covers_are_found(tmp_path: Path) -> None:
    needs = ("torch>=2", "new_one", "gone; extra == 'all'", "gone2; sys_platform == 'win32'", "Left_Out[x]>=1,<2")
    wheel(tmp_path, "one", "1.0", *needs)
    wheel(tmp_path, "new-one", "1.0")
    assert device_wheels.missing_needs(device_wheels.wheels_of(tmp_path)) == ["left-out (of one)"]


def test_the_package_needs_nothing_that_is_left_behind() -> None:
    covered = {*device_wheels.EXPECTED, *device_wheels.TAKEN}
    assert device_wheels.needs_of_the_package() <= covered
    assert "torch" in device_wheels.needs_of_the_package()
