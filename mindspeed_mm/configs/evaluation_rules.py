"""What --save-best and --early-stop need: evaluations, validation rows, and a folder for what is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.configs.flags.parsed import ParsedFlags

if TYPE_CHECKING:
    from mindspeed_mm.configs.run import Run


def asking_flags(save_best: str | None, early_stop: int | None) -> list[str]:
    """Return the flags that follow a figure of evaluations, with their values."""
    given = {"--save-best": save_best, "--early-stop": early_stop}
    return [f"{flag} {value}" for flag, value in given.items() if value is not None]


def check_evaluation(args: ParsedFlags) -> list[str]:
    """Return a sentence for each flag that is missing beside --save-best or --early-stop."""
    problems = []
    if args.save_best is not None and args.save is None:
        problems.append(f"--save-best {args.save_best} needs --save, the run folder that keeps the best checkpoint")
    asking = asking_flags(args.save_best, args.early_stop)
    for flag, value, of in (
        ("--eval-interval", args.eval_interval, "steps between two evaluations"),
        ("--eval-iters", args.eval_iters, "global batches in one evaluation"),
    ):
        if asking and not value:
            problems.append(f"{asking[0]} needs evaluations, and {flag} is {value or 0}: give {flag} N ({of})")
    return problems


def check_validation_rows(run: Run) -> list[str]:
    """Return a sentence if the run's data.json keeps no rows for the evaluations that its flags follow."""
    asking = asking_flags(run.checkpoint.save_best, run.length.early_stop)
    if not asking or run.data is None:
        return []
    why = run.data.dataset_param.why_no_validation
    return [f"{asking[0]} needs validation rows, and {run.files.data.config_file}: {why}"] if why else []
