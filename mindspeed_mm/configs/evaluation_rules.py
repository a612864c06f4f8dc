"""What --save-best, --early-stop, --eval-generate and --sample-interval need: evaluations, rows, a folder, a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.flags.data_and_logging import LoggingArguments
from mindspeed_mm.configs.flags.parsed import ParsedFlags

if TYPE_CHECKING:
    from mindspeed_mm.configs.run import Run

_OF_SAMPLES = ("sample_prompts", "sample_size", "sample_inference_steps", "sample_guidance_scale")
_OF_ANSWERS = ("eval_generate_language", "eval_generate_rows", "eval_generate_batch_size", "eval_max_new_tokens")


def asking_flags(save_best: str | None, early_stop: int | None, eval_generate: str | None) -> list[str]:
    """Return the flags that need evaluations, with their values."""
    given = {"--save-best": save_best, "--early-stop": early_stop, "--eval-generate": eval_generate}
    return [f"{flag} {value}" for flag, value in given.items() if value is not None]


def asking_flags_of(run: Run) -> list[str]:
    """Return `asking_flags` of a run."""
    return asking_flags(run.checkpoint.save_best, run.length.early_stop, run.logging.eval_generate)


def check_evaluation(args: ParsedFlags) -> list[str]:
    """Return a sentence for each flag that is missing beside one that needs evaluations, or their figure."""
    problems = []
    if args.save_best is not None and args.save is None:
        problems.append(f"--save-best {args.save_best} needs --save, the run folder that keeps the best checkpoint")
    if args.save_best not in (None, "loss", args.eval_generate):
        other = f", and --eval-generate computes {args.eval_generate}" if args.eval_generate is not None else ""
        problems.append(
            f"--save-best {args.save_best} follows a score of generated answers{other}: give --eval-generate "
            f"{args.save_best}"
        )
    if args.eval_generate is None:
        problems += _of_another(args, _OF_ANSWERS, "--eval-generate")
    elif args.eval_generate_language is not None and args.eval_generate != "wer":
        problems.append(
            f"--eval-generate-language {args.eval_generate_language}: it is the language of transcripts, for wer; the "
            f"score is {args.eval_generate}"
        )
    asking = asking_flags(args.save_best, args.early_stop, args.eval_generate)
    for flag, value, of in (
        ("--eval-interval", args.eval_interval, "steps between two evaluations"),
        ("--eval-iters", args.eval_iters, "global batches in one evaluation"),
    ):
        if asking and not value:
            problems.append(f"{asking[0]} needs evaluations, and {flag} is {value or 0}: give {flag} N ({of})")
    return problems


def check_samples(args: ParsedFlags) -> list[str]:
    """Return a sentence for what is missing beside --sample-interval, or for flags of it that stand alone."""
    if args.sample_interval is None:
        return _of_another(args, _OF_SAMPLES, "--sample-interval")
    flag, problems = f"--sample-interval {args.sample_interval}", []
    if args.save is None:
        problems.append(f"{flag} needs --save, the run folder that keeps the samples")
    if not args.report:
        problems.append(f"{flag} makes samples for the report, and --no-report leaves it out; remove one of them")
    if args.sample_size is not None and len(args.sample_size) != 3:
        found = " ".join(map(str, args.sample_size))
        problems.append(f"--sample-size is {found}; expected frames, height and width, such as --sample-size 1 256 256")
    return problems


def _of_another(args: ParsedFlags, names: tuple[str, ...], flag: str) -> list[str]:
    """A sentence for each of the flags that belong to another one, where they have other values than their defaults."""
    default = LoggingArguments()
    changed = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(default, name)}
    return [f"--{name.replace('_', '-')} {value} belongs to {flag}; give it, too" for name, value in changed.items()]


def check_validation_rows(run: Run) -> list[str]:
    """Return a sentence if the run's data.json keeps no rows for the evaluations that its flags ask for."""
    asking = asking_flags_of(run)
    if not asking or run.data is None:
        return []
    why = run.data.dataset_param.why_no_validation
    return [f"{asking[0]} needs validation rows, and {run.files.data.config_file}: {why}"] if why else []


def check_drawn(run: Run, *, draws: bool) -> list[str]:
    """Return a sentence if nothing can be drawn for --sample-interval.

    Args:
        draws: whether the script's recipe draws samples.
    """
    if run.logging.sample_interval is None or draws:
        return []
    return [
        f"--sample-interval {run.logging.sample_interval}: this script's model makes no pictures or videos, as those "
        "of pretrain_sora.py do; leave it out"
    ]


def check_answers(run: Run, *, is_scored: bool) -> list[str]:
    """Return a sentence if nothing can be answered for --eval-generate.

    Args:
        is_scored: whether the script's recipe scores what its model generates.
    """
    if run.logging.eval_generate is None:
        return []
    flag = f"--eval-generate {run.logging.eval_generate}"
    if not is_scored:
        return [
            f"{flag}: this script's model writes no answers to rows of data.json, as those of pretrain_vlm.py and "
            "pretrain_transformers.py do; leave it out"
        ]
    if not isinstance(run.data, DataConfig):
        return []
    param, file = run.data.dataset_param, run.files.data.config_file
    if param.dataset_type == "corpus":
        return [f"{flag}: {file}: the rows of dataset_type corpus are texts without turns; expected conversations"]
    if (stage := param.basic_parameters.stage) in ("pt", "pretrain"):
        return [f"{flag}: {file}: the rows of stage {stage} are texts without turns; expected conversations"]
    return []
