"""Run an entry script with compiled blocks in workers, and keep what torch.compile did."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention.jit_cpu import JITCPUAttention
from tests.support.captured import run_captured
from tests.support.launch import run_entry


@dataclass(frozen=True)
class Compiled:
    """What one rank compiled.

    Attributes:
        graphs: number of graphs.
        breaks: number of places where one ends, by reason.
        hits, misses: graphs whose kernels inductor's cache had, and had not.
        has_jit_attention: whether attention was computed by the kernel that is compiled for the host.
    """

    graphs: int
    breaks: dict[str, int]
    hits: int
    misses: int
    has_jit_attention: bool = False


@contextmanager
def counting() -> Iterator[Callable[[], Compiled]]:
    """Context that begins with an empty cache of functions; what it gives says what was compiled in it so far."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    try:
        yield lambda: Compiled(
            counters["stats"]["unique_graphs"],
            dict(counters["graph_break"]),
            counters["inductor"]["fxgraph_cache_hit"],
            counters["inductor"]["fxgraph_cache_miss"],
        )
    finally:
        torch._dynamo.reset()


def run_compiled(words: list[str], script: str, folder: Path, steps: int) -> list[float]:
    """As `run_captured`, from an empty cache of functions; each rank's `Compiled` is left in `folder`."""
    with counting() as compiled:
        sums = run_captured(words, script, folder, steps)
        rank = torch.distributed.get_rank()
        kernel = accelerator.current().attention_kernel(torch.empty(1), torch.empty(1))
        found = replace(compiled(), has_jit_attention=isinstance(kernel, JITCPUAttention))
        (folder / f"compiled{rank}.json").write_text(json.dumps(asdict(found)))
    return sums


def run_entry_compiled(words: list[str], script: str = "pretrain_transformers.py") -> int:
    """As `run_entry`, from an empty cache of functions; returns the number of graphs."""
    with counting() as compiled:
        run_entry(words, script)
        return compiled().graphs


def compiled_by(folder: Path) -> list[Compiled]:
    """What each rank of a run compiled."""
    names = sorted(name for name in os.listdir(folder) if name.startswith("compiled"))
    return [Compiled(**json.loads((folder / name).read_text())) for name in names]
