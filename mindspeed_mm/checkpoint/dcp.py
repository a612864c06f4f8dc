"""A training state in torch's distributed checkpoint format, with everything that is no tensor beside it as JSON.

Layout of a folder: `.metadata` and `*.distcp` (model and optimizer tensors, by parameter name), `state.json`
(iteration, consumed samples, schedule …), `rng_00000.safetensors` (random states, one file a rank).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from mindspeed_mm.checkpoint.rng import random_state, restore_random_state
from mindspeed_mm.checkpoint.tensors import model_tensors, optimizer_tensors
from mindspeed_mm.parallel.state import ParallelState
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.files import fsync_path, write_json

_FORMAT = 1


def save(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    save_rng: bool,
    state: ParallelState,
) -> None:
    """Write this rank's part into `directory`; all ranks together.

    Args:
        model: names of its parameters are the keys.
        optimizer: None: not saved.
        extra: JSON values, returned by `load`.
    """
    import torch.distributed.checkpoint as dcp

    tensors = model_tensors(model)
    if optimizer is not None:
        tensors |= optimizer_tensors(model, optimizer)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(directory, sync_files=True))
    if save_rng:
        path = directory / f"rng_{state.rank:05d}.safetensors"
        save_file(random_state(), path)
        fsync_path(path)
    if state.rank == 0:
        content = {"format": _FORMAT, "world_size": state.world_size, "has_optimizer": optimizer is not None, **extra}
        write_json(directory / "state.json", content)


def load(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    load_rng: bool,
    state: ParallelState,
) -> dict[str, Any]:
    """Read into the tensors of `model` and `optimizer`, whatever layout wrote them; returns `extra`.

    Raises:
        CheckpointError: a file or a tensor is missing, or shapes differ.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    extra = read_state(directory)
    tensors = model_tensors(model)
    if optimizer is not None:
        if not extra.get("has_optimizer", True):
            raise CheckpointError(
                f"checkpoint '{directory}' was saved with --no-save-optim; add --no-load-optim to start from its "
                "weights"
            )
        tensors |= optimizer_tensors(model, optimizer)
    try:
        with torch.no_grad():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(directory))
    except (CheckpointException, RuntimeError, ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"checkpoint '{directory}' does not fit this model: {_first_line(error)}") from error
    if load_rng:
        restore_random_state(directory, state, int(extra.get("world_size", state.world_size)))
    return extra


def read_state(directory: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint folder."""
    path = directory / "state.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' can't be read ({error}); the checkpoint is not whole") from error


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
