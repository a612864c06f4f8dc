"""Load a training state from torch's distributed checkpoint format; values that are no tensors are in JSON files.

Layout of a folder: `.metadata` and `*.distcp` (tensors of model, optimizer and averages, by parameter name),
`state.json` (iteration, consumed samples, schedule …), `rng_00000.safetensors` (random states, one file a rank).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.dcp_reader import DcpReader, ReadRequest
from mindspeed_mm.checkpoint.rng import restore_random_state
from mindspeed_mm.checkpoint.sources import shown
from mindspeed_mm.checkpoint.tensors import local_part, model_tensors, optimizer_tensors
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.optimizer.build import BuiltOptimizer
from mindspeed_mm.optimizer.eight_bit_state import EightBitTensor
from mindspeed_mm.optimizer.ema import Ema
from mindspeed_mm.parallel.frozen import narrow_frozen
from mindspeed_mm.parallel.world import World
from mindspeed_mm.utils.adapter_names import is_adapter
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.log import notice


def load(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: BuiltOptimizer | None,
    load_rng: bool,
    world: World,
    strict: bool = True,
    ema: Ema | None = None,
    frozen: torch.dtype | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of any layout into `model`, `optimizer` and `ema`; returns `extra`.

    Args:
        directory: the checkpoint folder.
        optimizer: None: its state is not loaded.
        load_rng: restore the random states.
        strict: raise if a tensor is missing or left over.
        ema: averages of the weights; those that the checkpoint lacks start with its weights.
        frozen: the dtype that frozen weights are kept in if it holds their values; see `narrow_frozen`. None: float32.

    Raises:
        CheckpointError: a file is missing, shapes differ, or with `strict` a tensor is missing or left over; nothing
            has been changed then.
    """
    extra = read_state(directory, with_optimizer=optimizer is not None)
    reader = DcpReader(directory)
    wanted: dict[str, torch.Tensor | EightBitTensor] = dict(model_tensors(model))
    if optimizer is not None:
        wanted |= optimizer_tensors(model, optimizer)
    averages = ema.tensors() if ema is not None and extra.get("ema") else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in (wanted | averages).items()}
    refuse_state_misfits(
        reader, shapes, with_optimizer=optimizer is not None, with_averages=ema is not None, strict=strict
    )
    if frozen is not None:
        stored = {name.removeprefix("model."): reader.dtype(name) for name in reader.tensors if name in wanted}
        narrow_frozen(model, frozen, stored, as_trainable(model).keeps_in_float32(frozen), str(directory))
        wanted |= model_tensors(model)
    _read(reader, wanted)
    if ema is not None:
        ema.restart()  # averages that the checkpoint lacks start with its weights
        _read(reader, averages)
    if ema is not None and averages:
        ema.load_state_dict(extra["ema"])
    elif ema is not None:
        notice(f"checkpoint '{directory}' holds no averaged weights; the average starts with its weights")
    if load_rng:
        restore_random_state(directory, world, extra)
    return extra


def _read(reader: DcpReader, wanted: Mapping[str, torch.Tensor | EightBitTensor]) -> None:
    requests = []
    for name, tensor in wanted.items():
        if name not in reader.tensors:
            continue
        if isinstance(tensor, EightBitTensor):  # one at a time: all of them decoded may not fit
            part, region = local_part(tensor.param)
            values = torch.empty(part.shape, dtype=torch.float32)
            reader.read_into([ReadRequest(name, region, values)])
            tensor.put(values)
        else:
            local, region = local_part(tensor)
            requests.append(ReadRequest(name, region, local))
    reader.read_into(requests)


def refuse_state_misfits(
    reader: DcpReader,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    with_optimizer: bool,
    strict: bool,
    with_averages: bool = False,
) -> None:
    """Raise an error, or without `strict` log a notice, if the tensors of a checkpoint and a run don't match.

    Args:
        wanted: key → whole shape of each tensor of the run.
        with_optimizer: whether the optimizer's tensors are read.
        strict: raise if a tensor is missing or left over.
        with_averages: whether the run has averages of the weights; without them, those of the checkpoint are ignored,
            with a notice.

    Raises:
        CheckpointError: a shape differs; or with `strict`, a tensor is missing or left over.
    """
    where = f"checkpoint '{reader.directory}'"
    for name, shape in wanted.items():
        if name in reader.tensors and reader.shape(name) != shape:
            raise CheckpointError(
                f"{where} does not fit this model: {name} has shape {reader.shape(name)}, the model's is "
                f"{shape}; is it another model, or another config.json?"
            )
    if not with_averages and any(name.startswith("ema.") for name in reader.tensors):
        notice(f"{where} holds averaged weights (--ema-decay), which this run doesn't go on with")
    kinds = ("model.", *(("optimizer.",) if with_optimizer else ()), *(("ema.",) if with_averages else ()))
    missing = [n for n in wanted if n not in reader.tensors]
    unexpected = [n for n in reader.tensors if n.startswith(kinds) and n not in wanted]
    misfits = []
    if missing:
        misfits.append(f"lacks {len(missing)} tensors of this run: {shown(missing)}")
    if unexpected:
        misfits.append(f"holds {len(unexpected)} that this run has no place for: {shown(unexpected)}")
    if not misfits:
        return
    text = f"{where} " + " and ".join(misfits)
    if strict:
        raise CheckpointError(f"{text}; {_advice([*missing, *unexpected])}")
    notice(text, key=f"misfits {reader.directory}")


def _advice(misfits: Sequence[str]) -> str:
    """Return advice for tensors that are missing or left over."""
    if all(map(is_adapter, misfits)):
        return "other layers have adapters than before; --lora-target-modules must name those that it was trained with"
    if all(name.startswith("ema.") for name in misfits):
        return "other parts are frozen than before; add --no-strict-load to let their averages start with the weights"
    if all(name.startswith(("optimizer.", "ema.")) for name in misfits):
        return "other parts are frozen, or the optimizer is another one; add --no-load-optim to go on without its state"
    return "is it another model? Add --no-strict-load to go on all the same"


def read_state(directory: Path, *, with_optimizer: bool = False) -> dict[str, Any]:
    """Read state.json of a checkpoint folder.

    Args:
        with_optimizer: the optimizer's state is needed too.

    Raises:
        CheckpointError: it can't be read, or the checkpoint has no optimizer.
    """
    path = directory / "state.json"
    try:
        extra = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' can't be read ({error}); the checkpoint is not whole") from error
    if with_optimizer and not extra.get("has_optimizer", True):
        raise CheckpointError(
            f"checkpoint '{directory}' was saved with --no-save-optim; add --no-load-optim to start from its weights"
        )
    return extra
