"""How exact bf16 is: our error against float32, and plain transformers' or diffusers' own, for each family.

    python benchmarks/bf16_error.py                          # all families on both backends: about ten minutes
    python benchmarks/bf16_error.py qwen3_vl wan --draws 20
    python benchmarks/bf16_error.py qwen3 --backend megatron

Tiny models on the host, the same weights and rows for all. What is measured, and how it is averaged, is said in
tests/support/bf16_error.py. "±" is the standard error of the ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:
    from tests.support.bf16_error import Errors

HEAD = "| family | backend | gradients: plain | ours | ratio | losses: plain | ours | ratio |\n" + "|---" * 8 + "|"
#: where a family is trained → processes; of several, tensor-parallel ones
RANKS = {"FSDP2": 1, "Megatron": 1, "Megatron TP 2": 2}
SMALLEST = ("qwen3", "wan-t2v")


def main() -> None:
    """Print the table."""
    from common import add_smallest

    from tests.support.bf16_error import draws_of
    from tests.support.families import families
    from tests.support.predictors import cases

    known = {**families(), **cases()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of: {', '.join(known)}; without one, all")
    parser.add_argument("--backend", choices=("fsdp2", "megatron"), help="without it, both")
    parser.add_argument("--draws", type=int, default=8, help="draws of weights, of 4 to 8 rows each, at least")
    add_smallest(parser)
    options = parser.parse_args()
    wanted = options.families or (SMALLEST if options.smallest else list(known))
    names = [name for name in known if name in wanted or name.partition("-")[0] in wanted]
    if missing := [w for w in wanted if not any(w in (name, name.partition("-")[0]) for name in names)]:
        parser.error(f"unknown: {', '.join(missing)}; known: {', '.join(known)}")
    draws = {name: 1 if options.smallest else max(options.draws, draws_of(name)) for name in names}
    print(HEAD)
    for name, where, errors in measure(draws, options.backend):
        print(row(name, where, errors), flush=True)


def measure(draws: dict[str, int], only: str | None) -> Iterator[tuple[str, str, Errors]]:
    """Yield (family, where it ran, errors) for each family of `draws` and each backend that has it."""
    from tests.support.bf16_error import ON_MEGATRON, family_errors, predictor_errors
    from tests.support.families import families
    from tests.support.family_case import FamilyCase
    from tests.support.predictors import cases
    from tests.support.workers import RankPool

    pools = {where: RankPool(ranks, megatron=where != "FSDP2") for where, ranks in RANKS.items()}
    made: dict[str, Any] = families()
    try:
        for name, number in draws.items():
            for where, pool in pools.items():
                megatron = where != "FSDP2"
                if only not in (None, "megatron" if megatron else "fsdp2") or (megatron and name not in ON_MEGATRON):
                    continue
                with tempfile.TemporaryDirectory(prefix="bf16-error-") as folder:
                    if name in made:
                        case, flags = FamilyCase(name, Path(folder), made[name]), {}
                        if RANKS[where] > 1:
                            flags["tensor_model_parallel_size"] = RANKS[where]
                        errors = family_errors(case, number, pool, Path(folder), megatron=megatron, **flags)
                    else:
                        ours, predictor = cases()[name]
                        (errors,) = pool.run(predictor_errors, ours, predictor, number, Path(folder), timeout=600)
                    yield name, where, errors
    finally:
        for pool in pools.values():
            pool.close()


def row(name: str, where: str, errors: Errors) -> str:
    """A line of the table: medians of the gradients' distances, root mean squares of the losses' errors."""
    import statistics

    from tests.support.bf16_error import root_mean_square

    cells = [f"`{name}`", where]
    cells += [f"{statistics.median(values):.1e}" for values in (errors.plain, errors.ours)]
    cells += [f"{errors.ratio:.2f} ± {errors.spread:.2f} (median {errors.median:.2f})"]
    cells += [f"{root_mean_square(values):.1e}" for values in (errors.plain_losses, errors.our_losses)]
    return f"| {' | '.join([*cells, f'{errors.loss_ratio:.2f} ± {errors.loss_spread:.2f}'])} |"


if __name__ == "__main__":
    main()
