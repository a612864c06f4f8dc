"""Write a sharded model as a HF directory in the hub's layout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.models.transformers.twin import type_without_fsdp
from mindspeed_mm.parallel.state import ParallelState
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.files import fsync_tree
from mindspeed_mm.utils.log import info_rank0

# what a HF directory holds beside weights and the files that save_pretrained writes itself
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def export(
    model: nn.Module, directory: Path, source: str | None, state: ParallelState, dtype: torch.dtype | None
) -> None:
    """Gather `model` to rank 0 and write it to `directory`, with the source's tokenizer, processor and templates.

    Args:
        model: a transformers model, sharded or not; all ranks call.
        source: the HF directory that the model was built from; its small files are copied.
        dtype: of the written weights; None: as trained.
    """
    hf_class = type_without_fsdp(model)
    if not hasattr(hf_class, "save_pretrained"):
        raise ConfigError(
            f"--save-hf: {hf_class.__name__} is no transformers model, so it has no hub layout to be written in"
        )
    weights = _gather(model, state.rank == 0, dtype)
    if state.rank == 0:
        working = directory.with_name(f".{directory.name}.saving")
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        _write(hf_class, model.config, weights, working, dtype)
        if source is not None:
            _copy_small_files(Path(source), working)
        fsync_tree(working)
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(working, directory)
        info_rank0(f"exported to {directory} (loads with from_pretrained)")
    dist.barrier()


def _gather(model: nn.Module, keep: bool, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole = whole.detach().to("cpu")
            weights[name] = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
    return weights


def _write(
    hf_class: Any, config: Any, weights: dict[str, torch.Tensor], directory: Path, dtype: torch.dtype | None
) -> None:
    with torch.device("meta"):
        twin = hf_class._from_config(config, dtype=dtype or torch.float32)
    for tied in getattr(twin, "all_tied_weights_keys", None) or {}:
        weights.pop(tied, None)
    # torch's fork-safe file writer of transformers logs nothing; shards of 5 GB are what hub checkpoints have
    twin.save_pretrained(directory, state_dict=weights, max_shard_size="5GB")


def _copy_small_files(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_NOT_COPIED) and path.name != "config.json":
            shutil.copy2(path, target / path.name)
