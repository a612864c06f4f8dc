"""The progress of a run, and the checkpoint from which it goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_mm.backends.protocol import Backend
from mindspeed_mm.checkpoint.adapter_files import holds_only_adapters
from mindspeed_mm.checkpoint.adapters import base_of, refuse_other_kind
from mindspeed_mm.checkpoint.agreement import on_first_rank
from mindspeed_mm.checkpoint.attempts import is_own
from mindspeed_mm.checkpoint.changes import report_changes, run_settings
from mindspeed_mm.checkpoint.dcp import read_state
from mindspeed_mm.checkpoint.earlier_run import paths_of, prepare_run_folder
from mindspeed_mm.checkpoint.run_folder import find_checkpoint, has_checkpoint
from mindspeed_mm.checkpoint.start import Start, find_start, has_state, refuse_damaged
from mindspeed_mm.configs.global_args import report_progress
from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.improvement import Improvement
from mindspeed_mm.utils.log import info_rank0


@dataclass
class Progress:
    """Progress of a run: the counters that change while it trains.

    Attributes:
        iteration: number of optimizer steps so far, skipped ones included.
        consumed_samples: `iteration` times --global-batch-size: the position in the data's global order.
        consumed_tokens: number of tokens in these samples.
        last_saved: iteration of the last checkpoint.
        changed: settings that differ from those of the checkpoint that the run resumes from, as sentences.
        improvement: how the evaluations have gone, by the figure of --save-best or --early-stop; None: neither is given
        data_state: state of the data loader in the checkpoint that the run resumes from; None: the data starts at the
            beginning.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    last_saved: int = -1
    data_state: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()
    improvement: Improvement | None = None

    def stopped_early(self, run: Run, worse: int = 0) -> bool:
        """Whether --early-stop has ended the run, or does so after `worse` further evaluations without improvement."""
        return self.improvement is not None and self.improvement.ends(run.length.early_stop, worse)

    def is_over(self, run: Run) -> bool:
        """Whether the run has done all its steps, or --early-stop has ended it."""
        return self.iteration >= run.train_iters or self.stopped_early(run)


def resume_point(run: Run, backend: Backend) -> tuple[Start, Progress]:
    """Find the checkpoint or weights of --load to start from; without any, model.json names the weights.

    Also make sure that the --save folder has no files of another run, unless this run resumes that one.
    """
    start = find_start(run.checkpoint.load, run.checkpoint.save, run.checkpoint.ckpt_step, run.checkpoint.finetune)
    if run.checkpoint.save:
        files = {f"{n}.json": getattr(run.files, n).to_dict() for n in ("model", "data") if hasattr(run.files, n)}
        prepare = partial(
            prepare_run_folder,
            run.checkpoint.save,
            run.checkpoint.load,
            start,
            finetune=run.checkpoint.finetune,
            overwrite=run.checkpoint.overwrite,
            is_own=is_own(run.checkpoint.save, run.launch.restarts),
            reads=paths_of(files) if run.checkpoint.overwrite else {},
        )
        on_first_rank(prepare, run.launch.rank, backend.gather_objects)
    if start.directory is not None:
        refuse_damaged(
            start.directory,
            run.launch.rank,
            run.launch.world_size,
            backend.gather_objects,
            checksums=not run.checkpoint.no_verify_checkpoint,
        )
    progress, improvement, changed = Progress(), None, []
    saved = read_state(start.directory) if start.directory is not None and has_state(start.directory) else {}
    if start.directory is not None:
        refuse_other_kind(saved, run.lora, start.directory, start.resumes)
        start = replace(start, has_adapters=saved.get("lora") is not None)
    if run.lora is not None:
        start = replace(start, base=base_of(saved, run.lora, start))
    if start.resumes and start.directory is not None:
        progress.iteration = int(saved["iteration"])
        progress.consumed_samples = int(saved["consumed_samples"])
        progress.consumed_tokens = int(saved.get("consumed_tokens", 0))
        progress.last_saved = progress.iteration
        progress.data_state = saved.get("data")
        improvement = saved.get("improvement")
        changed = report_changes(saved.get("settings", {}), run_settings(run))
    progress.improvement = Improvement.of(run, improvement)
    progress.changed = tuple(changed)
    report_progress(iteration=progress.iteration, consumed_train_samples=progress.consumed_samples)
    return start, progress


def with_adapters_of_load(run: Run) -> Run:
    """Return the run with adapters that --load names as those of --lora-load, where another program wrote them.

    Published launches load a torch_dcp folder of adapters by --load, and the base model by --load-base-model.
    """
    load = Path(run.checkpoint.load or "")
    if run.lora is None or run.lora.start is not None or not load.is_dir():
        return run
    folder = find_checkpoint(load).directory if has_checkpoint(load) else load
    if has_state(folder) or not holds_only_adapters(folder):
        return run
    info_rank0(f"--load '{folder}' holds adapters only; training starts from them")
    checkpoint = replace(run.checkpoint, load=None)
    return replace(run, lora=replace(run.lora, start=str(folder)), checkpoint=checkpoint)


def load_start(start: Start, progress: Progress, backend: Backend, run: Run) -> None:
    """Load the state or the weights of the checkpoint that `resume_point` found."""
    if start.has_adapters and not start.resumes:
        backend.load(start.directory, optimizer=False, rng=False, schedule=False)
    elif start.resumes:
        backend.load(
            start.directory,
            optimizer=not run.checkpoint.no_load_optim,
            rng=not run.checkpoint.no_load_rng,
            schedule=True,  # the iteration continues, and the learning rate follows it
        )
        info_rank0(f"loaded {start.directory}; continuing after iteration {progress.iteration}")
    else:
        backend.load_weights(start.directory)
