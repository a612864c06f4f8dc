"""Run an entry script with compiled blocks in workers, and keep what torch.compile did."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.captured import run_captured


@dataclass(frozen=True)
class Compiled:
    """What one rank compiled.

    Attributes:
        graphs: number of graphs.
        breaks: number of places where one ends, by reason.
    """

    graphs: int
    breaks: dict[str, int]


def run_compiled(words: list[str], script: str, folder: Path, steps: int) -> list[float]:
    """As `run_captured`, from an empty cache of functions; each rank's `Compiled` is left in `folder`."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    sums = run_captured(words, script, folder, steps)
    found = Compiled(counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
    rank = torch.distributed.get_rank()
    (folder / f"compiled{rank}.json").write_text(json.dumps(asdict(found)))
    torch._dynamo.reset()
    return sums


def compiled_by(folder: Path) -> list[Compiled]:
    """What each rank of a run compiled."""
    names = sorted(name for name in os.listdir(folder) if name.startswith("compiled"))
    return [Compiled(**json.loads((folder / name).read_text())) for name in names]
