"""Settings that may change between a checkpoint and a run that resumes from it: new flags are used, and reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.configs.run import Run
from mindspeed_mm.utils.log import notice

# flag → consequence of a change, if it isn't obvious
_RECORDED = {
    "seed": "rows come in another order from here on: some may come twice in this epoch, others not at all",
    "global_batch_size": "the position in the data is kept in samples; going on at the next whole global batch",
    "micro_batch_size": "",
    "world_size": "",
    "num_workers": "",
    "train_iters": "",
    "lr": "",
    "min_lr": "",
    "lr_decay_style": "",
    "lr_decay_iters": "",
    "lr_warmup_iters": "",
    "lr_warmup_fraction": "",
    "weight_decay": "",
    "clip_grad": "",
    "save_interval": "",
    "eval_interval": "",
    "log_interval": "",
}


def run_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run that are saved in its checkpoints, by flag."""
    sections = (
        run.launch,
        run.process,
        run.batch,
        run.length,
        run.optimizer,
        run.schedule,
        run.checkpoint,
        run.logging,
    )
    found = {name: value for section in sections for name, value in vars(section).items()}
    return {name: found[name] for name in _RECORDED}


def report_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Log a notice with the settings that differ from those of the checkpoint; returns these."""
    changed = []
    for name, meaning in _RECORDED.items():
        if name in before and before[name] != now.get(name):
            flag = "ranks" if name == "world_size" else "--" + name.replace("_", "-")
            changed.append(f"{flag} {before[name]} → {now.get(name)}" + (f" ({meaning})" if meaning else ""))
    if changed:
        notice(f"changed since the checkpoint, the flags given now count: {'; '.join(changed)}")
    return changed
