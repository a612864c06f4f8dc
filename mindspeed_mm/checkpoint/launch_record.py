"""What started a run, kept in its folder: `run.yaml` starts it again, `launch.json` tells how it was started."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.lock_holder import Holder
from mindspeed_mm.checkpoint.run_folder import LAUNCH, RUN_FILE, read_record
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.working_directory import WORKING_DIRECTORY, named_from
from mindspeed_mm.configs.written_run import written_run
from mindspeed_mm.utils.files import is_same_path, replace_file, write_json
from mindspeed_mm.utils.log import logger
from mindspeed_mm.utils.versions import installed_version

_PACKAGES = ("mindspeed_mm", "torch", "torchvision", "transformers", "diffusers", "megatron-core", "peft", "torch_npu")
#: what was there in the place of RUN_FILE, where a run was started with other words beside it
OWN_FILE = "run.own.yaml"
_GIT_SECONDS = 5
#: of `git status --porcelain=v2 --branch`: how the line begins that names the commit, and its name before the first
_COMMIT, _NO_COMMIT = "# branch.oid ", "(initial)"
_STARTED = "Started on"
_HEADING = f"# {_STARTED} "


def record_launch(
    save: str | Path, run: Run, *, iteration: int, changed: Sequence[str] = (), facts: Mapping[str, str] | None = None
) -> None:
    """Write into a run folder what starts its run; rank 0 only.

    A `run.yaml` in the folder that alone has started the run stays as it is, with its comments; one that somebody
    wrote, and other words were given beside, is renamed. Of a run that goes on, `run.yaml` becomes what was given now,
    and `launch.json` keeps the earlier starts.

    Args:
        save: the folder.
        run: the described run, with its length.
        iteration: at which it starts; 0 unless it goes on.
        changed: what differs from the run that it goes on with.
        facts: what the console shows of the run before its first step: name → text.
    """
    start = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "iteration": iteration,
        "train_iters": run.train_iters,
        "restart": run.launch.restarts,
        "command": [sys.executable, *sys.orig_argv[1:]],
        "program": _program(),
        "working_directory": os.getcwd(),
        "processes": run.launch.world_size,
        "processes_per_machine": run.launch.local_world_size,
        "changed": list(changed),
        "facts": dict(facts or {}),
        "versions": {"python": platform.python_version(), **_versions()},
        "git": _git_state(),
    }
    earlier = read_record(save).get("starts", []) if iteration or run.launch.restarts else []
    write_json(Path(save) / LAUNCH, {"launch": this_launch_id(), "starts": [*earlier, start]})
    heading = (
        f"{_STARTED} {run.launch.world_size} processes. The same run again, from any folder and into another one:\n"
        f"mindspeed-mm train {os.path.abspath(save)} --save FOLDER\n"
        f"Relative paths start at {WORKING_DIRECTORY}; where that isn't there, where 'save' starts here."
    )
    file = Path(save) / RUN_FILE
    if not _is_started_by(file, save):
        _keep_own(file)
        replace_file(file, written_run(run, heading))


def _is_started_by(file: Path, save: str | Path) -> bool:
    """Whether this process was started with a file alone, to start anew (--overwrite) or to go on (--load)."""
    words = sys.argv[1:]
    if not (words and file.is_file() and is_same_path(words[0], file)):
        return False
    others = [word for word in words[1:] if word != "--overwrite"]
    return not others or (len(others) == 2 and others[0] == "--load" and is_same_path(others[1], save))


def _keep_own(file: Path) -> None:
    """Rename a file in the place of `run.yaml` that no run has written."""
    if file.is_file() and not file.read_text(encoding="utf-8", errors="replace").startswith(_HEADING):
        own = file.with_name(OWN_FILE)
        os.replace(file, own)
        logger.warning(f"{file} becomes what was given now; the file that was there is {own}")


def this_launch_id() -> dict[str, str]:
    """Return what the processes of one launch on a machine have in common, those that it has restarted included."""
    process = Holder.this_process()
    return {
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "machine": process.machine,
        "launcher": process.launcher,
    }


def _program() -> list[str]:
    """What Python runs: `-m` and a module, or a script, as the working directory names it if it is inside."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    # __file__ is absolute; sys.argv[0] may start at the folder before `enter_working_directory`
    return ["-m", spec.name] if spec is not None else [named_from(os.getcwd(), getattr(main, "__file__", sys.argv[0]))]


def _versions() -> dict[str, str]:
    return {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}


def _git_state() -> dict[str, Any] | None:
    """Commit of the working directory's checkout, and whether files differ from it; None: it is none."""
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain=v2", "--branch"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    commit = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), _NO_COMMIT)
    if commit == _NO_COMMIT:
        return None
    return {"commit": commit, "is_changed": any(not line.startswith("# ") for line in lines)}
