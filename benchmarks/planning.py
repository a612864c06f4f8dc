"""What planning costs: a global batch of packs, what a step waits for it, and how start and memory grow with the rows.

    OMP_NUM_THREADS=1 python benchmarks/planning.py              all of it
    OMP_NUM_THREADS=1 python benchmarks/planning.py plan wait    parts

Lengths are log-normal (median 250 tokens, spread 1, at most a pack); with pictures, half of the rows have one of 64 to
1024 tokens. Costs are those of a Qwen2.5-VL 3B.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import WORDS, add_smallest, median
from data_pipeline import model_dir, photographs

CAPACITY = 8192


@dataclass
class Sizes:
    """How much is measured.

    Attributes:
        packs: of a global batch.
        steps: planned of each.
        step: seconds of a step that waits for plans.
        rows: of the files with which runs start.
    """

    packs: tuple[int, ...] = (8, 64, 256, 1024)
    steps: int = 10
    step: float = 0.2
    rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)


SMALLEST = Sizes(packs=(8,), steps=2, step=0.01, rows=(50,))


def main() -> None:
    """Run the parts that are named, all without a name; print their figures."""
    parts: dict[str, Callable[[Sizes], None]] = {"plan": plan, "wait": wait, "start": start}
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


def measurer(data: SizedRows, processes: int = 0) -> Any:
    """A measurer of the rows."""
    from mindspeed_mm.data.plan.measuring import Measurer

    return Measurer(data, processes, lambda: len(data))


def planner(data: SizedRows, packs: int, measured: Any) -> Any:
    """The planner of a run on at most 128 ranks, each of which takes the same number of packs."""
    from mindspeed_mm.data.plan.order import FixedOrder
    from mindspeed_mm.data.plan.pack_plan import PackPlanner
    from mindspeed_mm.data.plan.plan import BatchLayout

    layout = BatchLayout(1, packs, min(128, packs))
    return PackPlanner(FixedOrder(len(data)), layout, CAPACITY, measured, _costs())


def _costs() -> Any:
    from mindspeed_mm.data.plan.cost import AttentionCost, CostModel

    return CostModel(per_token=1.85e10, attention=AttentionCost(1.76e6), per_patch=3.8e9, per_squared_patch=6.1e4)


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


def wait(sizes: Sizes) -> None:
    """What a step waits for its plan, and how much slower its own Python becomes; plans made here, by a thread, ahead.

    The largest global batch, rank 0; a step is a fixed number of small operations of torch. Sizes are known, or (the
    first epoch of a run) found while steps go on.
    """
    packs = sizes.packs[-1]
    data = SizedRows(packs * CAPACITY // 300 * (3 * sizes.steps + 8), False)
    count = _operations(sizes.step)
    alone = median([_step(count) for _ in range(sizes.steps)])
    print(f"{packs} packs of {CAPACITY}: a step without any planning takes {1000 * alone:.0f} ms")
    for is_known in (True, False):
        for name, make in (("in the step", _here), ("by a thread", _by_thread), ("ahead, by a process", _ahead)):
            measured = measurer(data, 1)
            for row in range(len(data)) if is_known else ():
                measured.table[row] = data.measure(row)
            plans = make(planner(data, packs, measured))
            next(plans)
            _step(count)
            waited, stepped = [], []
            for _ in range(sizes.steps):
                started = time.perf_counter()
                next(plans)
                waited.append(1000 * (time.perf_counter() - started))
                stepped.append(_step(count))
            plans.close()
            measured.close()
            how = f"planned {name}, sizes {'known' if is_known else 'found meanwhile'}"
            print(
                f"{how}: a step waits {median(waited):.1f} ms (worst {max(waited):.1f}),",
                f"and takes {median(stepped) / alone:.2f} of its time without planning",
                flush=True,
            )


def _operations(seconds: float) -> int:
    """Number of small operations of torch that take so long."""
    return int(1000 * seconds / median([_step(1000) for _ in range(5)]))


def _step(count: int) -> float:
    state = torch.ones(64)
    started = time.perf_counter()
    for _ in range(count):
        state = torch.addcmul(state, state, state, value=1e-9)
    return time.perf_counter() - started


def _here(made: Any) -> Any:
    from mindspeed_mm.data.plan.ahead import plans_of

    return plans_of(made, 0)


def _ahead(made: Any) -> Any:
    from mindspeed_mm.data.plan.ahead import AheadPlans

    return AheadPlans(made, 0)


def _by_thread(made: Any) -> Any:
    """What a thread of the training process would do; only for comparison."""
    ready: queue.Queue[Any] = queue.Queue(4)
    ended = threading.Event()

    def run() -> None:
        for plan in _here(made):
            while not ended.is_set():
                try:
                    ready.put(plan, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if ended.is_set():
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while True:
            yield ready.get()
    finally:
        ended.set()
        thread.join()


_START = """
import os, sys, time
sys.path.insert(0, "benchmarks")
from pathlib import Path
import torch
from transformers import AutoProcessor, Qwen2_5_VLProcessor, Qwen2TokenizerFast, Qwen2VLImageProcessor
from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.loading import loader as _loader
from common import data_param

torch.set_num_threads(1)

def memory(pid, kind):
    lines = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024

def children():
    return [int(p) for p in open(f"/proc/self/task/{os.getpid()}/children").read().split()]

_, model, file, sampler, packing = sys.argv
before, started = memory(os.getpid(), "Anonymous"), time.perf_counter()
param = data_param(Path(model), Path(file))["dataset_param"]
param["basic_parameters"].update({"cutoff_len": 2048, "packing": packing == "True"})
loader = build_mm_dataloader(
    build_mm_dataset(param), {"sampler_type": sampler}, micro_batch_size=1, global_batch_size=8, num_workers=2
)
batches = iter(loader)
next(batches)
first = time.perf_counter() - started
for _ in range(20):
    next(batches)
print(first, memory(os.getpid(), "Anonymous") - before, *(memory(pid, "Private") for pid in children()))
loader.close()
"""


def start(sizes: Sizes) -> None:
    """Seconds to the first batch, after imports, and memory of the processes, for files of more and more rows."""
    kinds = {
        "padded": ("BaseRandomBatchSampler", False),
        "packed": ("BaseRandomBatchSampler", True),
        "grouped": ("LengthGroupedSampler", False),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_dir(folder)
        photographs(folder / "photographs", 50, (64, 64))
        for has_pictures in (False, True):
            for rows in sizes.rows:
                file = folder / f"{rows}.jsonl"
                _write_rows(file, rows, has_pictures)
                for kind, (sampler, packing) in kinds.items():
                    words = [sys.executable, "-c", _START, str(model), str(file), sampler, str(packing)]
                    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
                    first, grown, *workers = map(float, printed)
                    print(
                        f"{rows} rows of {'pictures' if has_pictures else 'text'}, {kind}: first batch after",
                        f"{first:.2f} s; the run's process has {grown:.0f} MB more then, its workers have",
                        ", ".join(f"{used:.0f}" for used in sorted(workers)) + " of their own",
                        flush=True,
                    )
                file.unlink()


def _write_rows(file: Path, rows: int, has_pictures: bool) -> None:
    drawn = np.random.RandomState(1)
    lengths = np.clip(drawn.lognormal(3.0, 0.8, rows), 1, 300).astype(int).tolist()
    with open(file, "w", encoding="utf-8") as out:
        for number, length in enumerate(lengths):
            answer = " ".join(WORDS[(number + place) % len(WORDS)] for place in range(length))
            question = f"{'<image>' * has_pictures}what is in number {number}"
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            images = [f"photographs/64x64_{number % 50}.jpg"] if has_pictures else []
            out.write(json.dumps({"messages": turns, "images": images}) + "\n")


def _cost(data: SizedRows, rows: list[int]) -> float:
    patches = data.patches[rows]
    return float(np.sum(_costs().costs(data.tokens[rows], patches, patches**2)))


if __name__ == "__main__":
    main()
