"""The starting point of a run by --load: a run to resume, weights to start from, or neither."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.checkpoint.manifest import has_manifest, manifest_problems
from mindspeed_mm.checkpoint.pipeline_folder import is_pipeline
from mindspeed_mm.checkpoint.run_folder import (
    STATE,
    TRACKER,
    CheckpointStep,
    checkpoints,
    describe_older_format,
    find_checkpoint,
    has_checkpoint,
)
from mindspeed_mm.checkpoint.sources import has_weight_files, is_dcp, listing
from mindspeed_mm.configs.hf_directory import hub_advice
from mindspeed_mm.parallel.gather import GatherObjects
from mindspeed_mm.utils.errors import CheckpointError, did_you_mean
from mindspeed_mm.utils.files import is_same_path
from mindspeed_mm.utils.log import notice

PEFT_CONFIG = "adapter_config.json"
#: file of adapters that diffusers' pipelines load with `load_lora_weights`
OF_PIPELINE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Start:
    """The starting point of a run.

    Attributes:
        directory: a checkpoint folder or a HF directory; None: model.json names the weights.
        resumes: whether the training state is restored too: iteration, optimizer, position in the data.
        has_adapters: whether the checkpoint holds adapters only, and the base model's weights come from elsewhere.
        base: folder that their base model was loaded from; None: not known.
    """

    directory: Path | None = None
    resumes: bool = False
    has_adapters: bool = False
    base: str | None = None


def find_start(
    load: str | None, save: str | None = None, step: CheckpointStep | None = None, finetune: bool = False
) -> Start:
    """Return the starting point that `load` names.

    `load` may be a run folder (the tracker or `step` selects the checkpoint), a torch_dcp folder (`release/`,
    `iter_*`), or a HF directory of a model or a diffusers pipeline. "", None and the --save folder without a checkpoint
    select nothing, so that one command can both start a run and resume it.

    Args:
        load: --load.
        save: --save.
        step: --ckpt-step.
        finetune: --finetune: take the weights only.

    Raises:
        CheckpointError: the directory doesn't exist, or has no weights.
    """
    if not load:
        return Start()
    path, is_own = Path(load), bool(save) and is_same_path(load, str(save))
    if has_checkpoint(path) or (step is not None and checkpoints(path)):
        return _start(find_checkpoint(path, step).directory, finetune)
    if step is not None:
        raise CheckpointError(f"--ckpt-step {step}: --load '{load}' holds no checkpoint; it holds {listing(path)}")
    if is_own and (left := checkpoints(path)):  # killed between writing the first checkpoint and writing the tracker
        notice(f"--load '{load}' has no {TRACKER}; going on with '{left[0].directory}', the newest that looks whole")
        return _start(left[0].directory, finetune)
    if is_dcp(path):
        return _start(path, finetune)
    if is_peft(path):
        raise CheckpointError(
            f"--load '{load}' holds adapters only; give it as --lora-load, and the base model as --load, "
            "init_from_hf_path or from_pretrained"
        )
    if has_weight_files(path) or is_pipeline(path):
        return Start(path)
    if is_own:
        notice(
            f"--load '{load}' holds no checkpoint yet; starting at iteration 0, with the weights that model.json names "
            "or the model draws"
        )
        return Start()
    if not path.is_dir():
        raise CheckpointError(
            f"--load '{load}' does not exist; expected a run folder (the --save of an earlier run), a torch_dcp "
            "checkpoint, or a HF directory with *.safetensors; leave --load out to start from init_from_hf_path"
            + (hub_advice(load) or _nearest(path))
        )
    raise CheckpointError(
        f"--load '{load}' holds nothing to load: neither {TRACKER} (a run folder), nor .metadata (a torch_dcp "
        f"checkpoint), nor weight files (a HF directory); it holds {listing(path)}" + describe_older_format(path)
    )


def is_peft(directory: Path) -> bool:
    """Whether a folder holds adapters in PEFT's layout or in diffusers'."""
    return any((directory / name).is_file() for name in (PEFT_CONFIG, OF_PIPELINE))


def has_state(directory: Path) -> bool:
    """Whether a folder holds a training state of ours."""
    return (directory / STATE).is_file()


def _start(directory: Path, finetune: bool) -> Start:
    resumable = has_state(directory)
    if directory.name.startswith("iter_") and not resumable and not finetune:
        notice(
            f"'{directory}' holds no {STATE}: another program wrote it; its weights are taken, and training starts at "
            "iteration 0"
        )
    return Start(directory, resumes=resumable and directory.name != "release" and not finetune)


def _nearest(path: Path) -> str:
    """Return a hint with a similar name that exists, or ""."""
    names = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, names)


def refuse_damaged(directory: Path, rank: int, size: int, gather: GatherObjects, *, checksums: bool = True) -> None:
    """Check a checkpoint against its manifest; a collective in which each rank checks a part of the files.

    Args:
        gather: returns the values of all ranks, ordered by rank.
        checksums: read the files; False: check only their sizes.

    Raises:
        CheckpointError: on all ranks: the checkpoint is damaged; the message names an older one that is whole.
    """
    if not has_manifest(directory):
        if (directory / STATE).is_file():
            notice(f"'{directory}' has no manifest.json: it can't be verified")
        return
    problems = _problems(directory, rank, size, gather, checksums)
    if not problems:
        return
    more = f" ({len(problems)} problems in all)" if len(problems) > 1 else ""
    text = f"checkpoint '{directory}' is damaged: {problems[0]}{more}"
    for older in checkpoints(directory.parent):
        before = older.iteration is not None and older.directory.name < directory.name
        if before and has_manifest(older.directory) and not _problems(older.directory, rank, size, gather, checksums):
            raise CheckpointError(
                f"{text}; the one before, '{older.directory}', is whole: add --ckpt-step {older.iteration}"
            )
    raise CheckpointError(f"{text}; '{directory.parent}' holds no older one that is whole")


def _problems(directory: Path, rank: int, size: int, gather: GatherObjects, checksums: bool) -> list[str]:
    found: list[str] = []
    for part in gather(manifest_problems(directory, rank, size, checksums=checksums)):
        found += [p for p in part if p not in found]
    return found
