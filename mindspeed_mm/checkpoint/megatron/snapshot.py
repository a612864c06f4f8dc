"""The tensors that a rank of the Megatron backend writes into a checkpoint, under layout-independent names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from mindspeed_mm.checkpoint.megatron.optimizer import counts_steps, state_names
from mindspeed_mm.checkpoint.megatron.parts import FlatRange, LocalParameter, MainParameter, Shape, SourceRegion
from mindspeed_mm.checkpoint.rng import random_state
from mindspeed_mm.checkpoint.snapshot import Stored
from mindspeed_mm.checkpoint.stored_pieces import StoredPieces, StoredRegion
from mindspeed_mm.optimizer.eight_bit_state import EightBitTensor

_TRACKER = "tracker."


def checkpoint_tensors(
    mine: Iterable[tuple[LocalParameter, FlatRange]],
    mains: Mapping[nn.Parameter, MainParameter],
    shapes: Mapping[str, Shape],
    *,
    with_optimizer: bool,
) -> dict[str, Stored]:
    """Return this rank's pieces of the model's and the optimizer's tensors, by key.

    Args:
        mine: the ranges that this rank writes, from `to_write`.
        mains: what the optimizer steps, by parameter.
        shapes: shapes of the whole tensors, by transformers' names.
        with_optimizer: whether the optimizer's state is written.
    """
    pieces: dict[str, list[tuple[SourceRegion, torch.Tensor | EightBitTensor]]] = {}
    stored: dict[str, Stored] = {}
    for p, span in mine:
        owned, parts = mains.get(p.param), p.parts(span)
        main = p.param.detach() if owned is None else owned.main.detach()
        for part in parts:
            pieces.setdefault(f"model.{part.source}", []).append((part, main))
        if owned is None or not with_optimizer:
            continue
        for part in parts:
            prefix = f"optimizer.{part.source}."
            for name in state_names(owned.group):
                pieces.setdefault(prefix + name, []).append((part, owned.state[name]))
            # the first element of a tensor is in one part of one rank, which writes the step count
            if counts_steps(owned.group) and not any(start for start, _ in part.region):
                stored[f"{prefix}step"] = torch.tensor(float(owned.group.get("step", 0)))
    for key, found in pieces.items():
        regions = [StoredRegion(part.region, partial(_value, part, tensor)) for part, tensor in found]
        stored[key] = StoredPieces(shapes[found[0][0].source], found[0][1].dtype, regions)
    return stored


def _value(part: SourceRegion, tensor: torch.Tensor | EightBitTensor) -> torch.Tensor:
    return part.value(tensor if isinstance(tensor, torch.Tensor) else tensor.values())


def model_parallel_random_state() -> dict[str, torch.Tensor]:
    """Return `random_state` and Megatron-core's random states for model-parallel regions."""
    tracked = get_cuda_rng_tracker().get_states()
    return {**random_state(), **{f"{_TRACKER}{name}": state for name, state in tracked.items()}}


def restore_tracked_states(saved: Mapping[str, torch.Tensor]) -> None:
    """Restore Megatron-core's random states from `saved`; without any in it, they stay unchanged."""
    states = {name.removeprefix(_TRACKER): state for name, state in saved.items() if name.startswith(_TRACKER)}
    if states:
        get_cuda_rng_tracker().set_states(states)
