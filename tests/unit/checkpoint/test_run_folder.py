"""A checkpoint is visible only when it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.checkpoint import run_folder
from mindspeed_mm.checkpoint.run_folder import CheckpointWriter, find_checkpoint, has_checkpoint
from mindspeed_mm.utils.errors import CheckpointError


def writer(root: Path, keep: int | None = None) -> CheckpointWriter:
    return CheckpointWriter(root, is_first_rank=True, barrier=lambda: None, keep=keep)


def save(folder: Path) -> None:
    (folder / ".metadata").write_text("x")


def test_written_checkpoints_are_found(tmp_path: Path) -> None:
    w = writer(tmp_path)
    assert not has_checkpoint(tmp_path)
    w.write(3, save)
    w.write(12, save)
    assert has_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path).iteration == 12
    assert find_checkpoint(tmp_path, 3).directory == tmp_path / "iter_0000003"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"


def test_a_kill_during_the_save_leaves_the_old_one(tmp_path: Path) -> None:
    w = writer(tmp_path)
    w.write(3, save)

    def torn(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        w.write(6, torn)
    assert find_checkpoint(tmp_path).iteration == 3
    assert not (tmp_path / "iter_0000006").exists()
    w.write(6, save)  # what the killed one left is in nobody's way
    assert sorted(p.name for p in (tmp_path / "iter_0000006").iterdir()) == [".metadata"]


def test_no_rank_walks_through_what_another_one_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files come and go in the folder until every rank has saved: only then, and on one rank, is it gone through."""
    events: list[str] = []
    monkeypatch.setattr(run_folder, "fsync_tree", lambda *a, **k: events.append("walk"))
    (tmp_path / ".iter_0000003.saving").mkdir()
    CheckpointWriter(tmp_path, is_first_rank=False, barrier=lambda: events.append("barrier")).write(3, save)
    assert "walk" not in events
    CheckpointWriter(tmp_path, is_first_rank=True, barrier=lambda: events.append("barrier")).write(3, save)
    assert events[3:6] == ["barrier", "barrier", "walk"]


def test_old_ones_are_forgotten_only_after_the_new_one_is_visible(tmp_path: Path) -> None:
    w = writer(tmp_path, keep=2)
    for iteration in (1, 2, 3):
        w.write(iteration, save)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000003"]


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
