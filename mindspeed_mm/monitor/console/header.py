"""What is known of a run before its first step, in a few aligned lines."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention.table import attention_of_rows
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.loading.providers import RunData
from mindspeed_mm.models.common.document_attention import keeps_documents_apart
from mindspeed_mm.models.contract import ModelOutline
from mindspeed_mm.monitor.console import words

#: columns of the names
_NAMES = 12


def header_lines(run: Run, outline: ModelOutline | None, data: RunData, iteration: int, dtype: str) -> list[str]:
    """Return the lines, one a fact: see `header_facts`."""
    return [f"{name:<{_NAMES}}{text}" for name, text in header_facts(run, outline, data, iteration, dtype)]


def header_facts(
    run: Run, outline: ModelOutline | None, data: RunData, iteration: int, dtype: str
) -> Iterator[tuple[str, str]]:
    """Yield names and texts.

    Args:
        run: the run, with its length.
        outline: the model as it was built; None: it isn't known as a whole.
        data: what it trains on.
        iteration: step of the checkpoint that it goes on from; 0: a new run.
        dtype: bf16, fp16 or fp32, in which it computes.
    """
    if outline is not None:
        yield "model", _model(run, outline)
    yield "devices", _devices(run)
    yield "layout", _layout(run)
    yield "precision", dtype if dtype == "fp32" else f"{dtype}, over fp32 weights"
    attention = _attention(run, outline, dtype)
    if attention is not None:
        yield "attention", attention
    yield "data", _data(data)
    yield "training", _training(run, data)
    if iteration:
        yield "goes on", f"after step {iteration}, from '{run.checkpoint.load}'"
    yield "checkpoints", _checkpoints(run)
    if run.checkpoint.save_hf is not None:
        every = f"every {run.checkpoint.save_hf} steps and " if run.checkpoint.save_hf else ""
        yield "export", f"in HF's layout, {every}at the end"
    if data.valid is not None:
        yield "evaluation", _evaluation(run, data.valid.limit_batches(run.logging.eval_iters))


def _model(run: Run, outline: ModelOutline) -> str:
    total, trained = outline.parameters, outline.trained
    text = f"{outline.name.removeprefix('FSDP')}, {words.amount(total)} parameters"
    if trained == total:
        text += ", all trained"
    else:
        text += f", {words.amount(trained)} of them trained ({words.per_cent(trained / max(1, total))})"
    return text if run.lora is None else f"{text}: LoRA of rank {run.lora.r}"


def _devices(run: Run) -> str:
    device, number = accelerator.current(), run.launch.world_size
    nodes = -(-number // run.launch.local_world_size)
    if device.is_host:
        text = f"{number} process{'' if number == 1 else 'es'} on the CPU"
    else:
        text = f"{number} × {device.model_name()}"
    return f"{text}, on {nodes} nodes" if nodes > 1 else text


def _layout(run: Run) -> str:
    dims = run.dims
    chunks = run.parallel.virtual_pipeline_model_parallel_size
    sizes = {
        "data parallel": dims.dp,
        "pipeline parallel": dims.pp,
        "chunks a stage": chunks or 1,
        "tensor parallel": dims.tp,
        "context parallel (ring)": dims.ring,
        "context parallel (Ulysses)": dims.ulysses,
        "expert parallel": dims.ep,
        "weights sharded over": dims.dp_shard if run.uses_fsdp2 else 1,
    }
    names = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join(["FSDP2" if run.uses_fsdp2 else "Megatron-core", *names])


def _attention(run: Run, outline: ModelOutline | None, dtype: str) -> str | None:
    """The kernel of the language model; None: there is none, or it isn't known."""
    if outline is None or outline.attention is None:
        return None
    if not run.uses_fsdp2 or keeps_documents_apart(outline.attention):
        return attention_of_rows(accelerator.current(), dtype)
    return f"{outline.attention} of transformers, with masks"


def _data(data: RunData) -> str:
    rows = "rows of unknown number" if data.train_rows is None else words.counted(data.train_rows, "row")
    if data.global_batches_per_epoch is None:
        return f"{rows}, no epochs: {data.why_no_length}"
    return f"{rows}, {data.global_batches_per_epoch:.4g} steps an epoch"


def _training(run: Run, data: RunData) -> str:
    batch, epochs = run.batch, ""
    if data.global_batches_per_epoch:
        number = run.train_iters / data.global_batches_per_epoch
        epochs = f" ({number:.3g} epoch{'' if number == 1 else 's'})"
    factors = [f"micro-batches of {batch.micro_batch_size}"]
    if batch.num_microbatches > 1:
        factors.append(f"{batch.num_microbatches} accumulated")
    if batch.data_parallel_size > 1:
        factors.append(f"{batch.data_parallel_size} data parallel")
    steps = words.counted(run.train_iters, "step")
    rows = words.counted(batch.global_batch_size, "packed row" if batch.packs else "row")
    return f"{steps}{epochs} of {rows} = {' × '.join(factors)}"


def _checkpoints(run: Run) -> str:
    checkpoint = run.checkpoint
    if not checkpoint.save:
        return "none, as there is no --save"
    when = ["at the end"]
    if checkpoint.save_best is not None:
        when.insert(0, f"at the best {checkpoint.save_best}")
    if checkpoint.save_epochs is not None:
        when.insert(0, f"every {'epoch' if checkpoint.save_epochs == 1 else f'{checkpoint.save_epochs} epochs'}")
    if checkpoint.save_interval is not None and checkpoint.save_interval < run.train_iters:
        when.insert(0, f"every {checkpoint.save_interval} steps")
    return f"{', '.join(when[:-1])}{' and ' if when[:-1] else ''}{when[-1]}, in {checkpoint.save}"


def _evaluation(run: Run, batches: int) -> str:
    logging = run.logging
    text = (
        f"every {logging.eval_interval} steps and at the end, on {batches} global batch{'' if batches == 1 else 'es'}"
    )
    if logging.eval_generate is None:
        return text
    return f"{text}; {logging.eval_generate} of answers to {logging.eval_generate_rows} rows"
