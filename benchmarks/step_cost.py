"""What one optimizer step does, counted: operators, memory, collectives, host work; ours against a bare loop.

    python benchmarks/step_cost.py                    # both backends, about 2 minutes on two cores
    python benchmarks/step_cost.py --part fsdp2 --ranks 2 --names 15

Counts don't depend on how busy the machine is. Both loops go through the same micro-batches of a tiny model, at a
first size, with two layers more, and with two micro-batches more, so that what ours does beyond the bare loop falls
into a part of each step, of each layer (and its parameters), and of each micro-batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

LAYERS, MICRO_BATCHES, MORE = 2, 2, 2
SIZES = {
    "first size": (LAYERS, MICRO_BATCHES),
    "more layers": (LAYERS + MORE, MICRO_BATCHES),
    "more micro-batches": (LAYERS, MICRO_BATCHES + MORE),
}
WARM = 3  # steps before those that are counted: AdamW's state and FSDP's order are made in the first ones


@dataclass
class Cost:
    """What a step did on this rank.

    Attributes:
        operators: ATen operators by name, those of autograd and of the optimizer too.
        allocated: bytes of tensors that operators made.
        collectives: by name.
        sent: bytes of the tensors handed to them.
        reads: of tensors' values by the host (`item`, `tolist`, `bool` …): each waits for a device's queue.
        calls: Python functions by "file:name"; of `C` those that are written in C, by name.
    """

    operators: Counter[str] = field(default_factory=Counter)
    allocated: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    reads: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, int]:
        """Each sum by the name that the table has for it."""
        return {
            "operators": self.operators.total(),
            "bytes allocated": self.allocated,
            "collectives": self.collectives.total(),
            "bytes in collectives": self.sent,
            "values read by the host": self.reads,
            "Python and C calls": self.calls.total(),
        }


class CountOperators(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes again as operators on its local tensors
        result = func(*args, **(kwargs or {}))
        cost, name = self._cost, str(func.overloadpacket)
        given = list(_tensors((args, kwargs or {})))
        if func.namespace in ("c10d", "_c10d_functional"):
            cost.collectives[name] += 1
            cost.sent += sum(t.nbytes for t in given)
            return result
        cost.operators[name] += 1
        cost.reads += name == "aten._local_scalar_dense"
        known = {t.untyped_storage()._cdata for t in given}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                cost.allocated += tensor.nbytes
        return result


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


class CountCalls:
    """Counts calls of functions on this thread."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def __enter__(self) -> None:
        sys.setprofile(self._count)

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename.replace(str(ROOT) + "/", "").split("site-packages/")[-1]
            self._cost.calls[f"{path}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self._cost.calls[f"C:{arg.__name__}"] += 1
            # tolist reads without an operator of its own
            self._cost.reads += arg.__name__ == "tolist" and isinstance(getattr(arg, "__self__", None), torch.Tensor)


def cost_of(step: Callable[[], object]) -> Cost:
    """Count what `step` does, from its fourth call on."""
    cost = Cost()
    for _ in range(WARM):
        step()
    with CountOperators(cost):
        step()
    with CountCalls(cost):
        step()
    return cost


def cost_of_ours(loop: Any) -> Cost:
    """The same of our loop's steps, from one's begin to the next's."""
    cost = Cost()
    operators, calls = CountOperators(cost), CountCalls(cost)

    def before_step(done: int) -> bool:
        if done == WARM:
            operators.__enter__()
        elif done == WARM + 1:
            operators.__exit__(None, None, None)
            calls.__enter__()
        elif done == WARM + 2:
            calls.__exit__()
        return done < WARM + 2

    loop.train(before_step)
    return cost


def folder_of(folder: Path, layers: int) -> tuple[Path, tuple[Path, Path]]:
    """The folder of a tiny model with so many layers, and its HF directory and data file, made if they aren't there."""
    from common import prepare

    own = folder / f"layers{layers}"
    return own, prepare(own, rows=32, smallest=True, layers=layers)


def count(part: str, folder: Path, layers: int, micro_batches: int) -> dict[str, Cost]:
    """Costs of "ours" and of the "bare" loop, in this process (of several).

    Args:
        folder: where `folder_of` has made the model.
    """
    from common import collated_batches
    from ptd_overhead import BareLoop as BareMegatron
    from ptd_overhead import our_ptd_loop
    from step_overhead import MICRO_BATCH, our_loop
    from step_overhead import BareLoop as BareFSDP2

    torch.set_num_threads(1)
    folder, (hf_dir, data_file) = folder_of(folder, layers)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # every micro-batch holds images: the bare loop can't do without
    batches = [b for b in collated_batches(hf_dir, data_file, MICRO_BATCH) if "pixel_values" in b][rank::world]
    batches = batches[:micro_batches]
    name = f"run_{part}_{world}_{micro_batches}"
    bare: Any
    if part == "fsdp2":
        ours = our_loop(folder, name, batches, micro_batches)
        bare = BareFSDP2(folder, batches, micro_batches)
    else:
        ours = our_ptd_loop(folder, name, "dp2" if world > 1 else "1", batches, micro_batches, world)
        bare = BareMegatron(ours, batches, MICRO_BATCH)
    return {"ours": cost_of_ours(ours), "bare": cost_of(bare.step)}


@dataclass
class Beyond:
    """What ours does beyond the bare loop: of each layer, of each micro-batch, and of each step whatever its size."""

    layer: float
    micro_batch: float
    step: float


def beyond(costs: dict[str, dict[str, Cost]]) -> dict[str, Beyond]:
    """Figure → how ours - bare grows.

    Args:
        costs: size → what `count` returned, for all SIZES.
    """
    found = {}
    for name in Cost().figures():
        first, layers, micro = (c["ours"].figures()[name] - c["bare"].figures()[name] for c in costs.values())
        layer, micro_batch = (layers - first) / MORE, (micro - first) / MORE
        found[name] = Beyond(layer, micro_batch, first - layer * LAYERS - micro_batch * MICRO_BATCHES)
    return found


def table(costs: dict[str, dict[str, Cost]]) -> str:
    """Sums of both at each size, and what ours does beyond the bare loop, split.

    Args:
        costs: size → what `count` returned.
    """
    lines = []
    for size, found in costs.items():
        layers, micro_batches = SIZES[size]
        lines.append(f"{size} ({layers} layers, {micro_batches} micro-batches)")
        lines.append(f"  {'':<26}{'ours':>12}{'bare':>12}{'ours - bare':>14}{'ratio':>8}")
        ours, bare = found["ours"].figures(), found["bare"].figures()
        for name, mine in ours.items():
            ratio = f"{mine / bare[name]:.3f}" if bare[name] else ""
            lines.append(f"  {name:<26}{mine:>12}{bare[name]:>12}{mine - bare[name]:>14}{ratio:>8}")
    if len(costs) == len(SIZES):
        lines.append("ours - bare, of each")
        lines.append(f"  {'':<26}{'layer':>12}{'micro-batch':>14}{'step':>12}")
        for name, by in beyond(costs).items():
            lines.append(f"  {name:<26}{by.layer:>12.1f}{by.micro_batch:>14.1f}{by.step:>12.1f}")
    return "\n".join(lines)


def differences(found: dict[str, Cost], number: int) -> str:
    """The operators and calls in which ours and the bare loop differ most."""
    lines = []
    for kind in ("operators", "collectives", "calls"):
        mine, theirs = getattr(found["ours"], kind), getattr(found["bare"], kind)
        apart = sorted(((mine[n] - theirs[n], n) for n in {*mine, *theirs}), key=lambda d: -abs(d[0]))[:number]
        lines += [f"  {kind}: {n} {by:+}" for by, n in apart if by]
    return "\n".join(lines)


def main() -> None:
    """Count in processes of their own for each part; print tables."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=["fsdp2", "megatron", "all"], default="all")
    parser.add_argument("--ranks", type=int, help="default: FSDP2 on 1 and on 2, Megatron on 1")
    parser.add_argument("--names", type=int, default=0, help="operators and functions that differ most to be named")
    parser.add_argument("--worker", choices=["fsdp2", "megatron"])
    parser.add_argument("--folder", type=Path)
    add_smallest(parser)
    options = parser.parse_args()
    if options.worker:
        sizes = list(SIZES)[: 1 if options.smallest else None]
        costs = {size: count(options.worker, options.folder, *SIZES[size]) for size in sizes}
        if os.environ.get("RANK", "0") == "0":
            print(f"== {options.worker}, {os.environ.get('WORLD_SIZE', '1')} rank(s)")
            print(table(costs))
            for size in sizes if options.names else ():
                print(f"{size}:\n{differences(costs[size], options.names)}")
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="step-cost-"))
    for layers, _ in SIZES.values():
        folder_of(folder, layers)  # before ranks would do it, each for itself
    kinds = (("fsdp2", 1), ("fsdp2", 2), ("megatron", 1))
    for part, ranks in kinds[1:] if options.smallest else kinds:
        if options.part in (part, "all") and options.ranks in (ranks, None):
            words = [str(Path(__file__).resolve()), "--worker", part, "--folder", str(folder)]
            words += ["--names", str(options.names), *(["--smallest"] if options.smallest else [])]
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-W", "ignore", *launcher, *words], check=True, env=variables)


if __name__ == "__main__":
    main()
