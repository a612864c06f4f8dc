"""The layout of a run folder: iter_0000100/, and a tracker file that names the last durable one.

A checkpoint is written into a hidden folder, synced to disk, renamed, and only then named by the tracker (itself
replaced atomically). Killed at any instant, a run finds the last visible checkpoint whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.files import fsync_tree, replace_file

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"^iter_(\d{7,})$")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a run folder.

    Attributes:
        directory: where its files are.
        iteration: the step after which it was taken; None for `release` (weights to start from).
    """

    directory: Path
    iteration: int | None


def iteration_directory(root: Path, iteration: int) -> Path:
    """`<root>/iter_0000100` for iteration 100."""
    return root / f"iter_{iteration:07d}"


def find_checkpoint(root: str | Path, step: int | None = None) -> FoundCheckpoint:
    """Find the checkpoint that a run folder's tracker names, or that of `step`.

    Raises:
        CheckpointError: no tracker, an unreadable one, or the folder that it names is missing; lists what is there.
    """
    root = Path(root)
    if not root.is_dir():
        raise CheckpointError(f"--load '{root}' is no directory; expected a run folder that holds {TRACKER}")
    if step is not None:
        word = str(step)
    else:
        tracker = root / TRACKER
        if not tracker.is_file():
            raise CheckpointError(
                f"--load '{root}' has no {TRACKER}, so nothing to resume from; it holds {_listing(root)}"
            )
        word = tracker.read_text(encoding="utf-8").strip()
    if word == "release":
        found = FoundCheckpoint(root / "release", None)
    elif word.isdigit():
        found = FoundCheckpoint(iteration_directory(root, int(word)), int(word))
    else:
        raise CheckpointError(
            f"{root / TRACKER} holds '{word[:40]}'; expected an iteration number or 'release'; "
            f"'{root}' holds {_listing(root)}"
        )
    if not (found.directory / ".metadata").is_file():
        raise CheckpointError(
            f"checkpoint '{found.directory}' is missing or not whole (no .metadata); '{root}' holds {_listing(root)}"
        )
    return found


def has_checkpoint(root: str | Path | None) -> bool:
    """Whether `root` is a run folder with a tracker."""
    return bool(root) and (Path(str(root)) / TRACKER).is_file()


def _listing(root: Path) -> str:
    names = sorted(p.name for p in root.iterdir() if not p.name.startswith("."))
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "nothing"


class CheckpointWriter:
    """Brings checkpoints into a run folder, all ranks together; rank 0 moves folders and the tracker."""

    def __init__(
        self, root: str | Path, is_first_rank: bool, barrier: Callable[[], None], keep: int | None = None
    ) -> None:
        """
        Args:
            keep: how many iteration folders stay (--save-total-limit); None or 0: all.
        """
        self.root = Path(root)
        self._first = is_first_rank
        self._barrier = barrier
        self._keep = keep or 0

    def write(self, iteration: int, save: Callable[[Path], None]) -> Path:
        """Call `save(folder)` on every rank, then make the result visible as `iteration`.

        Args:
            save: writes this rank's files, durably.
        """
        final = iteration_directory(self.root, iteration)
        working = self.root / f".{final.name}.saving"
        if self._first:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(working, ignore_errors=True)
            working.mkdir()
        self._barrier()
        save(working)  # each rank forces its own files to disk: others may still be writing theirs
        self._barrier()
        if self._first:
            fsync_tree(working)
            if final.exists():
                shutil.rmtree(final)
            os.replace(working, final)
            fsync_tree(self.root, files=False)
            replace_file(self.root / TRACKER, str(iteration))
            self._forget_old()
        self._barrier()
        return final

    def _forget_old(self) -> None:
        if self._keep <= 0:
            return
        found = sorted(p for p in self.root.iterdir() if _ITERATION.match(p.name))
        for old in found[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
