"""Start of the entry scripts: describe the run, and only then import torch and train."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mindspeed_mm.configs.recipe import Recipe
from mindspeed_mm.dry_run import asks_for_dry_run, dry_run
from mindspeed_mm.launch import described
from mindspeed_mm.utils.torch_import import import_torch_and_transformers


def start(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Train what the command line and its files describe.

    Args:
        recipe: the kind of training.
        argv: the words after the script's name; None: those of this process.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if asks_for_dry_run(words):
        sys.exit(dry_run(recipe, words))
    with described(recipe, words) as (run, stop):
        import_torch_and_transformers()  # mistakes in the launch have been reported before
        from mindspeed_mm.training import train_run

        train_run(run, recipe, stop)
