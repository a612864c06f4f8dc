"""Evaluate a model, trained here or not, on benchmarks and on rows of one's own (docs/evaluation.md)."""

from __future__ import annotations

import sys

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm.launch import errors_as_sentences
from mindspeed_mm.tasks.evaluation.command import main as run


def main() -> None:
    """Do what the command line says, and exit with its status."""
    with errors_as_sentences():
        sys.exit(run())


if __name__ == "__main__":
    main()
