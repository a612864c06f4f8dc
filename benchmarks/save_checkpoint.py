"""How long a save keeps training waiting: in the background (--async-save) against at once.

    python benchmarks/save_checkpoint.py                    # 2 ranks, 168 M parameters, about 2 minutes on two cores
    python benchmarks/save_checkpoint.py --layers 8 --saves 3

Each rank holds half of the parameters and of AdamW's moments (12 bytes a parameter in all) and steps between two saves,
also while one is being written. The first save of each kind is told apart: it makes torch's plan, and in the background
the memory for the copies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

HIDDEN = 2048
TARGET = 0.1


def main() -> None:
    """Run both kinds of saves in the same processes and print what they took."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=40, help=f"each of {HIDDEN} x {HIDDEN} parameters")
    parser.add_argument("--saves", type=int, default=6, help="of each kind, the first included")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's folder for such things")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_smallest(parser)
    options = parser.parse_args()
    if options.smallest:
        options.layers, options.saves = 2, 2
    if options.worker:
        measure(options.folder, options.layers, options.saves)
        return
    folder = Path(tempfile.mkdtemp(prefix="save-checkpoint-", dir=options.folder))
    words = [str(Path(__file__).resolve()), "--worker", "--folder", str(folder)]
    words += ["--layers", str(options.layers), "--saves", str(options.saves)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={options.ranks}",
        *words,
    ]
    try:
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        report(json.loads((folder / "times.json").read_text()), options.ranks, options.layers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, layers: int, saves: int) -> None:
    """Save `saves` times at once and as often in the background, in turn; rank 0 writes the times."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from mindspeed_mm.checkpoint.saver import CheckpointSaver
    from mindspeed_mm.checkpoint.snapshot import Snapshots
    from mindspeed_mm.configs.dims import Dims
    from mindspeed_mm.optimizer.elementwise import AdamW
    from mindspeed_mm.parallel.meshes import parameter_mesh
    from mindspeed_mm.parallel.world import start_world

    torch.set_num_threads(1)
    world = start_world("gloo")
    mesh = parameter_mesh(Dims.of(world.size, sharding_size="auto"))
    model = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(torch.randn(8, HIDDEN)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    kinds: dict[str, tuple[CheckpointSaver, Snapshots]] = {}
    for name in ("at once", "in the background"):
        saver = CheckpointSaver(folder / name, in_background=name != "at once", keep=1)
        kinds[name] = saver, Snapshots(model, optimizer, save_rng=True, world=world)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for iteration in range(1, saves + 1):
        for name, (saver, snapshots) in kinds.items():
            dist.barrier()
            times[name].append(timed_save(saver, snapshots, iteration, step))
    for saver, _ in kinds.values():
        assert saver.last_saved == saves
        saver.close()
    if world.rank == 0:
        (folder / "times.json").write_text(json.dumps(times))


def timed_save(saver: Any, snapshots: Any, iteration: int, step: Callable[[], None]) -> tuple[float, float]:
    """Seconds that training waits, and seconds until the checkpoint is visible, training going on meanwhile."""
    started = time.perf_counter()
    outcome = saver.save(iteration, lambda detached: snapshots.take({"iteration": iteration}, detached=detached))
    blocked = time.perf_counter() - started
    if outcome is None:
        step()
        saver.wait()
    return blocked, time.perf_counter() - started


def report(times: dict[str, list[list[float]]], ranks: int, layers: int) -> None:
    """Print the table and the ratio."""
    import torch
    from common import median

    millions = layers * HIDDEN * (HIDDEN + 1) / 1e6
    print(
        f"torch {torch.__version__}; {os.cpu_count()} cores, {ranks} ranks of one thread; {millions:.0f} M parameters "
        f"with AdamW, {millions * 12 / 1e3 / ranks:.2f} GB a rank"
    )
    print(f"{'save':<18}{'training waits':>16}{'first':>9}{'visible after':>16}{'first':>9}")
    for name, pairs in times.items():
        (first_wait, first_all), *rest = pairs
        waits, alls = [wait for wait, _ in rest], [total for _, total in rest]
        print(f"{name:<18}{median(waits):>14.3f} s{first_wait:>7.2f} s{median(alls):>14.2f} s{first_all:>7.2f} s")
    ratio = median([p[0] for p in times["in the background"][1:]]) / median([p[0] for p in times["at once"][1:]])
    print(f"training waits, in the background / at once: {ratio:.3f} (target <= {TARGET})")


if __name__ == "__main__":
    main()
