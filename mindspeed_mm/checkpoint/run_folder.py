"""The layout of a run folder: checkpoints iter_0000100/, a tracker file that names the last durable one, best.json.

A checkpoint is written into a hidden folder, synced to disk and renamed; then the tracker is replaced atomically. An
old checkpoint is renamed to a hidden name before it is deleted. So whenever a run is killed, all visible checkpoints
are complete, and the tracker names one that exists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm.checkpoint.best import BEST, BestCheckpoint, read_best, write_best
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.files import exchange, fsync_path, read_object, replace_file, working_file
from mindspeed_mm.utils.log import logger

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "state.json"
#: key of state.json: no checkpoint was due, it is there as the best one of --save-best
ONLY_BEST = "only_best"
METRICS = "metrics.jsonl"
ANSWERS = "eval_answers.jsonl"
ROWS = "rows"
LAUNCH = "launch.json"
RUN_FILE = "run.yaml"
#: folder of what a run leaves for its report
REPORT_FOLDER = "report"
ENDINGS = f"{REPORT_FOLDER}/endings.jsonl"
REPORT_PAGE = "report.html"
LOSS_PICTURE = "loss.png"
#: --ckpt-step: an iteration, or the one that best.json names
CheckpointStep = int | Literal["best"]
_ITERATION = re.compile(r"^iter_(\d{7,})$")
_HIDDEN = re.compile(r"^\.(iter_\d{7,})\.(saving|deleting|replaced)$")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a run folder.

    Attributes:
        directory: its folder.
        iteration: the step after which it was saved; None for `release` (weights to start from).
    """

    directory: Path
    iteration: int | None


def iteration_directory(root: Path, iteration: int) -> Path:
    """Return `<root>/iter_0000100` for iteration 100."""
    return root / f"iter_{iteration:07d}"


def working_directory(root: Path, iteration: int) -> Path:
    """Return the hidden folder into which a checkpoint is written."""
    return _hidden(iteration_directory(root, iteration), "saving")


def find_checkpoint(root: str | Path, step: CheckpointStep | None = None) -> FoundCheckpoint:
    """Return the checkpoint of `step`, "best" the one that best.json names, None the one that the tracker names.

    Raises:
        CheckpointError: the tracker or best.json is missing or unreadable, or the checkpoint is missing or incomplete;
            the message lists the content of the folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise CheckpointError(f"--load '{root}' is no directory; expected a run folder that holds {TRACKER}")
    if step == "best":
        word = str(_best_of(root).iteration)
    elif step is not None:
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
    is_hub_layout = found.iteration is None and any(found.directory.glob("*.safetensors"))
    if not (found.directory / ".metadata").is_file() and not is_hub_layout:
        other = next((c.iteration for c in checkpoints(root)), None)
        advice = f"; the newest that looks whole is iteration {other}: add --ckpt-step {other}" if other else ""
        raise CheckpointError(
            f"checkpoint '{found.directory}' is missing or not whole (no .metadata); '{root}' holds "
            f"{_listing(root)}{advice}"
        )
    return found


def _best_of(root: Path) -> BestCheckpoint:
    best = read_best(root)
    if best is None:
        raise CheckpointError(
            f"--ckpt-step best: '{root}' has no {BEST}, which a run with --save-best writes; it holds {_listing(root)}"
        )
    return best


def has_checkpoint(root: str | Path | None) -> bool:
    """Whether `root` is a run folder with a tracker."""
    return bool(root) and (Path(str(root)) / TRACKER).is_file()


def checkpoints(root: str | Path) -> list[FoundCheckpoint]:
    """Return the checkpoints of a run folder that look complete, the newest first."""
    return [FoundCheckpoint(p, n) for n, p in _iteration_folders(Path(root)) if (p / ".metadata").is_file()]


def describe_older_format(path: Path) -> str:
    """Say what to do with a folder in Megatron's torch format; "" for any other."""
    ranks = sorted(p.name for p in path.glob("mp_rank_*"))
    return (
        f"; {ranks[0]} is of Megatron's torch format, which is a pickle and belongs to its layout: convert it to a HF "
        "directory with the program that wrote it"
        if ranks
        else ""
    )


def _iteration_folders(root: Path) -> list[tuple[int, Path]]:
    """Return the visible iteration folders with their numbers, the newest first."""
    named = [(_ITERATION.match(p.name), p) for p in root.iterdir()] if root.is_dir() else []
    return sorted(((int(match[1]), p) for match, p in named if match and p.is_dir()), reverse=True)


def hide(path: Path, what: str) -> Path:
    """Rename a checkpoint's folder to a hidden name with the suffix `what` ("deleting", …), and return its path."""
    hidden = _hidden(path, what)
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    return hidden


def _hidden(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def _listing(root: Path) -> str:
    names = sorted(p.name for p in root.iterdir() if not p.name.startswith("."))
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "nothing"


class RunFolder:
    """Publishes checkpoints in a run folder and deletes old ones; used on rank 0 only."""

    def __init__(self, root: str | Path, keep: int | None = None) -> None:
        """
        Args:
            keep: number of checkpoints to keep (--save-total-limit); None or 0: all.
        """
        self.root = Path(root)
        self._keep = keep or 0

    def remove_leftovers(self) -> None:
        """Remove hidden folders of a killed run, and restore a checkpoint whose replacement was not completed."""
        if not self.root.is_dir():
            return
        try:
            for name in (TRACKER, BEST):
                working_file(self.root / name).unlink(missing_ok=True)
            for path in list(self.root.iterdir()):
                match = _HIDDEN.match(path.name)
                if match and match[2] == "replaced" and not (self.root / match[1]).exists():
                    os.rename(path, self.root / match[1])
                elif match:
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            logger.warning(f"what an earlier run left in '{self.root}' could not be removed: {error}")

    def open(self, iteration: int) -> Path:
        """Create the empty hidden folder for a checkpoint's files."""
        working = working_directory(self.root, iteration)
        self.root.mkdir(parents=True, exist_ok=True)
        if working.exists():
            shutil.rmtree(working)
        working.mkdir()
        return working

    def discard(self, iteration: int) -> None:
        """Remove the hidden folder of a checkpoint that failed."""
        shutil.rmtree(working_directory(self.root, iteration), ignore_errors=True)

    def publish(self, iteration: int) -> Path:
        """Rename the hidden folder, whose files are durable, to that of `iteration`, and update the tracker.

        Raises:
            OSError: the folder and the tracker are as before.
        """
        working, final = working_directory(self.root, iteration), iteration_directory(self.root, iteration)
        fsync_path(working)
        if not final.exists():
            os.rename(working, final)
            self._track_or(iteration, lambda: os.rename(final, working))
        elif exchange(working, final):
            self._track_or(iteration, lambda: exchange(working, final))
            shutil.rmtree(working, ignore_errors=True)
        else:
            self._replace(iteration)
        return final

    def forget_old(self) -> None:
        """Delete the checkpoints that exceed --save-total-limit, the oldest first; the best one stays.

        Checkpoints after the iteration in the tracker are from an earlier run that this one restarted with --ckpt-step:
        they stay until this run saves the same iteration.
        """
        if not self._keep:
            return
        try:
            named, found = self._tracked(), _iteration_folders(self.root)
            if named is not None and named.isdigit():
                found = [(number, path) for number, path in found if number <= int(named)]
            best = self._named_best()
            for number, old in reversed(found[self._keep :]):
                if best is None or number != best.iteration:
                    shutil.rmtree(hide(old, "deleting"), ignore_errors=True)
        except OSError as error:
            logger.warning(f"old checkpoints of '{self.root}' could not be deleted: {error}")

    def mark_best(self, best: BestCheckpoint) -> None:
        """Let best.json name a visible checkpoint, and delete the one before if it was saved for being the best only.

        Raises:
            OSError: best.json is as before.
        """
        before = self._named_best()
        write_best(self.root, best)
        if before is None or before.iteration >= best.iteration:
            return
        old = iteration_directory(self.root, before.iteration)
        try:
            if old.is_dir() and _is_only_best(old):
                shutil.rmtree(hide(old, "deleting"), ignore_errors=True)
        except OSError as error:
            logger.warning(f"'{old}', which is no longer the best checkpoint, could not be deleted: {error}")

    def settle_best(self, iteration: int, best: BestCheckpoint | None) -> BestCheckpoint | None:
        """Bring best.json into agreement with the checkpoint that the run goes on from, and return its content.

        A run that was killed between the two has the best checkpoint already, and not its name in best.json. A run that
        goes back (--ckpt-step) may have the name of a checkpoint behind, which it will write over.

        Args:
            iteration: of the checkpoint that the run goes on from; 0: none.
            best: the best evaluation up to there; None: unknown.
        """
        found = self._named_best()
        seen = {checkpoint.iteration for checkpoint in checkpoints(self.root)}
        if best is None or best.iteration not in seen:
            best = found if found is not None and found.iteration <= iteration and found.iteration in seen else None
        if best is None:
            (self.root / BEST).unlink(missing_ok=True)
        elif best != found:
            self.mark_best(best)
        return best

    def _named_best(self) -> BestCheckpoint | None:
        """Return what best.json says; None, with a warning, if it can't be read."""
        try:
            return read_best(self.root)
        except CheckpointError as error:
            logger.warning(str(error))
            return None

    def _replace(self, iteration: int) -> None:
        """Replace a visible folder in two renames; in between the tracker names another checkpoint, or none."""
        working, final = working_directory(self.root, iteration), iteration_directory(self.root, iteration)
        aside = _hidden(final, "replaced")
        shutil.rmtree(aside, ignore_errors=True)
        before = self._tracked()
        if before == str(iteration):
            other = next((c.iteration for c in checkpoints(self.root) if c.iteration != iteration), None)
            self._track(other)

        def undo() -> None:
            if aside.exists():
                if final.exists():
                    os.rename(final, working)
                os.rename(aside, final)
            if before is not None:
                self._track(before)

        try:
            os.rename(final, aside)
            os.rename(working, final)
        except OSError:
            undo()
            raise
        self._track_or(iteration, undo)
        shutil.rmtree(aside, ignore_errors=True)

    def _track_or(self, iteration: int, undo: Callable[[], object]) -> None:
        try:
            fsync_path(self.root)  # the folder's new name is durable before the tracker names it
            self._track(iteration)
        except OSError:
            undo()
            raise

    def _track(self, value: int | str | None) -> None:
        if value is None:
            (self.root / TRACKER).unlink(missing_ok=True)
        else:
            replace_file(self.root / TRACKER, str(value))

    def _tracked(self) -> str | None:
        tracker = self.root / TRACKER
        return tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else None


def _is_only_best(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved for being the best one only."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and state.get(ONLY_BEST) is True


def read_record(save: str | Path) -> dict[str, Any]:
    """Return the content of `launch.json` of a run folder; {}: it has none that can be read."""
    return read_object(Path(save) / LAUNCH)
