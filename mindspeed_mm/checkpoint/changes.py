"""What may change between a checkpoint and the run that goes on from it: the flags given now count, and it is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.configs.run import Run
from mindspeed_mm.utils.log import notice

# flag → what a change of it means, where it is more than its name says
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
    """The settings of a run that a checkpoint remembers, by flag."""
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


def tell_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say once which settings differ from those that a checkpoint was saved with."""
    changed = []
    for name, meaning in _RECORDED.items():
        if name in before and before[name] != now.get(name):
            flag = "ranks" if name == "world_size" else "--" + name.replace("_", "-")
            changed.append(f"{flag} {before[name]} → {now.get(name)}" + (f" ({meaning})" if meaning else ""))
    if changed:
        notice(f"changed since the checkpoint, the flags given now count: {'; '.join(changed)}")
