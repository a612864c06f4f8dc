"""A run as trackers show it: name, project, tags, and its settings without secrets."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.sections import Section
from mindspeed_mm.monitor.trackers.base import TrackedRun

#: parts of `Run` that aren't settings: the process's place, and what the other parts say in a typed form
_LEFT_OUT = ("files", "given", "launch")
#: names of settings whose value is a secret
_SECRET = re.compile(
    r"^(token|key)$|(^|_)(api_?key|secret|password|passwd|credentials?|(access|secret|private)_?key"
    r"|(api|access|auth|bearer|hf|hub|github|wandb|swanlab)_?(token|key))$",
    re.IGNORECASE,
)
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_OF_ADDRESS = re.compile(r"([?&][^=&\s]*(?:token|key|secret|signature|password)[^=&\s]*=)[^&\s]+", re.IGNORECASE)
HIDDEN = "(not shown)"


def tracked_run(run: Run, iteration: int) -> TrackedRun:
    """Return what trackers are told of a run.

    Args:
        iteration: step of the checkpoint that it goes on from; 0: it is new.
    """
    save, flags = run.checkpoint.save, run.trackers
    backend = "fsdp2" if run.uses_fsdp2 else "megatron"
    return TrackedRun(
        project=flags.run_project,
        name=flags.run_name,
        default_name=Path(os.path.abspath(save)).name if save else None,
        tags=tuple(dict.fromkeys((backend, *(("lora",) if run.lora is not None else ()), *flags.run_tags))),
        config=_settings_of(run),
        folder=Path(save) if save else None,
        iteration=iteration,
    )


def _settings_of(run: Run) -> dict[str, Any]:
    """Return the sections of a run as values of JSON, with secrets hidden, and the number of its processes."""
    found = {f.name: _plain(getattr(run, f.name)) for f in dataclasses.fields(run) if f.name not in _LEFT_OUT}
    return {"processes": run.launch.world_size, **found}


def _plain(value: object, name: str = "") -> Any:
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, name) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if name and _SECRET.search(name) and value:
        return HIDDEN
    return _SECRET_OF_ADDRESS.sub(rf"\1{HIDDEN}", _USER_OF_ADDRESS.sub("", str(value)))
