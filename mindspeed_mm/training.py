"""The life of a run, on one screen: pretrain → train → train_step → log, evaluate, save."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_mm.backends.evaluation import without_fillers
from mindspeed_mm.backends.protocol import Backend, ForwardStep, ModelProvider, PendingStep
from mindspeed_mm.checkpoint.agreement import on_first_rank
from mindspeed_mm.checkpoint.changes import run_settings, tell_changes
from mindspeed_mm.checkpoint.dcp import read_state
from mindspeed_mm.checkpoint.earlier_run import paths_of, settle_folder
from mindspeed_mm.checkpoint.run_lock import RunLock, hold_run_folder
from mindspeed_mm.checkpoint.saver import CheckpointSaver
from mindspeed_mm.checkpoint.start import Start, find_start, refuse_damaged
from mindspeed_mm.configs.arguments import resolve_train_iters
from mindspeed_mm.data.counting import CountingIterator
from mindspeed_mm.data.providers import RunData, build_run_data
from mindspeed_mm.initialize import create_backend, describe_run, errors_as_sentences, prepare_process
from mindspeed_mm.monitor.endings import ended_early, nothing_is_left, why_stopped
from mindspeed_mm.monitor.profiling import MemorySnapshots, StepProfiler
from mindspeed_mm.monitor.row_log import RowLog
from mindspeed_mm.monitor.signals import StopSignal
from mindspeed_mm.monitor.skips import SkipWatch
from mindspeed_mm.monitor.watch import Watch
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.files import refuse_unwritable
from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import info_rank0, logger


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

    A provider of this project's own entry scripts says by an attribute (`reads_model_json`, `reads_data_json`) which
    kind of published keys its file holds, "language" or "generation"; without it the file may hold keys of the script's
    own. Which backends a model provider builds for it may say as `backends` ("ptd", "fsdp2"); without it, for either.

    A configuration, data or checkpoint that can't be used ends the process with a sentence and status 1. A signal
    that ends a run does so before the first step with one line and status 128 + its number; later the first one saves a
    checkpoint and ends training (`StopSignal`).
    """
    if forward_step_func is None:
        forward_step_func = model_type
    model_kind = getattr(model_provider, "reads_model_json", None)
    data_kind = getattr(train_valid_test_datasets_provider, "reads_data_json", None)
    with errors_as_sentences(), StopSignal() as stop:
        args = describe_run(
            extra_args_provider=extra_args_provider,
            args_defaults=args_defaults,
            own_model=not model_kind,
            own_data=not data_kind,
            model_kind=model_kind or "language",
            data_kind=data_kind or "language",
            roads=getattr(model_provider, "backends", ("fsdp2", "ptd")),
        )
        if args.save and args.local_rank == 0:
            refuse_unwritable(args.save, "--save")
        prepare_process(args)
        backend = create_backend(args)
        backend.setup(args)
        batch = backend.world.batch
        args.data_parallel_rank, args.data_parallel_size = batch.rank, batch.size
        memory = MemorySnapshots(args.tools.memory_profile, batch.rank)
        memory.step()
        with hold_run_folder(args.save, args.rank, backend.gather_objects) as lock:
            start, progress = _find_start(args, backend)
            data = build_run_data(
                train_valid_test_datasets_provider,
                args,
                batch.rank,
                batch.size,
                backend.gather_objects if args.world_size > 1 else None,
            )
            args.train_iters = resolve_train_iters(
                args, data.train_rows, data.global_batches_per_epoch, data.why_no_length
            )
            if progress.iteration >= args.train_iters:
                info_rank0(nothing_is_left(args, progress.iteration, data.global_batches_per_epoch))
                if args.save_hf is None and data.valid is None:
                    data.close()
                    return
            model = backend.build_model(model_provider, load_weights=start.directory is None)
            backend.build_optimizer(model)
            if start.directory is not None:
                _load(start, progress, backend, args)
            data.check_streams()
            _collect_garbage(args)
            train(forward_step_func, data, backend, args, progress, memory, lock, stop)


def train(
    forward_step: ForwardStep | None,
    data: RunData,
    backend: Backend,
    args: Any,
    progress: Progress,
    memory: MemorySnapshots,
    lock: RunLock | None = None,
    stop: StopSignal | None = None,
) -> None:
    """Step until --train-iters, a stop request or a time limit; save and export at the end.

    Args:
        lock: holds --save's folder, on rank 0.
        stop: hears the signals of this process; None: nobody does.
    """
    assert forward_step is not None, "pretrain() was given no forward_step function"
    epoch_samples = _epoch_samples(data, args)
    saver = _open_saver(args, progress.last_saved, lock)
    watch = _open_watch(backend, args, progress.iteration)
    skips = _open_skip_watch(backend, data, args, progress.iteration, saver)
    profiler = StepProfiler(args.tools.profile, backend.world.batch.rank)
    started, stop, why = time.time(), stop or StopSignal(), None
    stop.begin(args.save)

    def wants_to_stop() -> bool:
        has_failed = (saver is not None and saver.asks_to_stop) or (lock is not None and lock.is_lost)
        return stop.requested or _time_is_up(started, args) or has_failed

    profiler.start()
    with saver or nullcontext():
        while progress.iteration < args.train_iters:
            pending = train_step(forward_step, data.train, backend, args, wants_to_stop)
            _account(pending, progress, watch, backend, args)
            skips.add(progress.iteration, pending.result, pending.counts.row_ids)
            profiler.step()
            memory.step()
            if _is_due(progress.iteration, args.eval_interval) and data.valid is not None:
                watch.pause_clock()
                evaluate(forward_step, data.valid, backend, args, watch, progress.iteration)
                watch.restart_clock()
            if saver:
                saver.poll()
            if pending.stop or _is_due(progress.iteration, args.exit_interval):
                why = why_stopped(stop, _time_is_up(started, args), args) if pending.stop else "--exit-interval"
                break
            if saver and progress.iteration < args.train_iters and _save_is_due(progress, epoch_samples, args):
                watch.pause_clock()
                skips.look()
                if _has_something_new(saver, skips, progress):
                    _save(saver, backend, progress, data, args)
                watch.restart_clock()
            if args.manual_gc and _is_due(progress.iteration, args.manual_gc_interval):
                gc.collect()
        profiler.stop()
        if progress.iteration < args.train_iters:
            skips.look()
        else:
            skips.finish()
        if saver:
            saver.wait()
            if saver.last_saved != progress.iteration:
                _save(saver, backend, progress, data, args, is_last=True)
        if progress.iteration >= args.train_iters:
            _finish(forward_step, data, backend, args, watch, progress)
    watch.close()
    data.close()
    if why is not None:
        info_rank0(ended_early(why, progress.iteration, args))


def train_step(
    forward_step: ForwardStep,
    data_iterator: CountingIterator,
    backend: Backend,
    args: Any,
    wants_to_stop: Callable[[], bool],
) -> PendingStep:
    """One optimizer step over one global batch.

    Args:
        wants_to_stop: whether this rank was asked to stop, be it while the batch was computed; all ranks hear of it in
            the step's reduction, and this step is the last one.
    """
    backend.forward_backward(forward_step, data_iterator, args.num_microbatches)
    return backend.step(data_iterator.take(), wants_to_stop())


def evaluate(
    forward_step: ForwardStep, loader: Any, backend: Backend, args: Any, watch: Watch, iteration: int
) -> float:
    """Mean loss over --eval-iters global batches of the validation data, always the same ones; forward only."""
    iterator: Iterator[Any] = loader.fresh_iterator()
    batches = loader.limit_batches(args.eval_iters)
    forward_step = without_fillers(forward_step, loader.is_filler)
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
    watch.add(progress.iteration, pending.counts, backend.flops(pending.counts), pending.result)
    is_last = pending.stop or _is_due(progress.iteration, args.exit_interval)
    if is_last or watch.wants_result(progress.iteration):
        result = pending.result()
        watch.log_step(
            progress.iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
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
        _export(backend, args, "hf", is_last=True, is_final=True)
    info_rank0(f"done: {progress.iteration} iterations, {progress.consumed_samples} samples")


def _save(
    saver: CheckpointSaver, backend: Backend, progress: Progress, data: RunData, args: Any, *, is_last: bool = False
) -> None:
    extra = {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "settings": run_settings(args),
        "data": data.state_dict() if data.state_dict is not None else None,
    }
    outcome = saver.save(
        progress.iteration, lambda detached: backend.snapshot(extra, detached=detached), is_last=is_last
    )
    failed = outcome is not None and outcome.failure is not None
    if args.save_hf and progress.iteration % args.save_hf == 0 and not failed:
        _export(backend, args, f"hf_iter_{progress.iteration:07d}", is_last=is_last)


def _export(backend: Backend, args: Any, name: str, *, is_last: bool, is_final: bool = False) -> None:
    """Export beside the checkpoints; a failure counts as a checkpoint's does."""
    try:
        backend.export_hf(Path(args.save) / name, is_final=is_final)
    except CheckpointError as error:  # the same on all ranks
        if is_last or args.on_save_failure == "exit":
            raise
        if is_first_rank():
            logger.error(f"{error}; training goes on")


def _open_saver(args: Any, last_saved: int, lock: RunLock | None) -> CheckpointSaver | None:
    if not args.save:
        return None
    return CheckpointSaver(
        args.save,
        in_background=args.async_save,
        keep=args.save_total_limit,
        exit_on_failure=args.on_save_failure == "exit",
        timeout_minutes=args.distributed_timeout_minutes,
        last_saved=last_saved,
        **({"check_folder": lock.check} if lock is not None else {}),
    )


def _epoch_samples(data: RunData, args: Any) -> float | None:
    """Rows between two checkpoints of --save-epochs."""
    if args.save_epochs is None or not args.save:
        return None
    if not data.global_batches_per_epoch:
        raise ConfigError(
            f"--save-epochs {args.save_epochs} needs a data set with a length, and {data.why_no_length}; "
            "give --save-interval (optimizer steps) instead"
        )
    return args.save_epochs * data.global_batches_per_epoch * args.global_batch_size


def _save_is_due(progress: Progress, epoch_samples: float | None, args: Any) -> bool:
    if _is_due(progress.iteration, args.save_interval):
        return True
    now = progress.consumed_samples
    return epoch_samples is not None and now // epoch_samples > (now - args.global_batch_size) // epoch_samples


def _has_something_new(saver: CheckpointSaver, skips: SkipWatch, progress: Progress) -> bool:
    """Whether a step has changed something since the last checkpoint; the same on all ranks."""
    if skips.last_trained == progress.iteration:
        return True
    saver.wait()  # one in the background may have ended on this rank only, as far as it has looked
    if skips.last_trained > max(saver.last_saved, 0):
        return True
    info_rank0(f"no checkpoint of iteration {progress.iteration}: no step has changed anything since the last one")
    return False


def _find_start(args: Any, backend: Backend) -> tuple[Start, Progress]:
    """Where to start from: a checkpoint or weights of --load, or the weights that model.json names.

    --save's folder holds nothing of another run then, unless this one goes on with it.
    """
    start = find_start(args.load, args.save, args.ckpt_step, args.finetune)
    if args.save:
        files = {f"{n}.json": getattr(args.mm, n).to_dict() for n in ("model", "data") if hasattr(args.mm, n)}
        how = {"finetune": args.finetune, "overwrite": args.overwrite, "restarts": args.restarts}
        how["reads"] = paths_of(files) if args.overwrite else {}
        settle = partial(settle_folder, args.save, args.load, start, **how)
        on_first_rank(settle, args.rank, backend.gather_objects)
    if start.directory is not None:
        refuse_damaged(
            start.directory,
            args.rank,
            args.world_size,
            backend.gather_objects,
            checksums=not args.no_verify_checkpoint,
        )
    progress, args.data_state = Progress(), None
    if start.resumes and start.directory is not None:
        saved = read_state(start.directory)
        progress.iteration = int(saved["iteration"])
        progress.consumed_samples = int(saved["consumed_samples"])
        progress.consumed_tokens = int(saved.get("consumed_tokens", 0))
        progress.last_saved = progress.iteration
        args.data_state = saved.get("data")
        tell_changes(saved.get("settings", {}), run_settings(args))
    args.iteration, args.consumed_train_samples = progress.iteration, progress.consumed_samples
    return start, progress


def _load(start: Start, progress: Progress, backend: Backend, args: Any) -> None:
    if start.resumes:
        backend.load(
            start.directory,
            optimizer=not args.no_load_optim,
            rng=not args.no_load_rng,
            schedule=True,  # the iteration goes on, and with it the learning rate
        )
        info_rank0(f"loaded {start.directory}; continuing after iteration {progress.iteration}")
    else:
        backend.load_weights(start.directory)


def _open_watch(backend: Backend, args: Any, iteration: int) -> Watch:
    rows = None
    if args.log_row_ids and args.save and backend.world.counts_rows:
        rows = RowLog(args.save, backend.world.batch.rank, backend.world.batch.size, iteration)
    return Watch(
        is_writer=backend.world.is_logging_rank,
        save=args.save,
        resumed=iteration > 0,
        row_log=rows,
        log_interval=args.log_interval,
        train_iters=args.train_iters,
        global_batch_size=args.global_batch_size,
        tensorboard_dir=args.tensorboard_dir,
        world_size=args.world_size,
        compute_dtype=backend.compute_dtype,
    )


def _open_skip_watch(
    backend: Backend, data: RunData, args: Any, iteration: int, saver: CheckpointSaver | None
) -> SkipWatch:
    is_dynamic = backend.compute_dtype == "fp16" and args.loss_scale is None
    return SkipWatch(
        iteration,
        limit=args.max_skipped_steps,
        gather=backend.gather_objects,
        data=data,
        last_good=saver.last_good if saver is not None else lambda: "there is none, as there is no --save",
        row_rank=backend.world.counts_rows,
        smallest_scale=args.min_loss_scale if is_dynamic else None,
    )


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0


def _time_is_up(started: float, args: Any) -> bool:
    """Whether --exit-duration-in-mins is over by this rank's clock; a stop request, as clocks differ."""
    return bool(args.exit_duration_in_mins) and (time.time() - started) / 60 > args.exit_duration_in_mins


def _collect_garbage(args: Any) -> None:
    """From here on collect what steps leave behind, on time or (--manual-gc) by hand; what start-up made stays."""
    if args.manual_gc:
        gc.disable()
        gc.collect()
    else:
        gc.freeze()  # no collection ever walks through the imported modules again
        gc.enable()
