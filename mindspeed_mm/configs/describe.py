"""From the words of a launch command and the files that they name to one `Run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from mindspeed_mm.configs.arguments import REQUIRED, parse_args, validate_args
from mindspeed_mm.configs.config import read_files
from mindspeed_mm.configs.evaluation_rules import check_answers, check_drawn, check_validation_rows
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of
from mindspeed_mm.configs.flags.spec import all_flags
from mindspeed_mm.configs.global_args import PublishedArguments, publish
from mindspeed_mm.configs.lora import lora_options
from mindspeed_mm.configs.parallel_model import check_generation_sizes, check_parallel_model
from mindspeed_mm.configs.recipe import Recipe
from mindspeed_mm.configs.run import Run, build_run
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.tracker_rules import asked_trackers
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.launch import Launch, this_launch
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.versions import check_versions

#: attributes that `parse_args` adds to the flags
_OF_THE_LAUNCH = ("backends", "given", "rank", "world_size", "restarts", "params_dtype")


def describe(argv: Sequence[str] | None, recipe: Recipe) -> Run:
    """Read flags and files into one description, checked against the schemas; `get_args()` shows it from then on.

    No torch is imported, so that a mistake is reported in a fraction of a second.

    Args:
        argv: the words after the script's name; None: those of this process.
        recipe: what the script trains.

    Raises:
        ConfigError: anything in them that can't be honoured.
    """
    check_versions()
    own_model = recipe.model_schema is None
    optional = {"mm_model": own_model, "mm_data": recipe.data_schema is None}
    args = parse_args(
        sys.argv[1:] if argv is None else argv,
        extra_args_provider=recipe.own_flags,
        args_defaults=recipe.defaults,
        required=[name for name in REQUIRED if not optional.get(name)],
        backends=recipe.backends,
        own_model=own_model,
    )
    not_own = {*_OF_THE_LAUNCH, *(item.name for item in all_flags(GROUPS))}
    own_flags = {name: value for name, value in vars(args).items() if name not in not_own}
    if recipe.model_schema == "generation" and not args.use_torch_fsdp2:
        args.use_torch_fsdp2 = True
        notice("--use-torch-fsdp2 is implied: this script trains with FSDP2 only")
    _require_extras(args, recipe)
    typed = read_files(args, recipe.model_schema, recipe.data_schema)
    launch = replace(this_launch(), local_rank=args.local_rank)
    if args.dry_run and args.dry_run_world_size is not None:
        launch = Launch(world_size=args.dry_run_world_size)
    raise_all(check_generation_sizes(args) if recipe.model_schema == "generation" else ())
    validate_args(args, launch.world_size)
    run = build_run(
        args,
        typed.files,
        launch=launch,
        backend="fsdp2" if args.use_torch_fsdp2 else "ptd",
        model=typed.model,
        data=typed.data,
        own_flags=MappingProxyType(own_flags),
    )
    answers = check_answers(run, is_scored=recipe.scorer is not None)
    answers += check_drawn(run, draws=recipe.drawer is not None)
    raise_all([*check_validation_rows(run), *answers, *check_parallel_model(run, recipe.model_schema)])
    shown = {name: value for name, value in vars(args).items() if name != "given"}
    flat = {**shown, "mm": typed.files, "tools": run.tools, "expert_model_parallel_size": run.dims.ep}
    publish(run, PublishedArguments(flat, own_flags))
    return run


def _require_extras(args: ParsedFlags, recipe: Recipe) -> None:
    """Refuse a run whose flags ask for packages that aren't installed."""
    if backend_of(args) == "ptd":
        require_extra("megatron", "the Megatron backend, which trains without --use-torch-fsdp2,")
    if recipe.model_schema == "generation":
        require_extra("generation", "a model that makes images or videos")
    if lora_options(args) is not None:
        require_extra("lora", "--lora-target-modules")
    for tracker, flag in asked_trackers(args).items():
        require_extra(tracker, flag)
