"""The profiler and memory snapshots of tools.json, on any device."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch

from mindspeed_mm import accelerator
from mindspeed_mm.configs.tools_config import MemoryProfile, Profile
from mindspeed_mm.monitor.dynamic_profile import DynamicProfiler
from mindspeed_mm.utils.log import logger, notice


class StepProfiler:
    """torch's profiler over the steps [start_step, end_step) of the ranks that tools.json names, or over those that
    profiler_config.json asks for while the run goes on.

    Writes a chrome trace per rank into `save_path`.
    """

    def __init__(self, options: Profile, rank: int, step: int = 0) -> None:
        """
        Args:
            options: `ToolsConfig.profile`.
            rank: rank of this process.
            step: steps that the run has made.
        """
        self._profiler: torch.profiler.profile | DynamicProfiler | None = None
        if not options.enable or not (rank in options.ranks or -1 in options.ranks):
            return
        if options.profile_type == "dynamic":
            self._profiler = DynamicProfiler(options.dynamic_param, rank, step)
            return
        static = options.static_param
        folder = Path(static.save_path)
        folder.mkdir(parents=True, exist_ok=True)

        def write(profiler: torch.profiler.profile) -> None:
            path = folder / f"trace_rank{rank:05d}_step{static.start_step}.json"
            profiler.export_chrome_trace(str(path))
            logger.info(f"profile written to {path}")

        self._profiler = torch.profiler.profile(
            activities=accelerator.current().activities(),
            schedule=torch.profiler.schedule(
                wait=0, warmup=0, active=static.end_step - static.start_step, repeat=1, skip_first=static.start_step
            ),
            on_trace_ready=write,
            record_shapes=static.record_shapes,
            profile_memory=static.with_memory,
            with_stack=static.with_stack,
        )

    def start(self) -> None:
        """Start before the first step."""
        if isinstance(self._profiler, torch.profiler.profile):
            self._profiler.start()

    def step(self) -> None:
        """Advance after a step."""
        if self._profiler is not None:
            self._profiler.step()

    def stop(self) -> None:
        """Stop at the end of the run."""
        if self._profiler is not None:
            self._profiler.stop()


class MemorySnapshots:
    """Records device allocations between two steps and dumps them for pytorch.org/memory_viz.

    On the host there is no allocator history to record.
    """

    def __init__(self, options: MemoryProfile, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._step = 0
        self._on = bool(options.enable) and (rank in options.dump_ranks or -1 in options.dump_ranks)
        if self._on and accelerator.current().is_host:
            notice("tools.json: memory_profile has no effect on CPU: there is no device allocator to record")
            self._on = False

    def step(self) -> None:
        """Record or dump, once before the model is built (step 0) and after every step."""
        options = self._options
        if self._on and self._step == options.start_step:
            accelerator.current().record_memory_history(options.stacks, options.max_entries)
        if self._on and self._step == options.end_step:
            folder = Path(options.save_path)
            folder.mkdir(parents=True, exist_ok=True)
            stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M")
            accelerator.current().dump_memory_snapshot(str(folder / f"snapshot_{stamp}_{self._rank}.pickle"))
        if options.enable and options.mem_info and not accelerator.current().is_host:
            logger.info(
                f"[rank {self._rank}] step {self._step} peak memory (MB): "
                f"{accelerator.current().max_memory_allocated() / 2**20:.0f}"
            )
        self._step += 1
