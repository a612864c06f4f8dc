"""The training loop: pretrain → train_run → train → train_step, with logging, evaluation and checkpoints."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_mm.backends.evaluation import without_fillers
from mindspeed_mm.backends.protocol import Backend, PendingStep
from mindspeed_mm.checkpoint.agreement import on_first_rank
from mindspeed_mm.checkpoint.attempts import continued
from mindspeed_mm.checkpoint.best import BestCheckpoint
from mindspeed_mm.checkpoint.changes import run_settings
from mindspeed_mm.checkpoint.launch_record import record_launch
from mindspeed_mm.checkpoint.run_folder import ONLY_BEST, RunFolder
from mindspeed_mm.checkpoint.run_lock import RunLock, lock_run_folder
from mindspeed_mm.checkpoint.saver import CheckpointSaver
from mindspeed_mm.configs.arguments import resolve_train_iters
from mindspeed_mm.configs.eval_metrics import MetricName
from mindspeed_mm.configs.flags.spec import BACKENDS
from mindspeed_mm.configs.global_args import report_progress
from mindspeed_mm.configs.recipe import ForwardStep, ModelProvider, Recipe, recipe_of
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.loading.counting import CountingIterator
from mindspeed_mm.data.loading.providers import RunData, ValidData, build_run_data
from mindspeed_mm.data.start import DataStart, set_current_start
from mindspeed_mm.dry_run import asks_for_dry_run, dry_run
from mindspeed_mm.initialize import create_backend, prepare_process
from mindspeed_mm.launch import described
from mindspeed_mm.monitor.console.header import header_facts, header_lines
from mindspeed_mm.monitor.console.summary import Totals, summary_lines
from mindspeed_mm.monitor.ending_record import ending_record
from mindspeed_mm.monitor.endings import ended_early, nothing_is_left, stopped_early, why_stopped
from mindspeed_mm.monitor.improvement import refuse_without_validation
from mindspeed_mm.monitor.open_watch import open_watch
from mindspeed_mm.monitor.profiling import MemorySnapshots, StepProfiler
from mindspeed_mm.monitor.recording.recording import Recording, open_recording
from mindspeed_mm.monitor.records import EvaluationRecord
from mindspeed_mm.monitor.signals import StopSignal
from mindspeed_mm.monitor.skips import SkipWatch
from mindspeed_mm.monitor.watch import Watch
from mindspeed_mm.progress import Progress, load_start, resume_point, with_adapters_of_load
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import info_rank0, logger


def pretrain(
    train_valid_test_datasets_provider: Callable[..., Any],
    model_provider: ModelProvider,
    model_type: Any = None,
    forward_step_func: ForwardStep | None = None,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
) -> None:
    """Train a user's model, from the flags of the command line to the last checkpoint.

    Args:
        train_valid_test_datasets_provider: () or (numbers of samples) → (train, valid, test), each a data set, a
            DataLoader or None.
        model_provider: returns the model.
        model_type: accepted for compatibility with Megatron and ignored; a callable is taken as `forward_step_func`.
        forward_step_func: (data_iterator, model) → (output, loss_func).
        process_non_loss_data_func: accepted for compatibility with Megatron and ignored.
        extra_args_provider: adds the user's flags to the parser.
        args_defaults: values that replace the defaults of flags.

    model.json and data.json may contain additional keys of the script. If the configuration, the data or the checkpoint
    can't be used, the process prints a one-sentence error and exits with status 1. A termination signal before the
    first step ends the process with one line and status 128 + its number; during training the first signal saves a
    checkpoint and ends the run (`StopSignal`).

    Raises:
        TypeError: no forward_step function.
    """
    forward_step = model_type if forward_step_func is None else forward_step_func
    if not callable(forward_step):
        raise TypeError(
            "pretrain() was given no forward_step_func, a function (data_iterator, model) → (output, loss_func)"
        )
    ours, our_data = recipe_of(model_provider), recipe_of(train_valid_test_datasets_provider)
    is_ours = ours is not None and our_data is not None and forward_step is ours.forward_step
    recipe = Recipe(
        model=model_provider,
        data=train_valid_test_datasets_provider,
        forward_step=forward_step,
        preparation=ours.preparation if ours is not None and is_ours else None,
        model_schema=ours.model_schema if ours is not None else None,
        data_schema=our_data.data_schema if our_data is not None else None,
        backends=ours.backends if ours is not None else BACKENDS,
        scorer=ours.scorer if ours is not None and our_data is not None else None,
        drawer=ours.drawer if ours is not None and our_data is not None else None,
        own_flags=extra_args_provider,
        defaults=args_defaults or {},
    )
    if asks_for_dry_run(sys.argv[1:]):
        sys.exit(dry_run(recipe, sys.argv[1:]))
    with described(recipe) as (run, stop):
        train_run(run, recipe, stop)


def train_run(run: Run, recipe: Recipe, stop: StopSignal) -> None:
    """Prepare the process, open checkpoint and data, build model and optimizer, and train.

    Args:
        run: settings of the run.
        recipe: the user's callbacks.
        stop: handler of this process's termination signals.
    """
    prepare_process(run)
    run = with_adapters_of_load(continued(run))
    backend = create_backend(run)
    backend.setup(run)
    batch = backend.world.batch
    report_progress(data_parallel_rank=batch.rank, data_parallel_size=batch.size)
    memory = MemorySnapshots(run.tools.memory_profile, batch.rank)
    memory.step()
    with lock_run_folder(run.checkpoint.save, run.launch.rank, backend.gather_objects) as lock, ExitStack() as stack:
        start, progress = resume_point(run, backend)
        begin = DataStart(batch.rank, batch.size, progress.consumed_samples, progress.data_state)
        set_current_start(begin)
        gather = backend.gather_objects if run.launch.world_size > 1 else None
        preparation = None if recipe.preparation is None else recipe.preparation(backend, run)
        with closing(build_run_data(recipe.data, run, begin, gather, preparation)) as data:
            run = run.with_train_iters(
                resolve_train_iters(run.length, data.train_rows, data.global_batches_per_epoch, data.why_no_length)
            )
            report_progress(train_iters=run.train_iters, lr_decay_iters=run.schedule.lr_decay_iters)
            if data.valid is None:
                refuse_without_validation(run)
            elif recipe.scorer is not None:
                data.valid.scorer = recipe.scorer(run, data.valid)
            data.drawer = None if recipe.drawer is None else recipe.drawer(run, data)
            if not progress.is_over(run):
                data.train.start()  # workers prepare the first micro-batches while the model is built
            else:
                info_rank0(
                    nothing_is_left(run, progress.iteration, data.global_batches_per_epoch, progress.improvement)
                )
                is_evaluated = data.valid is None or _is_due(progress.iteration, run.logging.eval_interval)
                if run.checkpoint.save_hf is None and is_evaluated:
                    return
            recording = stack.enter_context(open_recording(run, data, progress.iteration, backend.world))
            load_weights = start.directory is None or start.has_adapters
            model = backend.build_model(recipe.model_of(run), load_weights=load_weights, base=start.base)
            report_progress()
            backend.build_optimizer(model, run)
            if start.directory is not None:
                load_start(start, progress, backend, run)
            data.check_streams()
            _collect_garbage(run)
            if run.checkpoint.save and run.launch.rank == 0:
                facts = dict(header_facts(run, backend.outline, data, progress.iteration, backend.compute_dtype))
                record_launch(
                    run.checkpoint.save, run, iteration=progress.iteration, changed=progress.changed, facts=facts
                )
            train(recipe.forward_step, data, backend, run, progress, memory, lock, stop, recording)


def train(
    forward_step: ForwardStep,
    data: RunData,
    backend: Backend,
    run: Run,
    progress: Progress,
    memory: MemorySnapshots,
    lock: RunLock | None = None,
    stop: StopSignal | None = None,
    recording: Recording | None = None,
) -> None:
    """Train until --train-iters, --early-stop, a stop request or a time limit; save and export at the end.

    Args:
        lock: lock of the --save folder, on rank 0.
        stop: handler of this process's termination signals; None: signals are not handled.
        recording: what this rank records for the report.
    """
    epoch_samples = _epoch_samples(data, run)
    saver = _open_saver(run, progress, backend, lock)
    totals = Totals(progress.iteration, progress.consumed_samples, progress.consumed_tokens)
    watch = open_watch(run, backend.world, backend.compute_dtype, progress.iteration, totals, recording)
    skips = _open_skip_watch(backend, data, run, progress.iteration, saver)
    profiler = StepProfiler(run.tools.profile, backend.world.rank, progress.iteration)
    started, stop = time.time(), stop or StopSignal()
    ending = ending_record(run, lambda: progress.iteration)
    best: BestCheckpoint | None = None
    stop.begin(run.checkpoint.save)

    def wants_to_stop() -> bool:
        has_failed = (saver is not None and saver.asks_to_stop) or (lock is not None and lock.is_lost)
        return stop.requested or _time_is_up(started, run) or has_failed

    profiler.start()
    with watch, ending, saver or nullcontext():
        watch.begin(partial(header_lines, run, backend.outline, data, progress.iteration, backend.compute_dtype))
        while not progress.is_over(run):
            pending = train_step(forward_step, data.train, backend, run, wants_to_stop, watch)
            _account(pending, progress, watch, backend, run)
            skips.add(progress.iteration, pending.result, pending.counts.row_ids)
            profiler.step()
            memory.step()
            is_judged = _is_due(progress.iteration, run.logging.eval_interval)
            best = _judge(forward_step, data, backend, run, watch, progress, saver) if is_judged else None
            _draw(data, backend, run, watch, progress)
            if saver:
                saver.poll()
            if pending.stop or _is_due(progress.iteration, run.length.exit_interval):
                ending.why = why_stopped(stop, _time_is_up(started, run), run) if pending.stop else "--exit-interval"
                break
            is_due = _save_is_due(progress, epoch_samples, run)
            if saver and not progress.is_over(run) and (is_due or best is not None):
                with watch.paused("saving"):
                    skips.look()
                    if best is not None or _has_something_new(saver, skips, progress):
                        _save(saver, backend, progress, data, run, best, only_best=not is_due)
            if run.process.manual_gc and _is_due(progress.iteration, run.process.manual_gc_interval):
                gc.collect()
        profiler.stop()
        if progress.is_over(run):
            skips.finish()
            if not _is_due(progress.iteration, run.logging.eval_interval):
                best = _judge(forward_step, data, backend, run, watch, progress, saver)
        else:
            skips.look()
        with watch.paused("saving"):
            _finish(saver, backend, progress, data, run, best)
    if ending.why is not None and not progress.stopped_early(run):
        info_rank0(ended_early(ending.why, progress.iteration, run))
    watch.finish(partial(summary_lines, run, totals, watch.seconds, is_over=progress.is_over(run)))


def train_step(
    forward_step: ForwardStep,
    data_iterator: CountingIterator,
    backend: Backend,
    run: Run,
    wants_to_stop: Callable[[], bool],
    watch: Watch,
) -> PendingStep:
    """Run one optimizer step over one global batch.

    Args:
        wants_to_stop: returns whether this rank should stop; called after forward and backward. The step's reduction
            shares the request with all ranks, and this step is then the last one.
        watch: knows whether this rank asks for the step to be logged, which is shared likewise, as is its memory.
    """
    backend.forward_backward(forward_step, data_iterator, run.batch.num_microbatches)
    counts = data_iterator.take()
    counts.memory_bytes = watch.take_memory()
    return backend.step(counts, wants_to_stop(), watch.asks_to_log())


def evaluate(
    forward_step: ForwardStep, valid: ValidData, backend: Backend, run: Run, watch: Watch, iteration: int
) -> dict[MetricName, float]:
    """Return the figures of an evaluation; they are the same on all ranks.

    The mean loss over the first --eval-iters global batches of the validation data, NaN without targets, forward only;
    and those of what the model generates, if that is scored.
    """
    iterator: Iterator[Any] = valid.fresh_iterator()
    batches = valid.limit_batches(run.logging.eval_iters)
    forward_step = without_fillers(forward_step, valid.is_filler)
    loss_sum, denominator = backend.evaluate(forward_step, iterator, batches * run.batch.num_microbatches)
    loss = loss_sum / denominator if denominator else float("nan")
    generated = None if valid.scorer is None else valid.scorer(backend)
    watch.log_evaluation(EvaluationRecord(iteration, batches, loss, generated))
    if run.process.manual_gc and run.process.manual_gc_eval:
        gc.collect()
    return {"loss": loss} if generated is None else {"loss": loss, **generated.figures}


def _judge(
    forward_step: ForwardStep,
    data: RunData,
    backend: Backend,
    run: Run,
    watch: Watch,
    progress: Progress,
    saver: CheckpointSaver | None,
) -> BestCheckpoint | None:
    """Evaluate, and return what best.json shall say if the checkpoint of this iteration is to be saved as the best one.

    None: it isn't, or there are no validation data. The same on all ranks.
    """
    if data.valid is None:
        return None
    with watch.paused("evaluation"):
        figures = evaluate(forward_step, data.valid, backend, run, watch, progress.iteration)
    if progress.improvement is None:
        return None
    progress.improvement = progress.improvement.after(progress.iteration, figures)
    if progress.stopped_early(run) and progress.iteration < run.train_iters:
        info_rank0(stopped_early(progress.improvement, progress.iteration, run))
    if run.checkpoint.save_best is None or saver is None:
        return None
    metric = progress.improvement.metric
    candidate = BestCheckpoint(progress.iteration, metric, figures[metric])
    return candidate if saver.is_best(candidate) else None


def _draw(data: RunData, backend: Backend, run: Run, watch: Watch, progress: Progress) -> None:
    """Draw samples of prompts, at each --sample-interval and after the last step."""
    is_due = _is_due(progress.iteration, run.logging.sample_interval) or progress.is_over(run)
    if data.drawer is not None and is_due:
        with watch.paused("drawing samples"):
            watch.log_samples(progress.iteration, data.drawer(backend))


def _account(pending: PendingStep, progress: Progress, watch: Watch, backend: Backend, run: Run) -> None:
    progress.iteration += 1
    progress.consumed_samples += run.batch.global_batch_size
    progress.consumed_tokens += pending.counts.tokens
    report_progress(iteration=progress.iteration, consumed_train_samples=progress.consumed_samples)
    watch.add(progress.iteration, pending.counts, pending.result)
    is_last = pending.stop or _is_due(progress.iteration, run.length.exit_interval)
    is_last |= _is_due(progress.iteration, run.logging.eval_interval) and progress.stopped_early(run, worse=1)
    if is_last or pending.log or watch.wants_result(progress.iteration):
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
    saver: CheckpointSaver | None,
    backend: Backend,
    progress: Progress,
    data: RunData,
    run: Run,
    best: BestCheckpoint | None,
) -> None:
    """Save the last checkpoint, and export a run that is over."""
    if saver:
        saver.wait()
        if best is not None or saver.last_saved != progress.iteration:
            _save(saver, backend, progress, data, run, best, is_last=True)
    if progress.is_over(run):
        if run.checkpoint.save_hf is not None:
            _export(backend, run, "hf", is_last=True, is_final=True)
        info_rank0(f"done: {progress.iteration} iterations, {progress.consumed_samples} samples")


def _save(
    saver: CheckpointSaver,
    backend: Backend,
    progress: Progress,
    data: RunData,
    run: Run,
    best: BestCheckpoint | None,
    *,
    only_best: bool = False,
    is_last: bool = False,
) -> None:
    extra = {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "settings": run_settings(run),
        "data": data.state_dict() if data.state_dict is not None else None,
        "improvement": progress.improvement.state if progress.improvement is not None else None,
        ONLY_BEST: only_best,
    }
    outcome = saver.save(
        progress.iteration, lambda detached: backend.snapshot(extra, detached=detached), best=best, is_last=is_last
    )
    failed = outcome is not None and outcome.failure is not None
    if run.checkpoint.save_hf and progress.iteration % run.checkpoint.save_hf == 0 and not failed:
        _export(backend, run, f"hf_iter_{progress.iteration:07d}", is_last=is_last)


def _export(backend: Backend, run: Run, name: str, *, is_last: bool, is_final: bool = False) -> None:
    """Export into the --save folder; a failure is treated like that of a checkpoint."""
    assert run.checkpoint.save is not None, "--save-hf needs --save"
    try:
        backend.export_hf(Path(run.checkpoint.save) / name, is_final=is_final)
    except CheckpointError as error:  # the same on all ranks
        if is_last or run.checkpoint.on_save_failure == "exit":
            raise
        if is_first_rank():
            logger.error(f"{error}; training goes on")


def _open_saver(run: Run, progress: Progress, backend: Backend, lock: RunLock | None) -> CheckpointSaver | None:
    if not run.checkpoint.save:
        return None
    folder, improvement = RunFolder(run.checkpoint.save), progress.improvement
    best: list[BestCheckpoint | None] = []

    def settle() -> None:
        best.append(folder.settle_best(progress.iteration, improvement.checkpoint if improvement is not None else None))

    on_first_rank(settle, run.launch.rank, backend.gather_objects)
    return CheckpointSaver(
        run.checkpoint.save,
        in_background=run.checkpoint.async_save,
        keep=run.checkpoint.save_total_limit,
        exit_on_failure=run.checkpoint.on_save_failure == "exit",
        timeout_minutes=run.parallel.distributed_timeout_minutes,
        last_saved=progress.last_saved,
        best=backend.gather_objects(best)[0][0],
        **({"check_folder": lock.check} if lock is not None else {}),
    )


def _epoch_samples(data: RunData, run: Run) -> float | None:
    """Return the number of rows between two checkpoints of --save-epochs."""
    if run.checkpoint.save_epochs is None or not run.checkpoint.save:
        return None
    if not data.global_batches_per_epoch:
        raise ConfigError(
            f"--save-epochs {run.checkpoint.save_epochs} needs a data set with a length, and {data.why_no_length}; "
            "give --save-interval (optimizer steps) instead"
        )
    return run.checkpoint.save_epochs * data.global_batches_per_epoch * run.batch.global_batch_size


def _save_is_due(progress: Progress, epoch_samples: float | None, run: Run) -> bool:
    if _is_due(progress.iteration, run.checkpoint.save_interval):
        return True
    now = progress.consumed_samples
    return epoch_samples is not None and now // epoch_samples > (now - run.batch.global_batch_size) // epoch_samples


def _has_something_new(saver: CheckpointSaver, skips: SkipWatch, progress: Progress) -> bool:
    """Whether a step has changed the weights since the last checkpoint; the same on all ranks."""
    if skips.last_trained == progress.iteration:
        return True
    saver.wait()  # ranks may see the end of a background save at different steps: after this all know its outcome
    if skips.last_trained > max(saver.last_saved, 0):
        return True
    info_rank0(f"no checkpoint of iteration {progress.iteration}: no step has changed anything since the last one")
    return False


def _open_skip_watch(
    backend: Backend, data: RunData, run: Run, iteration: int, saver: CheckpointSaver | None
) -> SkipWatch:
    is_dynamic = backend.compute_dtype == "fp16" and run.precision.loss_scale is None
    return SkipWatch(
        iteration,
        limit=run.length.max_skipped_steps,
        gather=backend.gather_objects,
        data=data,
        last_good=saver.last_good if saver is not None else lambda: "there is none, as there is no --save",
        row_rank=backend.world.counts_rows,
        smallest_scale=run.precision.min_loss_scale if is_dynamic else None,
    )


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0


def _time_is_up(started: float, run: Run) -> bool:
    """Whether --exit-duration-in-mins has passed on this rank's clock; clocks differ, so it is only a stop request."""
    minutes = run.length.exit_duration_in_mins
    return minutes is not None and (time.time() - started) / 60 > minutes


def _collect_garbage(run: Run) -> None:
    """Collect garbage on schedule, or manually with --manual-gc, from here on; objects of start-up are exempt."""
    if run.process.manual_gc:
        gc.disable()
        gc.collect()
    else:
        gc.freeze()  # exempts the imported modules from all later collections
        gc.enable()
