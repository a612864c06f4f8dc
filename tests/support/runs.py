"""Descriptions of runs, for tests of what reads them."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from mindspeed_mm.configs.arguments import validate_args
from mindspeed_mm.configs.config import ConfigReader, MMConfig
from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.spec import all_flags
from mindspeed_mm.configs.global_args import get_args
from mindspeed_mm.configs.recipe import Recipe
from mindspeed_mm.configs.run import Run, build_run
from mindspeed_mm.configs.sections import Section
from mindspeed_mm.utils.launch import Launch


def _no_callback(*_: Any) -> Any:
    raise AssertionError("this recipe describes runs only")


#: of a script with a model and data of its own
OWN = Recipe(model=_no_callback, data=_no_callback, forward_step=_no_callback)


def described_args(words: Sequence[str], recipe: Recipe) -> Namespace:
    """What `get_args()` shows of a launch."""
    describe(words, recipe)
    return get_args()


def run_of_args(args: Namespace, *, model: Any = None, data: Any = None, files: dict[str, Any] | None = None) -> Run:
    """The description that parsed and validated flags make.

    Args:
        model, data: typed files.
        files: content of "model", "data", "tool" as written.
    """
    mm = MMConfig({})
    for name, content in (files or {}).items():
        setattr(mm, name, ConfigReader(content, file=f"{name}.json"))
    fsdp2 = bool(args.use_torch_fsdp2)
    launch = Launch(world_size=args.world_size)
    return build_run(args, mm, launch=launch, backend="fsdp2" if fsdp2 else "ptd", model=model, data=data, own_flags={})


def run_of(*, world_size: int = 1, model: Any = None, data: Any = None, files: Any = None, **flags: Any) -> Run:
    """The description of a run with default flags, but for `flags`; 100 steps at a constant learning rate of 0.01."""
    defaults = {item.name: item.default for item in all_flags(GROUPS)}
    usual = {"lr": 1e-2, "lr_decay_style": "constant", "distributed_backend": "gloo", "micro_batch_size": 1, "seed": 3}
    if not {"train_samples", "train_epochs", "train_iters"} & flags.keys():
        usual["train_iters"] = 100
    args = Namespace(**{**defaults, **usual, **flags}, backends=("fsdp2", "ptd"), world_size=world_size)
    validate_args(args, world_size)
    return run_of_args(args, model=model, data=data, files=files)


def without_origin(run: Run) -> dict[str, Any]:
    """A Run as values to compare, without its origin: names of files, the files as they are written, the launch."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if isinstance(value, Section):
            found[field.name] = value.model_dump()
        elif field.name == "parallel":
            found[field.name] = dataclasses.replace(value, fsdp2_config_path=None)
        elif field.name == "checkpoint":
            found[field.name] = dataclasses.replace(value, overwrite=False)
        elif field.name not in ("files", "launch", "given"):
            found[field.name] = value
    return found
