"""`--dry-run`: what a launch would train, on which layout, without devices, weights or a process group."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.recipe import Recipe
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.working_directory import enter_working_directory
from mindspeed_mm.configs.yaml_run import in_words_of_the_file
from mindspeed_mm.launch import errors_as_sentences
from mindspeed_mm.utils.errors import MMError, kind_of
from mindspeed_mm.utils.extras import missing_library_as_sentence
from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import logger

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_mm.configs.dims import Dims


def asks_for_dry_run(words: Sequence[str]) -> bool:
    """Whether the words of a command line ask for a dry run."""
    return not {"--dry-run", "--dry-run=true"}.isdisjoint(words)


def dry_run(recipe: Recipe, words: Sequence[str]) -> int:
    """Print one JSON object about a launch; returns the exit status.

    The object has `accepted` and `notices`; of an accepted launch `model` (class, numbers of parameters, in all and
    trained), `layout` (backend, world_size, sizes of the kinds of parallelism), `batch`, `units` and `prefetch`, how
    many are gathered ahead (FSDP2), or `stages` (Megatron), what parallelisms split (`experts`, `columns` and `rows` of
    linear layers, media of `towers`), and `steps_per_epoch`, null where the data or what reads them are not there, with
    the reason in `why_no_steps_per_epoch`; of a refused one `refusal`, and the status is 1.

    Args:
        recipe: what the script trains.
        words: those of the command line, after the script's name.
    """

    def outline() -> Mapping[str, object]:
        there = enter_working_directory(words)
        with in_words_of_the_file(there):
            return outline_of(describe(there, recipe), recipe)

    return print_answer(outline)


def print_answer(outline: Callable[[], Mapping[str, object]]) -> int:
    """Print the JSON object about a launch: `accepted`, `notices`, and the outline or the refusal.

    Args:
        outline: describes the launch; an MMError that it raises is the refusal.

    Returns:
        the exit status, 1 of a refused launch.
    """
    with _notices() as notices, errors_as_sentences():
        try:
            with missing_library_as_sentence():
                answer = {"accepted": True, **outline(), "notices": notices}
        except MMError as error:
            answer = {"accepted": False, "refusal": f"{kind_of(error)}: {error}", "notices": notices}
    if is_first_rank():
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    return 0 if answer["accepted"] else 1


def outline_of(run: Run, recipe: Recipe) -> dict[str, object]:
    """Return the parts of the answer that describe a run.

    Raises:
        ConfigError: a model that can't be built, or a layout that doesn't fit.
    """
    shaped = _fsdp2_outline(run, recipe) if run.uses_fsdp2 else _megatron_outline(run)
    steps, why = _steps_per_epoch(run, recipe)
    batch = run.batch
    answer = {
        **shaped,
        "batch": {
            "micro_batch_size": batch.micro_batch_size,
            "global_batch_size": batch.global_batch_size,
            "num_microbatches": batch.num_microbatches,
            "data_parallel_size": batch.data_parallel_size,
        },
        "steps_per_epoch": steps,
    }
    return {**answer, "why_no_steps_per_epoch": why} if why is not None else answer


def _fsdp2_outline(run: Run, recipe: Recipe) -> dict[str, object]:
    """Build the model on meta, and expand the paths of fsdp2.yaml."""
    import torch

    from mindspeed_mm.backends.fsdp2 import block_recompute, call_provider, with_precision
    from mindspeed_mm.models.common.adapters import prepare_adapters
    from mindspeed_mm.models.common.base_model import refuse_own_sharding
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.contract import as_shardable

    path = run.parallel.fsdp2_config_path
    assert run.fsdp2 is not None, "the run is described for this backend"
    context = BuildContext(
        load_weights=False,
        in_run=True,
        defer_weights=True,
        seed=run.process.seed,
        trust_remote_code=run.trust_remote_code,
        loss=run.loss,
        seq_length=run.batch.seq_length,
        fsdp2_config_path=path,
        fsdp2=with_precision(run.fsdp2, run.precision),
        dims=run.dims,
        recompute=block_recompute(run.parallel),
        swap_attention=run.parallel.swap_attention,
        chunk_mlp_tokens=run.parallel.chunk_mlp_tokens,
        lora=run.lora,
        sequence_parallel=run.parallel.sequence_parallel,
    )
    with build_context(context):
        with torch.device("meta"):
            model = as_shardable(call_provider(recipe.model_of(run)))
        refuse_own_sharding(model.sharded_module, run.dims)
        if run.lora is not None:
            prepare_adapters(model, run.lora)
        outline = model.plan_sharding(run.launch.world_size, path)
    answer: dict[str, object] = {"model": _model_outline(model.sharded_module)}
    if outline is None:  # a class with a fully_shard of its own
        return {**answer, "layout": {"backend": "fsdp2", "world_size": run.launch.world_size}, "units": None}
    parts = {"units": outline.units, "recomputed": outline.recomputed, "ignored": outline.ignored}
    split = {"experts": outline.experts, "columns": outline.columns, "rows": outline.rows, "towers": outline.towers}
    split |= {"offloaded": outline.offloaded, "chunked": outline.chunked, "compiled": outline.compiled}
    split |= {"chunked_mlps": outline.chunked_mlps, "kept": outline.kept}
    parts |= {name: paths for name, paths in split.items() if paths}
    forward, backward = run.fsdp2.num_to_forward_prefetch, run.fsdp2.num_to_backward_prefetch
    prefetch = {"forward": "1 on devices, 0 on the host" if forward is None else forward, "backward": backward}
    lists = {name: list(paths) for name, paths in parts.items()}
    return {**answer, "layout": _layout(run, outline.dims), **lists, "prefetch": prefetch}


def _megatron_outline(run: Run) -> dict[str, object]:
    """Plan the stages of the transformers model that model.json describes."""
    from mindspeed_mm import accelerator
    from mindspeed_mm.configs.vlm_config import VLMModelConfig

    parallel, described, dims = run.parallel, run.model, run.dims
    if not isinstance(described, VLMModelConfig):
        return {"model": None, "layout": _layout(run, dims), "stages": None}
    accelerator.prepare_megatron()
    from mindspeed_mm.models.megatron.vlm_model import planned_meta_model

    model, stages = planned_meta_model(
        described, parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size, run.lora
    )
    return {"model": _model_outline(model), "layout": _layout(run, dims), "stages": [_stage(s) for s in stages]}


def _stage(stage: object) -> dict[str, object]:
    """A pipeline stage: first and last number of its layers, and its other parts."""
    values = dataclasses.asdict(stage)  # type: ignore[call-overload]
    ranges = {name: [v.start, v.stop - 1] if v else None for name, v in values.items() if isinstance(v, range)}
    return {**values, **ranges}


def _layout(run: Run, dims: Dims) -> dict[str, object]:
    sizes = {**dataclasses.asdict(dims), "cp": dims.cp, "dp_replicate": dims.dp_replicate}
    return {"backend": run.parallel.backend, "world_size": run.launch.world_size, **sizes}


def _model_outline(model: nn.Module) -> dict[str, object]:
    from mindspeed_mm.models.contract import as_trainable

    outline = as_trainable(model).outline
    return {"class": outline.name, "parameters": outline.parameters, "trained_parameters": outline.trained}


def _steps_per_epoch(run: Run, recipe: Recipe) -> tuple[float | None, str | None]:
    """Steps of one pass over the training data; None, and the reason, where that can't be told."""
    from mindspeed_mm.data.loading.providers import build_run_data
    from mindspeed_mm.data.start import DataStart

    try:
        data = build_run_data(recipe.data, run, DataStart(0, run.batch.data_parallel_size))
    except (MMError, OSError) as error:
        return None, str(error)
    try:
        steps = data.global_batches_per_epoch
        return steps, None if steps is not None else data.why_no_length
    finally:
        data.close()


@contextmanager
def _notices() -> Iterator[list[str]]:
    """Collect what would be logged, so that the answer is all that is printed."""
    kept: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                kept.append(record.getMessage())

    before = logger.handlers[:]
    logger.handlers[:] = [Keeper()]
    try:
        yield kept
    finally:
        logger.handlers[:] = before
