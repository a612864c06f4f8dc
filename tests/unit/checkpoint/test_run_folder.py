"""A checkpoint is visible only when it is whole, and the tracker names one that is there, whenever a run is killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint import run_folder
from mindspeed_mm.checkpoint.best import BEST, BestCheckpoint, read_best
from mindspeed_mm.checkpoint.run_folder import (
    TRACKER,
    RunFolder,
    checkpoints,
    find_checkpoint,
    has_checkpoint,
)
from mindspeed_mm.utils.errors import CheckpointError


def put(root: Path, iteration: int, content: str = "new", keep: int | None = None) -> None:
    """Bring a checkpoint of two files into a run folder, as the saver does."""
    folder = RunFolder(root, keep)
    working = folder.open(iteration)
    (working / "data").write_text(content)
    (working / ".metadata").write_text(content)
    try:
        folder.publish(iteration)
    except OSError:
        folder.discard(iteration)
        raise
    folder.forget_old()


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def seen(root: Path) -> dict[str, str]:
    """Visible folders and their content; all of them must be whole."""
    found = {}
    for path in root.glob("iter_*"):
        assert (path / ".metadata").read_text() == (path / "data").read_text()
        found[path.name] = (path / "data").read_text()
    return found


def test_written_checkpoints_are_found(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path)
    assert checkpoints(tmp_path) == []
    put(tmp_path, 3)
    put(tmp_path, 12)
    assert has_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path).iteration == 12
    assert find_checkpoint(tmp_path, 3).directory == tmp_path / "iter_0000003"
    assert (tmp_path / TRACKER).read_text() == "12"
    (tmp_path / "iter_0000020").mkdir()  # no checkpoint
    assert [c.iteration for c in checkpoints(tmp_path)] == [12, 3]
    assert checkpoints(tmp_path / "nowhere") == []


def test_old_ones_are_forgotten_only_after_the_new_one_is_visible(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        put(tmp_path, iteration, keep=2)
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", TRACKER]


@pytest.mark.parametrize("keep, left", [(1, {9, 10, 12}), (2, {8, 9, 10, 12}), (3, {8, 9, 10, 12})])
def test_a_run_forgets_its_own_only(tmp_path: Path, keep: int, left: set[int]) -> None:
    """W09: a run that went back to iteration 8 saves 9; folders with higher numbers are not its own, nor counted."""
    for iteration in (8, 10, 12):
        put(tmp_path, iteration)
    put(tmp_path, 9, keep=keep)
    assert {c.iteration for c in checkpoints(tmp_path)} == left
    assert find_checkpoint(tmp_path).iteration == 9


def test_release_takes_no_place(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        put(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("release")
    RunFolder(tmp_path, keep=2).forget_old()
    assert {c.iteration for c in checkpoints(tmp_path)} == {2, 3}


def test_leftovers_are_removed(tmp_path: Path) -> None:
    put(tmp_path, 3, "three")
    for name in (".iter_0000004.saving", ".iter_0000001.deleting", ".iter_0000003.replaced", ".iter_0000006.replaced"):
        shutil.copytree(tmp_path / "iter_0000003", tmp_path / name)
    (tmp_path / f".{TRACKER}.tmp").write_text("4")
    (tmp_path / ".hf.saving").mkdir()  # not ours
    RunFolder(tmp_path).remove_leftovers()
    assert names(tmp_path) == [".hf.saving", "iter_0000003", "iter_0000006", TRACKER]


@dataclass(frozen=True)
class Story:
    """A save into a folder.

    Attributes:
        there: iterations that the folder holds.
        tracker: the one that the tracker names.
        iteration: the one that is saved.
        keep: newest ones that stay.
    """

    name: str
    there: tuple[int, ...]
    tracker: int
    iteration: int
    keep: int | None = None


STORIES = [
    Story("one_more", (8, 10), 10, 12),
    Story("one_again", (8, 10), 8, 10),
    Story("the_named_one_again", (8, 10), 10, 10),
    Story("the_only_one_again", (10,), 10, 10),
    Story("one_more_and_old_ones_less", (6, 8, 10), 10, 12, keep=2),
]
all_stories = pytest.mark.parametrize("story", STORIES, ids=[story.name for story in STORIES])
NOT_REACHED, DONE, RAISED, KILLED = 0, 4, 3, 9


def at_each_change(story: Story, root: Path, save: Callable[[int], int]) -> Iterator[int]:
    """Prepare a folder anew for `save` with 1, 2 and so on, until it returns NOT_REACHED; what it returned."""
    for number in range(1, 200):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for iteration in story.there:
            put(root, iteration, "old")
        (root / TRACKER).write_text(str(story.tracker))
        status = save(number)
        if status == NOT_REACHED:
            return
        yield status


def killed_at(number: int, story: Story, root: Path, can_exchange: bool) -> int:
    """Save in a process that ends before the n-th change of the file system."""
    child = os.fork()
    if child == 0:
        status = RAISED
        try:
            with acting_before_change(number, can_exchange, lambda: os._exit(KILLED)):
                put(root, story.iteration, keep=story.keep)
            status = NOT_REACHED
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def failed_at(number: int, story: Story, root: Path, can_exchange: bool) -> int:
    """Save where the n-th change of the file system fails."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with acting_before_change(number, can_exchange, fail) as acted:
        try:
            put(root, story.iteration, keep=story.keep)
        except OSError:
            return RAISED
    return DONE if acted else NOT_REACHED


@contextlib.contextmanager
def acting_before_change(number: int, can_exchange: bool, act: Callable[[], None]) -> Iterator[list[bool]]:
    """Call `act` before the n-th call that changes the file system; yields a list that is filled then."""
    acted: list[bool] = []
    done = 0

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                acted.append(True)
                act()
            return change(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
            patch.setattr(os, name, watched(getattr(os, name)))
        patch.setattr(
            run_folder, "exchange", watched(run_folder.exchange) if can_exchange else lambda one, other: False
        )
        yield acted


def hidden(root: Path) -> list[str]:
    return [name for name in names(root) if name.startswith(".")]


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two_steps"])
@all_stories
def test_killed_at_any_instant(tmp_path: Path, story: Story, can_exchange: bool) -> None:
    root = tmp_path / "run"
    kills = 0
    for status in at_each_change(story, root, lambda number: killed_at(number, story, root, can_exchange)):
        assert status == KILLED
        kills += 1
        whole = seen(root)
        if story.name == "the_only_one_again" and not can_exchange and not has_checkpoint(root):
            pass  # for the time of two renames there is nothing that the tracker could name
        else:
            assert find_checkpoint(root).directory.name in whole
        RunFolder(root).remove_leftovers()
        assert hidden(root) == []
        assert whole.keys() <= seen(root).keys() and len(seen(root)) >= 1
        put(root, 14)
        assert find_checkpoint(root).iteration == 14
    assert kills >= 8


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two_steps"])
@all_stories
def test_a_change_that_fails_at_any_instant(tmp_path: Path, story: Story, can_exchange: bool) -> None:
    """Either the new checkpoint is there and named, or all is as it was."""
    root = tmp_path / "run"
    outcomes = set()
    for status in at_each_change(story, root, lambda number: failed_at(number, story, root, can_exchange)):
        outcomes.add(status)
        assert status in (DONE, RAISED)
        whole = seen(root)
        if status == RAISED:
            assert whole == {f"iter_{iteration:07d}": "old" for iteration in story.there}
            assert find_checkpoint(root).iteration == story.tracker
            assert hidden(root) == []
        else:
            assert whole[find_checkpoint(root).directory.name] == "new"
    assert outcomes == {DONE, RAISED}


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        (None, "has no latest_checkpointed_iteration.txt"),
        ("12", "iter_0000012' is missing or not whole"),
        ("twelve", "holds 'twelve'; expected an iteration number or 'release'"),
        ("release", "release' is missing"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, tracker: str | None, words: str) -> None:
    (tmp_path / "iter_0000003").mkdir()
    if tracker:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    with pytest.raises(CheckpointError, match=words) as caught:
        find_checkpoint(tmp_path)
    assert "iter_0000003" in str(caught.value)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory"):
        find_checkpoint(tmp_path / "nowhere")


def best_of(iteration: int, value: float = 1.0) -> BestCheckpoint:
    return BestCheckpoint(iteration, "loss", value)


def put_best(root: Path, iteration: int, *, only: bool, keep: int | None = None) -> None:
    """Bring in the best checkpoint so far, which was due (or not)."""
    folder = RunFolder(root, keep)
    working = folder.open(iteration)
    for name in ("data", ".metadata"):
        (working / name).write_text("best")
    (working / "state.json").write_text(json.dumps({"only_best": only}))
    folder.publish(iteration)
    folder.mark_best(best_of(iteration))
    folder.forget_old()


def test_the_best_one_stays_and_the_one_before_goes(tmp_path: Path) -> None:
    put_best(tmp_path, 1, only=True, keep=2)
    for iteration in (2, 3, 4):
        put(tmp_path, iteration, keep=2)
    assert seen(tmp_path).keys() == {"iter_0000001", "iter_0000003", "iter_0000004"}
    put_best(tmp_path, 5, only=False, keep=2)
    assert seen(tmp_path).keys() == {"iter_0000004", "iter_0000005"}
    assert json.loads((tmp_path / BEST).read_text()) == {"iteration": 5, "metric": "loss", "value": 1.0}
    assert find_checkpoint(tmp_path, "best").iteration == 5


def test_without_a_limit_those_that_were_due_stay(tmp_path: Path) -> None:
    put_best(tmp_path, 1, only=False)
    put_best(tmp_path, 2, only=True)
    put(tmp_path, 3)
    put_best(tmp_path, 4, only=True)
    assert seen(tmp_path).keys() == {"iter_0000001", "iter_0000003", "iter_0000004"}


def test_best_json_agrees_with_the_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.settle_best(0, None) is None
    put_best(tmp_path, 1, only=True)
    put(tmp_path, 2)
    assert folder.settle_best(2, best_of(1)) == best_of(1) == read_best(tmp_path)
    assert folder.settle_best(2, None) == best_of(1) == read_best(tmp_path)  # an older state, or another figure
    # killed between a visible best checkpoint and its name in best.json
    assert folder.settle_best(2, best_of(2, 0.5)) == best_of(2, 0.5) == read_best(tmp_path)
    assert seen(tmp_path).keys() == {"iter_0000002"}
    # the run goes back, to where 2 is still to come
    put(tmp_path, 1)
    assert folder.settle_best(1, best_of(1)) == best_of(1) == read_best(tmp_path)
    (tmp_path / BEST).write_text(json.dumps({"iteration": 2, "metric": "loss", "value": 0.5}))
    assert folder.settle_best(1, None) is None and not (tmp_path / BEST).exists()
    # the best one is in another folder, from where the run went on
    assert folder.settle_best(7, best_of(5)) is None and not (tmp_path / BEST).exists()
    (tmp_path / BEST).write_text("{")
    assert folder.settle_best(2, best_of(2)) == best_of(2) == read_best(tmp_path)


@pytest.mark.parametrize("number", range(1, 9))
def test_killed_while_the_best_one_changes(tmp_path: Path, number: int) -> None:
    """best.json always names a whole checkpoint, and the next run has the better one."""
    put_best(tmp_path, 1, only=True)
    put(tmp_path, 2)
    child = os.fork()
    if child == 0:
        status = RAISED
        try:
            with acting_before_change(number, True, lambda: os._exit(KILLED)):
                RunFolder(tmp_path).mark_best(best_of(2))
            status = DONE
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (KILLED, DONE)
    assert find_checkpoint(tmp_path, "best").iteration in (1, 2)
    RunFolder(tmp_path).remove_leftovers()
    assert RunFolder(tmp_path).settle_best(2, best_of(2)) == best_of(2)
    assert not hidden(tmp_path) and find_checkpoint(tmp_path, "best").iteration == 2


def test_what_is_wrong_with_best_json_is_said(tmp_path: Path) -> None:
    put(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"--ckpt-step best: '.*' has no best.json.*it holds iter_0000003"):
        find_checkpoint(tmp_path, "best")
    for text in ("{", "[]", '{"iteration": "x"}', '{"iteration": 3, "metric": "los", "value": 1}'):
        (tmp_path / BEST).write_text(text)
        with pytest.raises(
            CheckpointError,
            match=r"best.json' .*expected iteration \(a whole number\), metric \(one of loss, exact_match",
        ):
            find_checkpoint(tmp_path, "best")
    (tmp_path / BEST).write_text(json.dumps({"iteration": 9, "metric": "loss", "value": 1.0}))
    with pytest.raises(CheckpointError, match="iter_0000009' is missing"):
        find_checkpoint(tmp_path, "best")
