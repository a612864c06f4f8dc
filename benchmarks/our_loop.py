"""Our training loop, run by `training.train`, over prepared micro-batches; others have turns between its steps."""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class OurLoop:
    """A run that an entry script's callbacks and flags describe, ready to train.

    Attributes:
        run: its description.
        backend: with model and optimizer built.
    """

    def __init__(
        self,
        script: str,
        words: list[str],
        batches: list[dict[str, Any]],
        rows: int,
        adapter: Any = None,
        *,
        prepares: bool = False,
    ) -> None:
        """
        Args:
            script: entry script whose callbacks are used.
            words: of its command line.
            batches: collated micro-batches, gone through in a circle.
            rows: of each.
            adapter: knows the media in them.
            prepares: whether they are prepared once, and copied to a device ahead, as the loader does in a run.
        """
        from mindspeed_mm.configs.describe import describe
        from mindspeed_mm.data.loading.counting import CountingIterator
        from mindspeed_mm.data.loading.providers import RunData
        from mindspeed_mm.initialize import create_backend, prepare_process
        from mindspeed_mm.tasks.train.generation import SORA
        from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM

        recipe = {"pretrain_sora.py": SORA, "pretrain_vlm.py": VLM, "pretrain_transformers.py": TRANSFORMERS}[script]
        self.run = describe(words, recipe)
        prepare_process(self.run)
        self.backend = create_backend(self.run)
        self.backend.setup(self.run)
        source = endless(batches)
        if prepares and recipe.preparation is not None:
            source = prepared(batches, recipe.preparation(self.backend, self.run), adapter)
        self.backend.build_model(recipe.model_of(self.run), load_weights=True)
        self.backend.build_optimizer(self.backend.model, self.run)
        self._forward_step = recipe.forward_step
        self._data = RunData(CountingIterator(source, rows, adapter), None, None, None, lambda: None)

    def train(
        self,
        before_step: Callable[[int], bool],
        iteration: int = 0,
        after_step: Callable[[Any], object] = lambda pending: None,
    ) -> None:
        """Train by `training.train` until `before_step` says no.

        Args:
            before_step: called between steps on every rank, with the number of steps done; returns whether to go on.
            iteration: steps that the run is said to have made before; a run logs its first ten.
            after_step: called with the backend's `PendingStep` once a step has been launched.
        """
        from mindspeed_mm.monitor.profiling import MemorySnapshots
        from mindspeed_mm.training import Progress, train

        gc.freeze()  # as `pretrain` does before the first step; for whoever else trains in this process, too
        gc.enable()
        backend = _Watched(self.backend, before_step, after_step)
        memory = MemorySnapshots(self.run.tools.memory_profile, self.backend.world.batch.rank)
        with suppress(_Over), redirect_stdout(io.StringIO()):
            train(self._forward_step, self._data, backend, self.run, Progress(iteration), memory)  # type: ignore[arg-type]

    def blocks(self, steps: int, between: Callable[[list[float]], bool]) -> None:
        """Train in blocks.

        Args:
            steps: of a block.
            between: called after each with the seconds of its steps, from one step's begin to the next's; returns
                whether there is to be another.
        """
        times: list[float] = []
        started = 0.0

        def before_step(done: int) -> bool:
            nonlocal started
            if done:
                times.append(time.perf_counter() - started)
            goes_on = True
            if len(times) == steps:
                goes_on = between(times.copy())
                times.clear()
            started = time.perf_counter()
            return goes_on

        self.train(before_step)

    def alternate(
        self, steps: int, rounds: int, others: dict[str, Callable[[], list[float]]]
    ) -> dict[str, list[float]]:
        """Seconds of our steps ("ours") and of the others', `rounds` blocks each, in turn, after one that warms up."""
        times: dict[str, list[float]] = {"ours": [], **{name: [] for name in others}}
        done = 0

        def between(block: list[float]) -> bool:
            nonlocal done
            taken = {"ours": block, **{name: run() for name, run in others.items()}}
            for name, seconds in taken.items():
                times[name] += seconds if done else []
            done += 1
            return done <= rounds

        self.blocks(steps, between)
        return times


class _Over(Exception):
    """Nobody wants another step."""


class _Watched:
    """A backend that says when a step is about to begin: `forward_backward` is called once in each, on every rank; and
    when it has been launched."""

    def __init__(self, backend: Any, before_step: Callable[[int], bool], after_step: Callable[[Any], object]) -> None:
        self._backend, self._before_step, self._after_step, self._steps = backend, before_step, after_step, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward_backward(self, *args: Any) -> None:
        if not self._before_step(self._steps):
            raise _Over
        self._steps += 1
        self._backend.forward_backward(*args)

    def step(self, *args: Any) -> Any:
        pending = self._backend.step(*args)
        self._after_step(pending)
        return pending


def prepared(
    batches: list[dict[str, Any]], preparation: Callable[[dict[str, Any]], dict[str, Any]] | None, adapter: Any
) -> Iterator[dict[str, Any]]:
    """Cycle through micro-batches as a run's loader hands them out.

    They have been counted and prepared once, as its workers do; on a device they are in pinned memory, and one is
    copied while the one before it is used.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    from mindspeed_mm import accelerator
    from mindspeed_mm.data.loading.counting import COUNTS, HOST_FIELDS, counts_of
    from mindspeed_mm.data.loading.moving import moved_ahead

    made = []
    for batch in batches:
        counts, left = counts_of(batch, adapter), dict(batch)
        kept = {name: left.pop(name) for name in HOST_FIELDS if name in left}
        ready = left if preparation is None else preparation(left)
        made.append({**ready, **kept, COUNTS: counts})
    device = accelerator.current()
    if device.is_host:
        return endless(made)
    for batch in made:
        left = {key: value for key, value in batch.items() if key not in HOST_FIELDS}
        batch.update(tree_map_only(torch.Tensor, device.pinned, left))
    return moved_ahead(dict(batch) for batch in endless(made))


def endless(batches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Cycle through `batches`."""
    while True:
        yield from batches
