"""Profiles that a file switches on and off while a run goes on, as torch_npu's dynamic_profile does, on any device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm import accelerator
from mindspeed_mm.configs.tools_config import DynamicProfile, ProfilerFile
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import logger, notice

NAME = "profiler_config.json"
_POLL_SECONDS = 1.0


class DynamicProfiler:
    """Looks at profiler_config.json after steps, at most once a second, and profiles what a changed file asks for.

    A file that can't be read is an error in the log, and the run goes on. Every rank reads the file for itself;
    `start_step` lets all begin with the same step.
    """

    def __init__(self, options: DynamicProfile, rank: int, step: int) -> None:
        """
        Args:
            options: `profile.dynamic_param` of tools.json.
            rank: rank of this process; the first one writes a file with all keys, if there is none.
            step: steps that the run has made.
        """
        self._file = Path(options.config_path or ".") / NAME
        self._rank, self._step = rank, step
        if rank == 0 and not self._file.exists():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(ProfilerFile().model_dump(), indent=4) + "\n", encoding="utf-8")
        self._seen, self._looked = self._written(), time.monotonic()
        self._waiting: ProfilerFile | None = None
        self._profiler: torch.profiler.profile | None = None
        self._left = 0  # steps of the profile that runs

    def step(self) -> None:
        """Advance after a step: end a profile that has all its steps, or begin one with the next step."""
        self._step += 1
        if self._profiler is not None:
            self._profiler.step()
            self._left -= 1
            if self._left == 0:
                self.stop()
        if time.monotonic() - self._looked >= _POLL_SECONDS:
            self._look()
        wanted = self._waiting
        if wanted is not None and self._profiler is None and self._step + 1 >= wanted.start_step:
            self._waiting = None
            self._begin(wanted)

    def stop(self) -> None:
        """End the profile that runs, if one does, and write what it has."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _look(self) -> None:
        self._looked = time.monotonic()
        written = self._written()
        if written is None or written == self._seen:
            return
        self._seen = written
        try:
            wanted = ProfilerFile.from_dict(json.loads(self._file.read_text(encoding="utf-8")), str(self._file))
        except (OSError, ValueError, ConfigError) as error:
            logger.error(f"{self._file} has changed and can't be used, nothing is profiled: {error}")
            return
        if wanted.active == 0:
            self._waiting = None
            self.stop()
            return
        if wanted.is_rank and self._rank not in wanted.rank_list:
            return
        if wanted.start_step and wanted.start_step <= self._step:
            notice(f"{self._file}: start_step {wanted.start_step} is over (step {self._step}); it begins at once")
        self._waiting = wanted

    def _begin(self, wanted: ProfilerFile) -> None:
        folder, first = Path(wanted.prof_dir), self._step + 1
        folder.mkdir(parents=True, exist_ok=True)

        def write(profiler: torch.profiler.profile) -> None:
            path = folder / f"trace_rank{self._rank:05d}_step{first}.json"
            profiler.export_chrome_trace(str(path))
            logger.info(f"profile written to {path}")

        host = torch.profiler.ProfilerActivity.CPU
        known: list[Any] = accelerator.current().activities()
        of_device = [activity for activity in known if activity is not host]
        activities = [host] * ("CPU" in wanted.activities) + of_device * (set(wanted.activities) != {"CPU"})
        self._profiler = torch.profiler.profile(
            activities=activities or known,
            schedule=torch.profiler.schedule(wait=0, warmup=wanted.warmup, active=wanted.active, repeat=1),
            on_trace_ready=write,
            record_shapes=wanted.record_shapes,
            profile_memory=wanted.profile_memory,
            with_stack=wanted.with_stack,
            with_flops=wanted.with_flops,
            with_modules=wanted.with_modules,
        )
        self._left = wanted.warmup + wanted.active
        self._profiler.start()

    def _written(self) -> int | None:
        """When the file was written last; None: it isn't there."""
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return None
