"""How flags fit together: each rule looks at all of them and returns a sentence for each problem."""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_mm.configs.evaluation_rules import check_evaluation, check_samples
from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of
from mindspeed_mm.configs.layout_rules import check_layout, log_layout_notices
from mindspeed_mm.configs.lora import check_lora
from mindspeed_mm.configs.run_sections import ScheduleConfig
from mindspeed_mm.configs.tracker_rules import check_trackers, tracker_notices
from mindspeed_mm.utils.files import is_inside
from mindspeed_mm.utils.log import notice


def check_arguments(args: ParsedFlags) -> list[str]:
    """Return a sentence for each broken rule; without any, log the notices that depend on several flags."""
    problems = [
        *check_layout(args),
        *_check_batch(args),
        *_check_precision(args),
        *_check_optimizer(args),
        *_check_loss(args),
        *_check_saving(args),
        *check_lora(args),
        *check_evaluation(args),
        *check_trackers(args),
        *check_samples(args),
    ]
    if not problems:
        _log_notices(args)
    return problems


def _check_batch(args: ParsedFlags) -> list[str]:
    if args.micro_batch_size is None or args.global_batch_size is None:  # the latter follows from the former
        return ["missing flags: --micro-batch-size"]
    rows = args.micro_batch_size * args.data_parallel_size
    steps = args.gradient_accumulation_steps
    if steps is not None and args.global_batch_size != rows * steps:
        return [
            f"--global-batch-size {args.global_batch_size} and --gradient-accumulation-steps {steps}, which makes "
            f"{rows * steps} rows (--micro-batch-size {args.micro_batch_size} × {steps} × {args.data_parallel_size} "
            "data-parallel ranks); keep one of the two"
        ]
    if args.global_batch_size % rows == 0:
        return []
    below = args.global_batch_size // rows * rows
    nearest = " or ".join(str(size) for size in (below, below + rows) if size)
    return [
        f"--global-batch-size {args.global_batch_size} is not divisible by {rows} (--micro-batch-size "
        f"{args.micro_batch_size} × {args.data_parallel_size} data-parallel ranks); nearest valid: {nearest}"
    ]


def _check_precision(args: ParsedFlags) -> list[str]:
    if args.bf16 and args.fp16:
        return ["--bf16 and --fp16 are both given; keep one of them"]
    if args.loss_scale is None and args.initial_loss_scale < args.min_loss_scale:
        return [
            f"--initial-loss-scale {args.initial_loss_scale:g} is less than --min-loss-scale {args.min_loss_scale:g}"
        ]
    return []


def _check_optimizer(args: ParsedFlags) -> list[str]:
    problems = []
    if args.optimizer == "muon" and backend_of(args) == "ptd":
        problems.append(
            "--optimizer muon: the Megatron backend steps adam, adam8bit and sgd; write one of them, or add "
            "--use-torch-fsdp2"
        )
    if args.optimizer == "adam8bit" and args.swap_optimizer:
        problems.append(
            "--swap-optimizer moves a float32 state, and --optimizer adam8bit has none; leave one of the flags out"
        )
    if args.optimizer == "muon" and args.swap_optimizer:
        problems.append(
            "--swap-optimizer moves the state of adam and sgd; the momentum of --optimizer muon stays on the device: "
            "leave one of the flags out"
        )
    if args.lr is not None and args.min_lr > args.lr:
        problems.append(f"--min-lr {args.min_lr:g} is greater than --lr {args.lr:g}")
    if args.lr is not None and args.lr_warmup_init > args.lr:
        problems.append(f"--lr-warmup-init {args.lr_warmup_init:g} is greater than --lr {args.lr:g}")
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        if any(value not in (None, args.weight_decay) for value in (start, end)):
            problems.append(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine; "
                "with constant, --weight-decay says it all"
            )
    elif start is None or end is None:
        problems.append(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay"
        )
    elif start > end:
        problems.append(f"--start-weight-decay {start:g} is greater than --end-weight-decay {end:g}")
    if args.lr_warmup_fraction is not None and (args.lr_warmup_iters or args.lr_warmup_samples):
        other = "--lr-warmup-iters" if args.lr_warmup_iters else "--lr-warmup-samples"
        problems.append(f"--lr-warmup-fraction and {other} are both given; keep one of them")
    by_rows = [n for n in ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples") if getattr(args, n)]
    by_steps = [n for n in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters") if getattr(args, n)]
    wrong = by_steps if args.train_samples is not None else by_rows
    if wrong:
        unit = "rows: use the -samples flag" if args.train_samples is not None else "steps: use the -iters flag"
        flags = ", ".join("--" + name.replace("_", "-") for name in wrong)
        problems.append(f"{flags}: the length of this run is given in {unit}")
    if args.lr_decay_style == "WSD" and not (args.lr_wsd_decay_iters or args.lr_wsd_decay_samples):
        problems.append("--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of the final decay")
    return problems


def _check_loss(args: ParsedFlags) -> list[str]:
    names = ("calculate_per_token_loss", "calculate_per_sample_loss", "calculate_square_loss", "calculate_token_loss")
    asked = ["--" + name.replace("_", "-") for name in names if getattr(args, name)]
    return [f"{' and '.join(asked)} are given; keep one of them"] if len(asked) > 1 else []


def _check_saving(args: ParsedFlags) -> list[str]:
    problems = []
    if args.save_hf is not None and args.save is None:
        problems.append("--save-hf needs --save, the folder to export into")
    if args.ckpt_step is not None and args.load is None:
        problems.append("--ckpt-step needs --load, the folder to load from")
    if args.overwrite and args.save and args.load and is_inside(args.load, args.save):
        problems.append(
            f"--overwrite removes what an earlier run wrote to --save '{args.save}', and --load '{args.load}' reads "
            "from there; keep one of the two"
        )
    if args.train_samples is not None and args.global_batch_size and args.train_samples < args.global_batch_size:
        problems.append(
            f"--train-samples {args.train_samples} is less than one global batch of {args.global_batch_size} rows"
        )
    return problems


def _log_notices(args: ParsedFlags) -> None:
    log_layout_notices(args)
    for name in ("save_interval", "save_epochs", "async_save", "overwrite", "log_row_ids"):
        if getattr(args, name) not in (None, False) and args.save is None:
            notice(f"--{name.replace('_', '-')} has no effect here: there is no --save to write to")
    if args.lr_mult != 1.0 and not args.lr_scale_modules:
        notice("--lr-mult has no effect here: --lr-scale-modules names no modules")
    if args.lr_scale_modules and args.lr_mult == 1.0:
        notice("--lr-scale-modules has no effect here: --lr-mult is 1")
    if args.manual_gc_interval and not args.manual_gc:
        notice("--manual-gc-interval has no effect here: --manual-gc is missing")
    if not args.use_txt_dynamic_batching:
        for name, default in (("max_seq_len", 2048), ("dynamic_batch_buffer_size", 200)):
            if getattr(args, name) != default:
                notice(f"--{name.replace('_', '-')} has no effect here: --use-txt-dynamic-batching is missing")
    for sentence in tracker_notices(args):
        notice(sentence)
    if not args.exit_signal_handler:
        notice("--exit-signal-handler false has no effect here: signals always save before the exit")
    if not args.check_for_nan_in_loss_and_grad:
        notice(
            "--no-check-for-nan-in-loss-and-grad has no effect here: a step whose loss or gradient isn't finite is "
            "always skipped and counted, at no cost"
        )


class ScheduleLengths(NamedTuple):
    """The parts of the learning-rate schedule, in optimizer steps (fractions allowed)."""

    decay: float
    warmup: float
    wsd_decay: float


def schedule_lengths(schedule: ScheduleConfig, train_samples: int | None, global_batch_size: int) -> ScheduleLengths:
    """Return the lengths of decay, warmup and final decay, whether they were given in steps, rows or as a fraction.

    Source: Megatron's `get_optimizer_param_scheduler`: a fraction is one of the decay's length, not rounded.

    Args:
        schedule: with the decay's length settled.
        train_samples: length of the run in rows, where it is given so; the schedule's lengths are then in rows too.
        global_batch_size: rows of a step.
    """
    if train_samples is not None:
        decay = (schedule.lr_decay_samples or 0) / global_batch_size
        warmup = schedule.lr_warmup_samples / global_batch_size
        wsd_decay = (schedule.lr_wsd_decay_samples or 0) / global_batch_size
    else:
        decay, warmup = float(schedule.lr_decay_iters or 0), float(schedule.lr_warmup_iters)
        wsd_decay = float(schedule.lr_wsd_decay_iters or 0)
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    return ScheduleLengths(decay, warmup, wsd_decay)


def check_schedule(lengths: ScheduleLengths, lr_decay_style: str) -> list[str]:
    """Return what doesn't fit in the schedule's lengths, once the length of the run is known."""
    if lengths.warmup >= lengths.decay:
        return [
            f"warmup takes {lengths.warmup:g} steps and the decay ends after {lengths.decay:g}; warmup must be "
            "shorter: lower --lr-warmup-iters, or raise --lr-decay-iters or --train-iters"
        ]
    if lr_decay_style == "WSD" and lengths.warmup + lengths.wsd_decay > lengths.decay:
        return [
            f"WSD: warmup {lengths.warmup:g} + final decay {lengths.wsd_decay:g} steps are more than the schedule's "
            f"{lengths.decay:g}; lower --lr-wsd-decay-iters or --lr-warmup-iters"
        ]
    return []
