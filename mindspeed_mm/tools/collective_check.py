"""Collectives between the ranks of this machine: whether they work, and how fast they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 120
_SMALL, _LARGE = 1, 1 << 22  # float32 values
_ROUNDS = 5


@dataclass(frozen=True)
class Collectives:
    """All-reduce between ranks.

    Attributes:
        ranks: their number.
        backend: gloo, nccl or hccl.
        latency_us: of one value, in microseconds.
        bytes_per_second: of 16 MiB, as sent by each rank of a ring.
        failure: why they don't work; "": they do.
    """

    ranks: int
    backend: str = ""
    latency_us: float = 0.0
    bytes_per_second: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        speed = f"{self.latency_us:.0f} µs a value, {self.bytes_per_second / 1e9:.2f} GB/s"
        return f"{self.ranks} over {self.backend}: all-reduce {speed}"


def check_collectives(ranks: int) -> Collectives:
    """Let as many processes as `ranks` reduce tensors; returned is what rank 0 found."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-mm-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*words, "-m", "mindspeed_mm.tools.collective_check", str(answer)],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Collectives(ranks, failure=f"no answer within {_SECONDS} s")
        if not answer.exists():
            return Collectives(ranks, failure=_reason(done.stderr) or f"status {done.returncode}")
        return Collectives(**json.loads(answer.read_text(encoding="utf-8")))


def _reason(errors: str) -> str:
    """The last line of a traceback that tells an error of the ranks, not of their launcher."""
    lines = [line.strip() for line in errors.splitlines()]
    told = [line for line in lines if "Error:" in line and "ChildFailedError" not in line]
    return told[0] if told else ""


def measure(answer: Path) -> None:
    """Reduce tensors on this rank; rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    from mindspeed_mm.parallel.world import start_world

    world = start_world(None)
    found = {}
    for name, values in (("small", _SMALL), ("large", _LARGE)):
        tensor = torch.ones(values, device=world.device)
        times = []
        for _ in range(_ROUNDS):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()
            times.append(time.perf_counter() - begin)
        found[name] = min(times)
    size = dist.get_world_size()
    if dist.get_rank() == 0:
        sent = 2 * (size - 1) / size * _LARGE * 4
        content = Collectives(size, dist.get_backend(), found["small"] * 1e6, sent / found["large"])
        answer.write_text(json.dumps(vars(content)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
