"""The life of a run, on one screen: pretrain → train → train_step → log, evaluate, save."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.backends.protocol import Backend, ForwardStep, ModelProvider, PendingStep
from mindspeed_mm.checkpoint.dcp import read_state
from mindspeed_mm.checkpoint.run_folder import CheckpointWriter, FoundCheckpoint, find_checkpoint, has_checkpoint
from mindspeed_mm.configs.arguments import resolve_train_iters
from mindspeed_mm.data.counting import CountingIterator
from mindspeed_mm.data.providers import RunData, build_run_data
from mindspeed_mm.initialize import create_backend, describe_run, errors_as_sentences, prepare_process
from mindspeed_mm.monitor.profiling import MemorySnapshots, StepProfiler
from mindspeed_mm.monitor.signals import StopSignal
from mindspeed_mm.monitor.watch import Watch
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.log import info_rank0, notice


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        iteration: optimizer steps done, skipped ones included.
        consumed_samples: optimizer steps done times --global-batch-size: the position in the data's global order.
        consumed_tokens: tokens of these rows.
        last_saved: iteration of the last checkpoint.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    last_saved: int = -1


def pretrain(
    train_valid_test_datasets_provider: Callable[..., Any],
    model_provider: ModelProvider,
    model_type: Any = None,
    forward_step_func: ForwardStep | None = None,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
) -> None:
    """Train a model, from the command line's flags to the last checkpoint.

    Args:
        train_valid_test_datasets_provider: () or (numbers of samples) → (train, valid, test), each a data set, a
            DataLoader or None.
        model_provider: → the model.
        model_type: Megatron's; not used here. A callable here is taken as `forward_step_func`.
        forward_step_func: (data_iterator, model) → (output, loss_func).
        process_non_loss_data_func: Megatron's; not used here.
        extra_args_provider: adds a user's own flags to the parser.
        args_defaults: values that take the place of flags' defaults.

    A provider of this project's own entry scripts says by an attribute (`reads_model_json`, `reads_data_json`) that its
    file holds published keys only; without it the file may hold keys of the script's own.

    A configuration, data or checkpoint that can't be used ends the process with a sentence and status 1.
    """
    if forward_step_func is None:
        forward_step_func = model_type
    with errors_as_sentences():
        args = describe_run(
            extra_args_provider=extra_args_provider,
            args_defaults=args_defaults,
            own_model=not getattr(model_provider, "reads_model_json", False),
            own_data=not getattr(train_valid_test_datasets_provider, "reads_data_json", False),
        )
        prepare_process(args)
        backend = create_backend(args)
        backend.setup(args)
        args.data_parallel_rank, args.data_parallel_size = backend.data_parallel_rank, backend.data_parallel_size
        memory = MemorySnapshots(args.tools.memory_profile, backend.data_parallel_rank)
        memory.step()
        found, progress = _find_start(args)
        data = build_run_data(
            train_valid_test_datasets_provider, args, backend.data_parallel_rank, backend.data_parallel_size
        )
        args.train_iters = resolve_train_iters(args, data.train_rows, data.global_batches_per_epoch)
        model = backend.build_model(model_provider, load_weights=found is None)
        backend.build_optimizer(model)
        if found is not None:
            _load(found, progress, backend, args)
        _collect_garbage(args)
        train(forward_step_func, data, backend, args, progress, memory)


def train(
    forward_step: ForwardStep | None,
    data: RunData,
    backend: Backend,
    args: Any,
    progress: Progress,
    memory: MemorySnapshots,
) -> None:
    """Step until --train-iters, a stop request or a time limit; save and export at the end."""
    assert forward_step is not None, "pretrain() was given no forward_step function"
    writer = (
        CheckpointWriter(args.save, int(os.environ["RANK"]) == 0, backend.barrier, args.save_total_limit)
        if args.save
        else None
    )
    watch = _open_watch(backend, args, resumed=progress.iteration > 0)
    profiler = StepProfiler(args.tools.profile, backend.data_parallel_rank)
    started = time.time()
    profiler.start()
    with StopSignal() as stop:
        while progress.iteration < args.train_iters:
            pending = train_step(forward_step, data.train, backend, args, stop.requested)
            _account(pending, progress, watch, backend, args)
            profiler.step()
            memory.step()
            if _is_due(progress.iteration, args.eval_interval) and data.valid is not None:
                watch.pause_clock()
                evaluate(forward_step, data.valid, backend, args, watch, progress.iteration)
                watch.restart_clock()
            if pending.stop or _must_exit(progress.iteration, started, args):
                break
            if writer and _is_due(progress.iteration, args.save_interval):
                watch.pause_clock()
                _save(writer, backend, progress, args)
                watch.restart_clock()
            if args.manual_gc and _is_due(progress.iteration, args.manual_gc_interval):
                gc.collect()
        profiler.stop()
        if writer and progress.last_saved != progress.iteration:
            _save(writer, backend, progress, args)
        if progress.iteration >= args.train_iters:
            _finish(forward_step, data, backend, args, watch, progress)
    watch.close()
    data.close()


def train_step(
    forward_step: ForwardStep, data_iterator: CountingIterator, backend: Backend, args: Any, stop_requested: bool
) -> PendingStep:
    """One optimizer step over one global batch."""
    backend.forward_backward(forward_step, data_iterator, args.num_microbatches)
    return backend.step(data_iterator.take(), stop_requested)


def evaluate(
    forward_step: ForwardStep, loader: Any, backend: Backend, args: Any, watch: Watch, iteration: int
) -> float:
    """Mean loss over --eval-iters global batches of the validation data, always the same ones; forward only."""
    iterator: Iterator[Any] = loader.fresh_iterator()
    batches = loader.limit_batches(args.eval_iters)
    loss_sum, denominator = backend.evaluate(forward_step, iterator, batches * args.num_microbatches)
    loss = loss_sum / denominator if denominator else float("nan")
    watch.log_evaluation(iteration, batches, loss)
    if args.manual_gc and args.manual_gc_eval:
        gc.collect()
    return loss


def _account(pending: PendingStep, progress: Progress, watch: Watch, backend: Backend, args: Any) -> None:
    progress.iteration += 1
    progress.consumed_samples += args.global_batch_size
    progress.consumed_tokens += pending.counts.tokens
    args.iteration, args.consumed_train_samples = progress.iteration, progress.consumed_samples
    watch.add(pending.counts, backend.flops(pending.counts))
    if watch.wants_result(progress.iteration) or pending.stop:
        result = pending.result()
        watch.log_step(
            progress.iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            learning_rate=result.learning_rate,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            metrics=result.metrics,
        )


def _finish(
    forward_step: ForwardStep, data: RunData, backend: Backend, args: Any, watch: Watch, progress: Progress
) -> None:
    if data.valid is not None and not _is_due(progress.iteration, args.eval_interval):
        evaluate(forward_step, data.valid, backend, args, watch, progress.iteration)
    if args.save_hf is not None:
        backend.export_hf(Path(args.save) / "hf")
    info_rank0(f"done: {progress.iteration} iterations, {progress.consumed_samples} samples")


def _save(writer: CheckpointWriter, backend: Backend, progress: Progress, args: Any) -> None:
    extra = {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "global_batch_size": args.global_batch_size,
        "seed": args.seed,
    }
    folder = writer.write(progress.iteration, lambda directory: backend.save(directory, extra))
    progress.last_saved = progress.iteration
    info_rank0(f"saved checkpoint {folder}")
    if args.save_hf and progress.iteration % args.save_hf == 0:
        backend.export_hf(Path(args.save) / f"hf_iter_{progress.iteration:07d}")


def _find_start(args: Any) -> tuple[FoundCheckpoint | None, Progress]:
    """Where to start from: a checkpoint of --load, or the weights that model.json names."""
    progress = Progress()
    args.iteration, args.consumed_train_samples = 0, 0
    if not args.load:
        return None, progress
    if not has_checkpoint(args.load):
        is_own_folder = args.save and Path(args.load).resolve() == Path(args.save).resolve()
        if not Path(args.load).is_dir() and not is_own_folder:
            raise CheckpointError(f"--load '{args.load}' does not exist; expected the --save folder of an earlier run")
        notice(f"--load '{args.load}' holds no run to resume; starting from model.json's init_from_hf_path")
        return None, progress
    found = find_checkpoint(args.load, args.ckpt_step)
    if found.iteration is not None and not args.finetune:
        saved = read_state(found.directory)
        progress.iteration = int(saved["iteration"])
        progress.consumed_samples = int(saved["consumed_samples"])
        progress.consumed_tokens = int(saved.get("consumed_tokens", 0))
        progress.last_saved = progress.iteration
        args.iteration, args.consumed_train_samples = progress.iteration, progress.consumed_samples
    return found, progress


def _load(found: FoundCheckpoint, progress: Progress, backend: Backend, args: Any) -> None:
    only_weights = args.finetune or found.iteration is None
    backend.load(
        found.directory,
        optimizer=not (only_weights or args.no_load_optim),
        rng=not (only_weights or args.no_load_rng),
        schedule=not only_weights,  # the iteration goes on, and with it the learning rate
    )
    info_rank0(f"loaded {found.directory}; continuing after iteration {progress.iteration}")


def _open_watch(backend: Backend, args: Any, *, resumed: bool) -> Watch:
    return Watch(
        is_writer=backend.is_logging_rank,
        save=args.save,
        resumed=resumed,
        log_interval=args.log_interval,
        train_iters=args.train_iters,
        global_batch_size=args.global_batch_size,
        tensorboard_dir=args.tensorboard_dir,
        loss_scale=float(args.loss_scale or 1.0),
        world_size=args.world_size,
        compute_dtype=backend.compute_dtype,
    )


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0


def _must_exit(iteration: int, started: float, args: Any) -> bool:
    if _is_due(iteration, args.exit_interval):
        info_rank0(f"exiting after iteration {iteration} (--exit-interval)")
        return True
    if args.exit_duration_in_mins and (time.time() - started) / 60 > args.exit_duration_in_mins:
        info_rank0(f"exiting after iteration {iteration} (--exit-duration-in-mins)")
        return True
    return False


def _collect_garbage(args: Any) -> None:
    """From here on collect what steps leave behind, on time or (--manual-gc) by hand; what start-up made stays."""
    if args.manual_gc:
        gc.disable()
        gc.collect()
    else:
        gc.freeze()  # no collection ever walks through the imported modules again
        gc.enable()
