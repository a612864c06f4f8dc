"""Files of an earlier run in a run folder: a new run resumes from them, removes them (--overwrite), or raises."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.best import BEST
from mindspeed_mm.checkpoint.run_folder import (
    ANSWERS,
    LOSS_PICTURE,
    METRICS,
    REPORT_FOLDER,
    REPORT_PAGE,
    ROWS,
    TRACKER,
    checkpoints,
    hide,
)
from mindspeed_mm.checkpoint.start import Start
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.files import fsync_path, is_inside, is_same_path
from mindspeed_mm.utils.log import logger

_CHECKPOINT = re.compile(r"iter_\d{7,}")
_RECORDS = "|".join(name.removesuffix(".jsonl") for name in (METRICS, ANSWERS))
_OTHERS = re.compile(rf"hf(_ema)?(_iter_\d{{7,}})?|{ROWS}|({_RECORDS})(\.\d+)?\.jsonl")
#: what shows a run: no trace of one by itself, as these names may be anybody's
_SHOWN = (REPORT_PAGE, LOSS_PICTURE, REPORT_FOLDER)


def traces_of_run(root: Path) -> list[Path]:
    """Return the files and folders of a run, in the order for removal.

    It is: tracker, best.json, checkpoints, exports, records, its report.

    A tracker that names `release` is not listed: a conversion wrote it, and a run may start from its weights.
    """
    if not root.is_dir():
        return []
    tracker, names = root / TRACKER, sorted(root.iterdir())
    tracks_a_run = tracker.is_file() and tracker.read_text(encoding="utf-8", errors="replace").strip() != "release"
    found = [
        *([tracker] if tracks_a_run else []),
        *([root / BEST] if (root / BEST).is_file() else []),
        *(path for path in names if _CHECKPOINT.fullmatch(path.name)),
        *(path for path in names if _OTHERS.fullmatch(path.name)),
    ]
    return [*found, *(path for path in names if found and path.name in _SHOWN)]


def prepare_run_folder(
    save: str | Path,
    load: str | None,
    start: Start,
    *,
    finetune: bool = False,
    overwrite: bool = False,
    is_own: bool = False,
    reads: Mapping[str, str] | None = None,
) -> None:
    """Prepare the --save folder so that a run doesn't overwrite another one unless --overwrite is set; rank 0 only.

    Args:
        save, load: --save and --load.
        start: the starting point that `load` names.
        finetune: --finetune, for the message.
        overwrite: remove the files of an earlier run (--overwrite); `load` is outside of the folder then.
        is_own: whether an earlier attempt of this launch wrote the files: they are not removed.
        reads: key → path in the run's files (`paths_of`); files that the run reads are not removed either.

    Raises:
        ConfigError: the folder has files of another run, which this one does not resume.
    """
    root = Path(save)
    found = traces_of_run(root)
    goes_on = load is not None and is_same_path(load, root)
    if not found or ((goes_on or is_own) and start.directory is None):
        return
    if start.resumes and start.directory is not None and is_same_path(start.directory.parent, root):
        _warn_of_later_checkpoints(root, start.directory)
    elif is_own:
        return  # it failed before its first checkpoint, and starts once more where it has started
    elif overwrite:
        _refuse_needed(found, reads or {})
        remove(found)
        logger.warning(f"--overwrite: removed from '{root}' what an earlier run wrote: {_names(found)}")
    else:
        wrote = _names(found)
        sentence = f"--save '{root}' holds what an earlier run wrote ({wrote}), and this run would write over it"
        if goes_on:
            why = f"it starts at iteration 0, with the weights of '{start.directory}'"
            go_on = ", or leave --finetune out to go on with that run" if finetune else ""
            raise ConfigError(f"{sentence}: {why}; give another --save{go_on}")
        raise ConfigError(sentence + _advice(root, load))


def remove(found: Sequence[Path]) -> None:
    """Remove the files that `traces_of_run` returned; if killed, no incomplete checkpoint stays visible."""
    for path in found:
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif _CHECKPOINT.fullmatch(path.name):
            shutil.rmtree(hide(path, "deleting"), ignore_errors=True)
        else:
            shutil.rmtree(path)
        if path.name == TRACKER:
            fsync_path(path.parent)  # the tracker must be gone before the checkpoint that it names


def paths_of(files: Mapping[str, Any]) -> dict[str, str]:
    """Return every string in a run's files, by its key ("model.json: init_from_hf_path").

    Args:
        files: name → content, with nested dicts and lists.
    """
    found: dict[str, str] = {}

    def visit(key: str, value: Any) -> None:
        if isinstance(value, str) and value:
            found[key] = value
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                visit(f"{key}.{name}" if ": " in key else f"{key}: {name}", inner)
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                visit(f"{key}[{number}]", inner)

    for name, content in files.items():
        visit(name, content)
    return found


def _refuse_needed(found: Sequence[Path], reads: Mapping[str, str]) -> None:
    for key, path in reads.items():
        for trace in found:
            if os.path.exists(path) and is_inside(path, trace):
                raise ConfigError(
                    f"--overwrite would remove '{trace}', and {key} names '{path}', which this run reads; give another "
                    "--save, or move what it reads out of there"
                )


def _warn_of_later_checkpoints(root: Path, directory: Path) -> None:
    iteration = int(directory.name.rpartition("_")[2])
    later = [c.directory for c in reversed(checkpoints(root)) if c.iteration is not None and c.iteration > iteration]
    if later:
        logger.warning(
            f"'{root}' also holds checkpoints behind {directory.name}, where this run goes on ({_names(later)}); each "
            "stays until this run saves the same iteration"
        )


def _advice(root: Path, load: str | None) -> str:
    go_on = f"--load '{root}'" + (f" instead of '{load}'" if load else "")
    return f"; give {go_on} to go on with that run, --overwrite to remove that and start anew, or another --save"


def _names(found: Sequence[Path]) -> str:
    return ", ".join(path.name for path in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
