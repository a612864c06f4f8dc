"""Trackers get the figures of metrics.jsonl, and no fault of theirs reaches the run."""

from __future__ import annotations

import io
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from PIL import Image

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.flags.trackers import TRACKERS
from mindspeed_mm.configs.recipe import DrawnSample, GeneratedFigures
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.tracker_rules import asked_trackers
from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.metrics import MetricsSink, read_metrics
from mindspeed_mm.monitor.records import EvaluationRecord, SampleSink, Sink
from mindspeed_mm.monitor.sinks import open_sinks
from mindspeed_mm.monitor.trackers.base import Kept, Picture, TrackedRun
from mindspeed_mm.monitor.trackers.described import HIDDEN, tracked_run
from mindspeed_mm.monitor.trackers.kept import KeptFile
from mindspeed_mm.monitor.trackers.sink import TrackerSink, figures_of_line
from mindspeed_mm.monitor.watch import Watch
from mindspeed_mm.utils.errors import ConfigError
from tests.support.records import step_record
from tests.support.runs import OWN
from tests.support.tracker_stores import Figures, figures_by_tracker, name_and_rate, offline_variables, pictures_in

WORDS = "--micro-batch-size 1 --lr 1e-4 --train-iters 9 --use-torch-fsdp2".split()  # noqa: SIM905


@dataclass
class Fake:
    """Keeps what it is told; raises in the calls of `faults`, and waits in `log` for `gate`."""

    run: TrackedRun
    faults: tuple[str, ...] = ()
    gate: threading.Event | None = None
    is_durable: bool = True
    gather_seconds: float = 0.0
    calls: list[int] = field(default_factory=list)
    logged: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    @property
    def kept(self) -> Kept:
        return self.run.keep("one", "somewhere")

    def log(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        if self.gate is not None:
            self.gate.wait()
        self.calls.append(len(records))
        self.logged += records
        if any(f"log {step}" in self.faults for step, _ in records):
            raise OSError("no space\nis left")

    def show(self, pictures: Mapping[str, Picture], step: int) -> None:
        self.logged += [(step, dict.fromkeys(pictures, 0.0))]

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)
        if "close" in self.faults:
            raise RuntimeError("not there")


def tracked(folder: Path | None, iteration: int = 0) -> TrackedRun:
    return TrackedRun(None, None, None, (), {}, folder, iteration)


def sink_of(
    folder: Path, iteration: int = 0, seconds: float = 20.0, **settings: Any
) -> tuple[TrackerSink, Callable[[], Fake]]:
    """A sink, and what returns its tracker once it is open."""
    made: list[Fake] = []

    def open_run(run: TrackedRun) -> Fake:
        made.append(Fake(run, **settings))
        return made[0]

    def tracker() -> Fake:
        deadline = time.monotonic() + 20
        while not made and time.monotonic() < deadline:
            time.sleep(0.001)
        return made[0]

    return TrackerSink("fake", "Fake", tracked(folder, iteration), lambda: open_run, seconds), tracker


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The warnings so far."""
    monkeypatch.setattr(logging.getLogger("mindspeed_mm"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_tracker_that_fails_is_warned_about_once_and_counted(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    sink, tracker = sink_of(tmp_path, faults=("log 1", "log 3", "close"))
    for step in (1, 2, 3):
        sink.step(step_record(iteration=step))
    sink.close()
    assert [step for step, _ in tracker().logged] == [1, 2, 3]
    assert said() == [
        "Fake lacks the step of iteration 1 (OSError: no space is left); training goes on",
        "Fake lacks 2 of 3 records; metrics.jsonl has all",
    ]


def test_records_are_gathered_where_a_request_costs_much(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """For some time, to a limit; the end doesn't wait for it. A fault loses those of one request."""
    sink, tracker = sink_of(tmp_path, gather_seconds=60.0, faults=("log 41",))
    for step in range(1, 51):
        sink.step(step_record(iteration=step))
    sink.close()
    assert tracker().calls == [40, 10] and [step for step, _ in tracker().logged] == [*range(1, 51)]
    assert said() == [
        "Fake lacks the step of iteration 41, and 9 more records (OSError: no space is left); training goes on",
        "Fake lacks 10 of 50 records; metrics.jsonl has all",
    ]
    assert KeptFile(tmp_path, "fake").read() == Kept("one", "somewhere", 40)


def test_one_that_cannot_be_opened_or_finished(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    def refuse(_: TrackedRun) -> Fake:
        input("Your API key: ")  # nobody is there to type it
        raise AssertionError

    sink = TrackerSink("fake", "Fake", tracked(None), lambda: refuse)
    sink.step(step_record())
    sink.close()
    assert said() == [
        "Fake can't be opened (EOFError: EOF when reading a line); training goes on",
        "Fake lacks 1 of 1 records",
    ]
    sink, _ = sink_of(tmp_path, faults=("close",))
    sink.close()
    assert said()[2:] == ["Fake hasn't finished (RuntimeError: not there); training goes on"]


def test_one_that_hangs_delays_neither_the_steps_nor_the_end(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    gate = threading.Event()
    sink, _ = sink_of(tmp_path, seconds=0.3, gate=gate)
    began = time.monotonic()
    for step in range(1, 10_003):
        sink.step(step_record(iteration=step))
    taken = time.monotonic() - began
    sink.close()
    assert taken < 5 and time.monotonic() - began - taken < 3
    assert said() == [
        "Fake hasn't finished after 0.3 s; the run ends without it",
        "Fake lacks 10002 of 10002 records; metrics.jsonl has all",
    ]
    gate.set()


def test_an_error_that_ends_the_run_is_told(tmp_path: Path) -> None:
    sink, tracker = sink_of(tmp_path)
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        sink.close()
    assert tracker().closed == [True]
    sink, tracker = sink_of(tmp_path)
    sink.close()
    assert tracker().closed == [False]


@pytest.mark.parametrize("durable", [True, False])
def test_steps_that_an_earlier_start_has_logged_do_not_come_again(tmp_path: Path, durable: bool) -> None:
    """Those after the checkpoint: how far a tracker has come is kept at each step if it is durable, else at its end."""
    sink, tracker = sink_of(tmp_path, is_durable=durable)
    for step in (1, 2, 3):
        sink.step(step_record(iteration=step))
    sink.evaluation(EvaluationRecord(2, 1, 1.0))
    deadline = time.monotonic() + 20
    while len(tracker().logged) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    kept = KeptFile(tmp_path, "fake").read()
    assert kept == (Kept("one", "somewhere", 3, 2) if durable else Kept("one", "somewhere"))
    sink.close()
    assert KeptFile(tmp_path, "fake").read() == Kept("one", "somewhere", 3, 2)
    sink, tracker = sink_of(tmp_path, iteration=1)
    for step in (2, 3, 4):
        sink.step(step_record(iteration=step))
        sink.evaluation(EvaluationRecord(step, 1, 1.0))
    sink.close()
    assert [(step, "eval_loss" in figures) for step, figures in tracker().logged] == [(3, True), (4, False), (4, True)]
    sink, tracker = sink_of(tmp_path)  # another run in the same folder
    sink.step(step_record(iteration=1))
    sink.close()
    assert [step for step, _ in tracker().logged] == [1] and tracker().run.earlier is None


def test_steps_before_the_checkpoint_that_a_tracker_lacks_are_taken_from_metrics_jsonl(tmp_path: Path) -> None:
    """All of them if it is asked for later, or a kill has lost them; of steps that came twice, the later figures."""
    metrics = MetricsSink(str(tmp_path), resumed=False)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 4.0)):
        metrics.step(step_record(iteration=step, loss=loss))
    metrics.evaluation(EvaluationRecord(2, 1, 5.0))
    metrics.close()
    sink, tracker = sink_of(tmp_path, iteration=2)
    sink.step(step_record(iteration=3, loss=6.0))
    sink.close()
    seen = [(step, figures.get("loss", figures.get("eval_loss"))) for step, figures in tracker().logged]
    assert seen == [(1, 1.0), (2, 4.0), (2, 5.0), (3, 6.0)]
    KeptFile(tmp_path, "fake").write(Kept("one", "somewhere", 1, 0))
    sink, tracker = sink_of(tmp_path, iteration=2)
    sink.close()
    assert [(step, figures.get("loss")) for step, figures in tracker().logged] == [(2, 4.0), (2, None)]


def test_figures_are_finite_numbers() -> None:
    line = {"iteration": 3, "loss": float("nan"), "mfu": None, "rate": {"image": 2.0}, "rows": 3}
    assert figures_of_line(line) == {"rate/image": 2.0, "rows": 3}


def described(*words: str, **settings: Any) -> Run:
    return describe([*WORDS, *words], OWN)


@pytest.mark.parametrize(
    "words, asked",
    [
        ("", {}),
        ("--tensorboard-dir x", {"tensorboard": "--tensorboard-dir"}),
        ("--wandb-project p", {"wandb": "--wandb-project"}),
        (
            "--report-to wandb wandb --tensorboard-dir x",
            {"tensorboard": "--tensorboard-dir", "wandb": "--report-to wandb"},
        ),
        ("--report-to none --wandb-project p --tensorboard-dir x", {}),
    ],
)
def test_which_trackers_flags_ask_for(words: str, asked: dict[str, str]) -> None:
    assert asked_trackers(described(*words.split()).trackers) == asked


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--report-to none wandb", "--report-to none wandb: none means no tracker; leave it out, or wandb"),
        ("--report-to tensorboard", "--report-to tensorboard needs a folder for its events; give --tensorboard-dir"),
        ("--report-to wandbb", "expected one of tensorboard, wandb"),
    ],
)
def test_flags_that_cannot_be_honoured(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described(*words.split())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "words, notices",
    [
        (
            "--wandb-exp-name n",
            ["--wandb-exp-name has no effect here: neither --report-to wandb nor --wandb-project is"],
        ),
        ("--run-name n", ["--run-name has no effect here: there is no tracker"]),
        ("--report-to none --tensorboard-dir x", ["--tensorboard-dir has no effect here: --report-to is none"]),
        ("--report-to wandb --wandb-exp-name n --run-name n --run-tags a b", []),
    ],
)
def test_flags_without_a_tracker_are_told(words: str, notices: list[str], said: Callable[[], list[str]]) -> None:
    described(*words.split())
    assert len(said()) == len(notices) and all(map(str.startswith, said(), notices))


def test_what_a_tracker_is_told_of_a_run() -> None:
    own = {
        "api_key": "abc",
        "HF_TOKEN": "abc",
        "pad_token": "<pad>",
        "max_tokens": 5,
        "server": "http://me:abc@host/x?sas_token=abc&part=1",
    }
    run = described("--report-to", "wandb", "--run-tags", "first", "--save", "runs/mine/")
    shown = tracked_run(run, 3)
    assert (shown.default_name, shown.tags, shown.iteration) == ("mine", ("fsdp2", "first"), 3)
    assert shown.config["optimizer"]["lr"] == 1e-4 and shown.config["processes"] == 1
    hidden = {"api_key": HIDDEN, "HF_TOKEN": HIDDEN, "server": f"http://host/x?sas_token={HIDDEN}&part=1"}
    assert tracked_run(replace(run, own_flags=own), 0).config["own_flags"] == own | hidden


def write_records(sinks: list[Sink], first: int, last: int) -> None:
    """Steps, and an evaluation of each third one."""
    for step in range(first, last + 1):
        metrics = {"aux loss": step / 7} if step % 2 else {}
        record = step_record(
            iteration=step, loss=1 / step, grad_norm=float("nan") if step == 2 else 0.1, metrics=metrics
        )
        for sink in sinks:
            sink.step(record)
        if step % 3 == 0:
            for sink in sinks:
                sink.evaluation(EvaluationRecord(step, 2, 1.5 / step, GeneratedFigures({"wer": step / 3}, 7)))
            for sink in sinks:
                if isinstance(sink, SampleSink):
                    sink.samples(step, [DrawnSample("a cat", 2, 7, (1, 8, 8), {".jpg": sheet(step)})])
    for sink in sinks:
        sink.close()


def sheet(step: int) -> bytes:
    """A JPEG of a sample."""
    output = io.BytesIO()
    Image.new("RGB", (8, 8), (20 * step, 30, 40)).save(output, "JPEG")
    return output.getvalue()


def test_samples_go_to_the_sinks_that_take_some(tmp_path: Path) -> None:
    """Each frame of a clip by itself, without the clip; not those that an earlier start has logged."""
    KeptFile(tmp_path, "fake").write(Kept("one", "somewhere", samples=3))
    sink, tracker = sink_of(tmp_path, iteration=2)
    sinks = [MetricsSink(str(tmp_path), resumed=True), sink]
    files = {"-frame-0.jpg": sheet(1), "-frame-1.jpg": sheet(2), ".mp4": b""}
    with Watch(sinks=sinks, console=Console(), log_interval=1, train_iters=9, global_batch_size=1) as watch:
        for step in (3, 4):
            watch.log_samples(step, [DrawnSample("a dog", 5, 7, (2, 8, 8), files)])
    names = ["samples/prompt-5/frame-0", "samples/prompt-5/frame-1"]
    assert [(step, [*figures]) for step, figures in tracker().logged] == [(4, names)]


def figures_of_file(save: Path) -> Figures:
    """Those of metrics.jsonl; of steps that came twice, the later."""
    found: Figures = {}
    for line in read_metrics(save / "metrics.jsonl"):
        found[line["iteration"]] = found.get(line["iteration"], {}) | figures_of_line(line)
    return found


def merged(parts: list[Figures]) -> Figures:
    """One store; no step is in two parts."""
    found: Figures = {}
    for part in parts:
        assert not found.keys() & part.keys()
        found |= part
    return found


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder; no tracker finds a home directory or a login, and none reaches for the network."""
    for name, value in offline_variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    reached: list[object] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            reached.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    yield tmp_path / "mine"
    assert reached == []


@pytest.mark.parametrize(
    "words, variables, expected",
    [
        ("--report-to wandb", {}, {"project": "mindspeed_mm", "name": "mine", "entity": None, "dir": "mine"}),
        ("--report-to wandb --run-project p --run-name n", {}, {"project": "p", "name": "n"}),
        (
            "--wandb-project a --wandb-exp-name b --wandb-save-dir c --wandb-entity d --run-project p --run-name n",
            {"WANDB_DIR": "w"},
            {"project": "a", "name": "b", "dir": "c", "entity": "d"},
        ),
        (
            "--report-to wandb",
            {"WANDB_PROJECT": "v", "WANDB_NAME": "v", "WANDB_DIR": "v"},  # which W&B reads by itself
            {"project": None, "name": None, "dir": None},
        ),
    ],
)
def test_the_published_flags_of_wandb(
    words: str, variables: dict[str, str], expected: dict[str, Any], save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    told: dict[str, Any] = {}
    made = SimpleNamespace(
        id="one", offline=True, settings=SimpleNamespace(sync_dir="there"), finish=lambda exit_code: 0
    )
    monkeypatch.setattr(wandb, "init", lambda **settings: told.update(settings) or made)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = described(*words.split(), "--no-report", "--save", "mine")
    for begin, (run_id, resume) in ((0, (None, None)), (3, ("one", "allow"))):
        for sink in open_sinks(run, iteration=begin, is_logging_rank=True):
            sink.close()
        assert {name: told[name] for name in expected} == expected
        assert (told["id"], told["resume"]) == (run_id, resume)


@pytest.mark.full
def test_mlflow_s_own_store(save: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its making takes seconds."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{save.parent}/mlflow.db")
    test_the_store_holds_the_figures_of_metrics_jsonl_after_a_resume_too("mlflow", save, said)


@pytest.mark.parametrize("name", TRACKERS)
def test_the_store_holds_the_figures_of_metrics_jsonl_after_a_resume_too(
    name: str, save: Path, said: Callable[[], list[str]]
) -> None:
    """The first start has come to step 8, with a checkpoint at 6; the second one goes on to 10."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = described(
        "--report-to", name, "--no-report", "--save", str(save), "--run-project", save.name, "--run-name", "first"
    )
    assert open_sinks(run, iteration=0, is_logging_rank=False) == []
    before = set(psutil.Process().children(recursive=True))
    for begin, end in ((0, 8), (6, 10)):
        sinks = open_sinks(run, iteration=begin, is_logging_rank=True)
        assert [type(sink) for sink in sinks] == [MetricsSink, TrackerSink]
        write_records(sinks, begin + 1, end)
        trackio = Path(sys.modules["trackio"].utils.TRACKIO_DIR) if name == "trackio" else save
        if begin == 0 and name != "tensorboard":
            assert name_and_rate(name, save, trackio / f"{save.name}.db") == ("first", 1e-4)
    assert said() == []
    found = merged(figures_by_tracker(save, save.name, trackio)[name]())
    expected = figures_of_file(save)
    assert found.keys() == expected.keys() == set(range(1, 11))
    for step, figures in expected.items():
        assert found[step] == pytest.approx(figures, rel=1e-6 if name == "tensorboard" else 0), step  # its are fp32
    drawn = [Image.open(io.BytesIO(sheet(step))).convert("RGB").tobytes() for step in (3, 6, 9)]
    places = {"tensorboard": save / "tensorboard", "mlflow": save.parent / "mlruns", "trackio": trackio}
    assert pictures_in(places.get(name, save)) == sorted(drawn)
    assert not set(psutil.Process().children(recursive=True)) - before
    assert not [thread for thread in threading.enumerate() if thread.name == f"tracker {name}"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
