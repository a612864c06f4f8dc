"""The command of inference_vlm.py: answer a prompt on standard output, or the rows of files into a file."""

from __future__ import annotations

import time
from collections.abc import Sequence, Sized

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.vlm_inference import AnswerFlags
from mindspeed_mm.tasks.command_line import run_command
from mindspeed_mm.tasks.inference.describe import AnswerRun, describe_answers
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import info_rank0, log_on_stderr


def main(argv: Sequence[str] | None = None) -> int:
    """Run a launch command; see `run_command`."""
    return run_command(
        argv,
        AnswerFlags,
        "Answer prompts with a model that reads texts, images, videos or sounds (docs/inference.md).",
        lambda words: answer_outline(describe_answers(words, complete=False)),
        lambda words: _answer(describe_answers(words)),
    )


def _answer(run: AnswerRun) -> None:
    if run.output is None:
        with log_on_stderr():
            _print_answers(run)
    else:
        from mindspeed_mm.tasks.inference.rows import answer_into_file

        answer_into_file(run)


def answer_outline(run: AnswerRun, rows: Sized | None = None) -> dict[str, object]:
    """Return the answer of a dry run: the model's structure and the number of requests; no weights are read.

    Args:
        run: the launch.
        rows: what is answered; None: the launch's rows or prompts.
    """
    from mindspeed_mm.tasks.inference.requests import RowRequests

    return {**model_outline(run), "requests": len(rows or run.prompts or RowRequests(run.param))}


def model_outline(run: AnswerRun) -> dict[str, object]:
    """Return what a dry run says of the model and of how it answers."""
    from mindspeed_mm.tasks.inference.loading import build_on_meta_device
    from mindspeed_mm.tasks.inference.session import described_model, hf_config_of

    model = build_on_meta_device(run.source, hf_config_of(run), described_model(run))
    return {
        "model": {
            "class": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "layout": _layout(run),
        "batch_size": run.settings.rows_at_once,
        "generation": {**run.settings.values, **({"stop": list(run.settings.stop)} if run.settings.stop else {})},
    }


def _layout(run: AnswerRun) -> dict[str, object]:
    """Each process with a whole model of transformers, or with shards of it."""
    if run.sharding is None:
        return {"backend": "transformers", "world_size": run.processes}
    dims = Dims.of(run.processes, sharding_size=run.sharding.sharding_size, where=run.sharding.file)
    return {"backend": "fsdp2", "world_size": run.processes, "dp_shard": dims.dp_shard}


def _print_answers(run: AnswerRun) -> None:
    """Answer the prompts of a launch; with sharded parameters all processes do, and the first one prints."""
    from mindspeed_mm.tasks.inference.processes import join_processes
    from mindspeed_mm.tasks.inference.requests import prompt_requests
    from mindspeed_mm.tasks.inference.session import check_length, open_generator, open_prompts, positions_of

    launch = this_launch()
    if launch.world_size > 1 and run.sharding is None and launch.rank:
        return  # each process holds the model, and one is enough
    prompts, requests = open_prompts(run), prompt_requests(run.prompts or (), run.system)
    positions = positions_of(run)
    for request in requests:
        check_length(request, prompts.measure(request), positions)
    if run.sharding is not None:
        join_processes(run)
    generator = open_generator(run, prompts)
    for request in requests:
        started = time.monotonic()
        (answer,) = generator.answer([request])
        if launch.rank == 0:
            print(answer.text, flush=True)
        info_rank0(f"{answer.new_tokens} tokens in {time.monotonic() - started:.2f} s ({answer.finish})")
