"""A described run as one YAML file that starts it again, in the dialect of `dialects/gpt_args.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml

from mindspeed_mm.configs.files import FileSection, read_yaml
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.spec import all_flags
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.working_directory import WORKING_DIRECTORY, named_from
from mindspeed_mm.utils.files import is_same_path

#: flags whose files are sections of the file, and those that another start must give anew
_NOT_WRITTEN = (
    "mm_model",
    "mm_data",
    "mm_tool",
    "fsdp2_config_path",
    "local_rank",
    "dry_run",
    "dry_run_world_size",
    "overwrite",
)
_WIDTH = 120


def written_run(run: Run, heading: str) -> str:
    """Return the file's text.

    Args:
        run: its flags are written as they were given, its files with the content that was read.
        heading: lines of comments above it, without their '#'.
    """
    folder = os.getcwd()
    content: dict[str, Any] = {WORKING_DIRECTORY: folder, "gpt_args": _flags(run)}
    if "save" in content["gpt_args"]:
        content["gpt_args"]["save"] = named_from(folder, content["gpt_args"]["save"])
    content |= {name: getattr(run.files, name).to_dict() for name in ("model", "data") if hasattr(run.files, name)}
    if hasattr(run.files, "tool"):
        content["tools"] = run.files.tool.to_dict()
    sharding = _sharding(run.parallel.fsdp2_config_path)
    if sharding is not None:
        content["fsdp2"] = sharding
    comments = "".join(f"# {line}\n" if line else "#\n" for line in heading.splitlines())
    return comments + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=_WIDTH)


def _flags(run: Run) -> dict[str, Any]:
    """The flags by the names that a file gives them; the Megatron backend is always said: not all scripts have it.

    A --load of the run's own folder is left out: under another --save it would go on from where this run has ended.
    """
    checkpoint = run.checkpoint
    goes_on = checkpoint.load and checkpoint.save and is_same_path(checkpoint.load, checkpoint.save)
    found: dict[str, Any] = {} if run.uses_fsdp2 else {"use_torch_fsdp2": False}
    schema = {item.name: item for item in all_flags(GROUPS)}
    for name, value in run.given.items():
        if name in _NOT_WRITTEN or name in found or (goes_on and name == "load"):
            continue
        item = schema.get(name)
        if item is not None and not item.spellings:  # a switch that can only be turned off
            if value is False:
                found[item.off_spellings[0].removeprefix("--").replace("-", "_")] = True
        else:
            found[name if item is None else item.spelling.removeprefix("--").replace("-", "_")] = value
    return found


def _sharding(path: str | None) -> Mapping[str, Any] | None:
    if isinstance(path, FileSection):
        return dict(path.content)
    return read_yaml(path) if path else None
