"""A used folder: gone on with, removed where that was asked for, else refused; and nothing is touched then."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint import earlier_run
from mindspeed_mm.checkpoint.earlier_run import paths_of, prepare_run_folder, traces_of_run
from mindspeed_mm.checkpoint.run_folder import TRACKER, RunFolder, checkpoints, has_checkpoint
from mindspeed_mm.checkpoint.start import find_start
from mindspeed_mm.utils.errors import ConfigError

FOREIGN = (
    "train.log",
    "configs",
    "model",
    "hf_model",
    "notes.jsonl",
    "report.json",
    "iter_1",
)  # nobody's business here


def used(root: Path, *iterations: int, others: tuple[str, ...] = ("metrics.jsonl",)) -> Path:
    for n in iterations:
        folder = root / f"iter_{n:07d}"
        folder.mkdir(parents=True)
        for name in (".metadata", "state.json"):
            (folder / name).write_text("{}")
    root.mkdir(parents=True, exist_ok=True)
    if iterations:
        (root / TRACKER).write_text(str(iterations[-1]))
    for name in others:
        (root / name).touch() if "." in name else (root / name).mkdir()
    return root


def settle(save: Path, load: Path | None = None, step: int | None = None, **how: Any) -> None:
    start = find_start(load and str(load), str(save), step, how.get("finetune", False))
    prepare_run_folder(str(save), load and str(load), start, **how)


def names(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


@pytest.mark.parametrize(
    "trace",
    [
        "metrics.jsonl",
        "metrics.1.jsonl",
        "rows",
        "hf",
        "hf_ema",
        "hf_iter_0000500",
        "hf_ema_iter_0000500",
        "iter_0000002",
    ],
)
def test_every_trace_of_a_run_makes_a_folder_used(tmp_path: Path, trace: str) -> None:
    used(tmp_path, others=FOREIGN)
    settle(tmp_path)
    (tmp_path / trace).mkdir()
    with pytest.raises(ConfigError, match=rf"holds what an earlier run wrote \({re.escape(trace)}\)"):
        settle(tmp_path)


def test_a_report_is_removed_with_its_run_and_nobody_elses_by_itself(tmp_path: Path) -> None:
    """Files of these names may be a user's own: they make no folder a run's."""
    shown = ("loss.png", "report", "report.html")
    used(tmp_path, others=shown)
    settle(tmp_path, overwrite=True)
    assert names(tmp_path) == sorted(shown)
    (tmp_path / "metrics.jsonl").touch()
    settle(tmp_path, overwrite=True)
    assert names(tmp_path) == []


def test_a_folder_of_converted_weights_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / ".metadata").touch()
    (tmp_path / TRACKER).write_text("release\n")
    settle(tmp_path, tmp_path)
    settle(tmp_path, tmp_path, finetune=True)


def test_who_does_not_go_on_with_it_is_refused(tmp_path: Path) -> None:
    """Without --load, with another's, with weights of its own export, and with --finetune."""
    run, other = used(tmp_path / "run", 2, 4, others=("metrics.jsonl", "hf")), used(tmp_path / "other", 2)
    (run / "hf" / "model.safetensors").touch()
    before = names(tmp_path)
    offer = (
        f"give --load '{run}'{{}} to go on with that run, --overwrite to remove that and start anew, or another --save"
    )
    wrote = f"--save '{run}' holds what an earlier run wrote ({TRACKER}, iter_0000002, iter_0000004, hf and 1 more)"
    for load in (None, other, run / "hf"):
        with pytest.raises(ConfigError) as caught:
            settle(run, load)
        assert str(caught.value).startswith(wrote)
        assert str(caught.value).endswith(offer.format(f" instead of '{load}'" if load else ""))
    with pytest.raises(ConfigError, match=r"it starts at iteration 0.*leave --finetune out to go on"):
        settle(run, run, finetune=True)
    with pytest.raises(ConfigError, match="give --load"):
        settle(run, other, finetune=True)
    assert names(tmp_path) == before


def test_one_command_starts_and_goes_on(tmp_path: Path, said: list[str]) -> None:
    """--load D --save D, however D is written."""
    run = tmp_path / "run"
    settle(run, run)
    used(run)  # killed before the first checkpoint
    settle(run, run)
    used(run, 2, 4, others=())
    settle(run, run / ".." / "run")
    link = tmp_path / "link"
    link.symlink_to(run)
    settle(run, link)
    assert not any("behind" in sentence for sentence in said)
    settle(run, run, step=2)
    assert "behind iter_0000002, where this run goes on (iter_0000004)" in said[-1]
    settle(run, run / "iter_0000002")


def test_a_first_checkpoint_that_was_written_but_not_named_is_gone_on_with(tmp_path: Path, said: list[str]) -> None:
    used(tmp_path, 2, 4)
    (tmp_path / TRACKER).unlink()
    assert find_start(str(tmp_path), str(tmp_path)).directory == tmp_path / "iter_0000004"
    assert f"has no {TRACKER}; going on with" in said[-1]


def test_overwrite_removes_what_runs_write_and_nothing_else(tmp_path: Path, said: list[str]) -> None:
    run = used(tmp_path / "run", 2, 4, others=(*FOREIGN, "metrics.jsonl", "metrics.1.jsonl", "hf", "rows"))
    settle(run, overwrite=True)
    assert sorted(p.name for p in run.iterdir()) == sorted(FOREIGN)
    assert said == [
        f"--overwrite: removed from '{run}' what an earlier run wrote: {TRACKER}, iter_0000002, iter_0000004, hf and 3"
        " more"
    ]
    settle(run, overwrite=True)
    assert len(said) == 1


def test_a_restart_of_the_same_launch_removes_nothing(tmp_path: Path) -> None:
    run = used(tmp_path / "run", 2)
    settle(run, overwrite=True, is_own=True)
    settle(run, load=used(tmp_path / "other", 4), is_own=True)
    assert checkpoints(run)


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("moment", range(7))
def test_overwrite_killed_at_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """What is left is refused again until it is removed, or is whole; nothing half removed looks like a checkpoint."""
    run = used(tmp_path / "run", 2, 4, others=("metrics.jsonl", "hf"))
    changes = iter(range(100))

    def dying(fn: Any) -> Any:
        def change(*args: Any, **how: Any) -> Any:
            if next(changes) == moment:
                if fn is remove_tree:  # half way
                    (Path(args[0]) / ".metadata").unlink(missing_ok=True)
                raise Killed
            return fn(*args, **how)

        return change

    remove_tree = earlier_run.shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(earlier_run.shutil, "rmtree", dying(remove_tree))
        patch.setattr(earlier_run.Path, "unlink", dying(Path.unlink))
        try:
            settle(run, overwrite=True)
        except Killed:
            pass
        else:
            assert moment > 5
    assert not has_checkpoint(run) or find_start(str(run)).directory == run / "iter_0000004"
    assert all((found.directory / "state.json").exists() for found in checkpoints(run))
    if traces_of_run(run):
        with pytest.raises(ConfigError):
            settle(run)
    RunFolder(run).remove_leftovers()
    settle(run, overwrite=True)
    assert names(run) == []


def test_what_the_run_reads_is_not_removed(tmp_path: Path) -> None:
    root = used(tmp_path / "run", 2, others=("metrics.jsonl", "hf"))
    (root / "hf" / "config.json").touch()
    before = names(root)
    files = {"model.json": {"parts": [{"from": str(root / "hf")}]}, "data.json": {"paths": [str(tmp_path), "no path"]}}
    reads = paths_of(files)
    assert list(reads) == ["model.json: parts[0].from", "data.json: paths[0]", "data.json: paths[1]"]
    with pytest.raises(ConfigError, match=re.escape(f"and model.json: parts[0].from names '{root / 'hf'}', which")):
        settle(root, overwrite=True, reads=reads)
    assert names(root) == before
    settle(root, overwrite=True, reads=paths_of({"data.json": files["data.json"]}))
    assert names(root) == []
