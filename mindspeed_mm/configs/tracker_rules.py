"""Which trackers the flags ask for, and how these flags fit together."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.configs.flags.parsed import ParsedFlags
from mindspeed_mm.configs.flags.trackers import TRACKERS, TrackerArguments, TrackerName

_OF_WANDB = ("wandb_project", "wandb_exp_name", "wandb_save_dir", "wandb_entity")
_OF_ALL = ("run_project", "run_name", "run_tags")


def asked_trackers(flags: TrackerArguments | ParsedFlags) -> dict[TrackerName, str]:
    """Return the trackers that flags ask for, each with the flag that does."""
    named = flags.report_to
    if "none" in named:
        return {}
    implied = {"tensorboard": "tensorboard_dir", "wandb": "wandb_project"}
    found: dict[TrackerName, str] = {}
    for name in TRACKERS:
        if name in named:
            found[name] = f"--report-to {name}"
        elif name in implied and getattr(flags, implied[name]):
            found[name] = _spelled(implied[name])
    return found


def check_trackers(args: ParsedFlags) -> list[str]:
    """Return a sentence for a --report-to that contradicts itself, or whose events have no folder."""
    named = args.report_to
    others = [name for name in named if name != "none"]
    if others and len(others) < len(named):
        return [f"--report-to {' '.join(named)}: none means no tracker; leave it out, or {' and '.join(others)}"]
    if "tensorboard" in named and not args.tensorboard_dir and not args.save:
        return ["--report-to tensorboard needs a folder for its events; give --tensorboard-dir or --save"]
    return []


def tracker_notices(args: ParsedFlags) -> Iterator[str]:
    """Yield a sentence for each flag of a tracker that nothing asks for."""
    given = [name for name in (*_OF_WANDB, *_OF_ALL, "tensorboard_dir") if getattr(args, name)]
    asked = asked_trackers(args)
    for name in given:
        if "none" in args.report_to:
            why = "--report-to is none"
        elif name in _OF_WANDB and "wandb" not in asked:
            why = "neither --report-to wandb nor --wandb-project is there"
        elif name in _OF_ALL and not asked:
            why = "there is no tracker; --report-to names those that get the figures"
        else:
            continue
        yield f"{_spelled(name)} has no effect here: {why}"


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
