"""How exact bf16 is: our error against float32, and plain transformers' or diffusers' own, for each family.

    python benchmarks/bf16_error.py                          # all families on both backends: about ten minutes
    python benchmarks/bf16_error.py qwen3_vl wan --draws 20
    python benchmarks/bf16_error.py qwen3 --backend megatron
    python benchmarks/bf16_error.py --split --draws 40       # on two tensor-parallel ranks alone: about twenty minutes

Tiny models on the host, the same weights and rows for all. What is measured, and how it is averaged, is said in
tests/support/bf16_error.py. "±" is the standard error of the ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:
    from tests.support.bf16_error import Errors, SplitErrors
    from tests.support.workers import RankPool

HEAD = "| family | backend | gradients: plain | ours | ratio | losses: plain | ours | ratio |\n" + "|---" * 8 + "|"
SPLIT_HEAD = (
    "| family | backend | draws | gradients: plain TP 2 ÷ plain | ours ÷ plain | ours ÷ plain TP 2 "
    "| losses: plain TP 2 ÷ plain | ours ÷ plain | ours ÷ plain TP 2 |\n" + "|---" * 9 + "|"
)
SMALLEST = ("qwen3", "wan-t2v")


def main() -> None:
    """Print the table of one process, and that of two tensor-parallel ranks."""
    from common import add_smallest

    from tests.support.bf16_error import SPLIT_ALIKE, draws_of
    from tests.support.families import families
    from tests.support.predictors import cases

    known = {**families(), **cases()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of: {', '.join(known)}; without one, all")
    parser.add_argument("--backend", choices=("fsdp2", "megatron"), help="without it, both")
    parser.add_argument("--draws", type=int, default=8, help="draws of weights, of 4 to 8 rows each, at least")
    parser.add_argument("--split", action="store_true", help="the table of two tensor-parallel ranks alone")
    add_smallest(parser)
    options = parser.parse_args()
    wanted = options.families or (SMALLEST if options.smallest else list(known))
    names = [name for name in known if name in wanted or name.partition("-")[0] in wanted]
    if missing := [w for w in wanted if not any(w in (name, name.partition("-")[0]) for name in names)]:
        parser.error(f"unknown: {', '.join(missing)}; known: {', '.join(known)}")
    draws = {name: 1 if options.smallest else max(options.draws, draws_of(name)) for name in names}
    if not options.split:
        print(HEAD)
        for name, backend, errors in measure(draws, options.backend):
            print(row(name, backend, errors), flush=True)
        print()
    print(SPLIT_HEAD)
    named = options.split and options.families
    shared = {name: number for name, number in draws.items() if named or name in SPLIT_ALIKE}
    for name, backend, split in measure_split(shared, options.backend):
        print(split_row(name, backend, split), flush=True)


def backends_of(name: str, only: str | None) -> list[str]:
    """The backends that have a family, of those that are asked for."""
    from tests.support.bf16_error import ON_MEGATRON

    found = ["FSDP2", "Megatron"] if name in ON_MEGATRON else ["FSDP2"]
    return [backend for backend in found if only in (None, backend.lower())]


def measure(draws: dict[str, int], only: str | None) -> Iterator[tuple[str, str, Errors]]:
    """Yield (family, backend, errors) for each family of `draws` and each backend that has it, on one process."""
    from tests.support.bf16_error import family_errors, predictor_errors
    from tests.support.families import families
    from tests.support.family_case import FamilyCase
    from tests.support.predictors import cases

    made: dict[str, Any] = families()
    with rank_pools(1) as pools:
        for name, number in draws.items():
            for backend in backends_of(name, only):
                pool = pools[backend]
                with tempfile.TemporaryDirectory(prefix="bf16-error-") as folder:
                    own = Path(folder)
                    if name in made:
                        case = FamilyCase(name, own, made[name])
                        errors = family_errors(case, number, pool, own, megatron=backend == "Megatron")
                    else:
                        (errors,) = pool.run(predictor_errors, *cases()[name], number, own, timeout=600)
                yield name, backend, errors


def measure_split(draws: dict[str, int], only: str | None) -> Iterator[tuple[str, str, SplitErrors]]:
    """Yield (family, backend, errors) as `measure` does, on two tensor-parallel ranks."""
    from tests.support.bf16_error import split_errors
    from tests.support.families import families
    from tests.support.family_case import FamilyCase

    with rank_pools(2) as pools:
        for name, number in draws.items():
            for backend in backends_of(name, only):
                ours, plain, megatron = pools[backend], pools["FSDP2"], backend == "Megatron"
                with tempfile.TemporaryDirectory(prefix="bf16-error-") as folder:
                    case = FamilyCase(name, Path(folder), families()[name])
                    errors = split_errors(case, number, ours, plain, Path(folder), megatron=megatron)
                yield name, backend, errors


@contextmanager
def rank_pools(ranks: int) -> Iterator[dict[str, RankPool]]:
    """Worker processes of both backends."""
    from tests.support.workers import RankPool

    pools = {backend: RankPool(ranks, megatron=backend == "Megatron") for backend in ("FSDP2", "Megatron")}
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def row(name: str, backend: str, errors: Errors) -> str:
    """A line of the table: medians of the gradients' distances, root mean squares of the losses' errors."""
    import statistics

    from tests.support.bf16_error import root_mean_square

    cells = [f"`{name}`", backend]
    cells += [f"{statistics.median(values):.1e}" for values in (errors.plain, errors.ours)]
    cells += [f"{errors.ratio:.2f} ± {errors.spread:.2f} (median {errors.median:.2f})"]
    cells += [f"{root_mean_square(values):.1e}" for values in (errors.plain_losses, errors.our_losses)]
    return f"| {' | '.join([*cells, f'{errors.loss_ratio:.2f} ± {errors.loss_spread:.2f}'])} |"


def split_row(name: str, backend: str, split: SplitErrors) -> str:
    """A line of the table of two tensor-parallel ranks: ratios alone."""
    cells = [f"`{name}`", f"{backend} TP 2", str(len(set(split.ours.draws)))]
    cells += [f"{errors.ratio:.2f} ± {errors.spread:.2f}" for errors in split]
    cells += [f"{errors.loss_ratio:.2f} ± {errors.loss_spread:.2f}" for errors in split]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
