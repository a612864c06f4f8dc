"""What planning costs: a global batch of packs, and what a step waits for it.

    OMP_NUM_THREADS=1 python benchmarks/planning.py              all of it
    OMP_NUM_THREADS=1 python benchmarks/planning.py plan         parts

Lengths are log-normal (median 250 tokens, spread 1, at most a pack); with pictures, half of the rows have one of 64 to
1024 tokens. Costs are those of a Qwen2.5-VL 3B.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import add_smallest, median

CAPACITY = 8192


@dataclass
class Sizes:
    """How much is measured.

    Attributes:
        packs: of a global batch.
        steps: planned of each.
    """

    packs: tuple[int, ...] = (8, 64, 256, 1024)
    steps: int = 10


SMALLEST = Sizes(packs=(8,), steps=2)


def main() -> None:
    """Run the parts that are named, all without a name; print their figures."""
    parts: dict[str, Callable[[Sizes], None]] = {"plan": plan}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="which; none = all")
    add_smallest(parser)
    options = parser.parse_args()
    sizes = SMALLEST if options.smallest else Sizes()
    for name in options.parts or parts:
        print(f"== {name}", flush=True)
        parts[name](sizes)


class SizedRows:
    """Rows of which only the sizes are known."""

    def __init__(self, rows: int, has_pictures: bool) -> None:
        drawn = np.random.RandomState(0)
        self.patches = (drawn.rand(rows) < 0.5) * drawn.choice([256, 1024, 2304, 4096], rows) * has_pictures
        texts = np.clip(drawn.lognormal(np.log(250), 1.0, rows), 1, CAPACITY).astype(np.int64)
        self.tokens = np.minimum(CAPACITY, texts + self.patches // 4)

    def __len__(self) -> int:
        return len(self.tokens)

    def measure(self, row: int) -> list[Any]:
        from mindspeed_mm.data.media.media import SampleSize

        patches = int(self.patches[row])
        return [SampleSize(int(self.tokens[row]), patches, patches**2)]


def measurer(data: SizedRows) -> Any:
    """A measurer of the rows, without workers."""
    from mindspeed_mm.data.plan.measuring import Measurer

    return Measurer(data, 0, lambda: len(data))


def planner(data: SizedRows, packs: int, measured: Any) -> Any:
    """The planner of a run on at most 128 ranks, each of which takes the same number of packs."""
    from mindspeed_mm.data.plan.order import FixedOrder
    from mindspeed_mm.data.plan.pack_plan import PackPlanner
    from mindspeed_mm.data.plan.plan import BatchLayout

    layout = BatchLayout(1, packs, min(128, packs))
    return PackPlanner(FixedOrder(len(data)), layout, CAPACITY, measured, _costs())


def _costs() -> Any:
    from mindspeed_mm.data.plan.cost import CostModel

    return CostModel(per_token=1.85e10, per_squared_token=8.8e5, per_patch=3.8e9, per_squared_patch=6.1e4)


def plan(sizes: Sizes) -> None:
    """Milliseconds that a global batch takes to be planned, once its rows are measured; padding and balance."""
    for has_pictures in (False, True):
        for packs in sizes.packs:
            data = SizedRows(packs * CAPACITY // 300 * (sizes.steps + 2), has_pictures)
            measured = measurer(data)
            for row in range(len(data)):
                measured.table[row] = data.measure(row)
            taken, filled, ranks, micro = [], [], [], []
            batches = planner(data, packs, measured).batches()
            for _ in range(sizes.steps + 1):
                started = time.perf_counter()
                batch = next(batches)
                taken.append(1000 * (time.perf_counter() - started))
                rows = [[list(itertools.chain(*rows)) for rows in rank] for rank in batch.micro_batches]
                cost = np.array([[_cost(data, [row for row, _ in part]) for part in rank] for rank in rows])
                filled.append(sum(int(data.tokens[row]) for pack in batch.rows for row, _ in pack) / packs / CAPACITY)
                ranks.append(cost.sum(1).max() / cost.mean(0).sum())
                micro.append((cost.max(0) / cost.mean(0)).mean())
            print(
                f"{packs} packs of {CAPACITY}, {'pictures' if has_pictures else 'text'}: {median(taken[1:]):.1f}",
                f"ms (worst {max(taken[1:]):.1f}; the first, with the epoch's order, {taken[0]:.0f}); padding",
                f"{1 - np.mean(filled):.2%}, largest ÷ mean cost of a rank {np.mean(ranks):.3f}, in a micro-batch",
                f"{np.mean(micro):.3f}",
                flush=True,
            )


def _cost(data: SizedRows, rows: list[int]) -> float:
    patches = data.patches[rows]
    return float(np.sum(_costs().costs(data.tokens[rows], patches, patches**2)))


if __name__ == "__main__":
    main()
