"""What a rank of the Megatron backend writes into a checkpoint, under the names that any layout reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from mindspeed_mm.checkpoint.megatron_optimizer import counts_steps, ensure_parameter_state, state_names
from mindspeed_mm.checkpoint.megatron_parts import FlatRange, Held, Shape, SourceRegion, Stepped
from mindspeed_mm.checkpoint.rng import random_state
from mindspeed_mm.checkpoint.snapshot import Stored
from mindspeed_mm.checkpoint.stored_pieces import StoredPieces, StoredRegion

_TRACKER = "tracker."


def checkpoint_tensors(
    mine: Iterable[tuple[Held, FlatRange]],
    stepped: Mapping[nn.Parameter, Stepped],
    shapes: Mapping[str, Shape],
    *,
    with_optimizer: bool,
) -> dict[str, Stored]:
    """This rank's pieces of the model's and the optimizer's tensors, by key.

    Args:
        mine: what this rank answers for.
        stepped: what the optimizer steps, by parameter; its state is made if no step has made it yet.
        shapes: of the whole tensors, by transformers' names.
    """
    pieces: dict[str, list[tuple[SourceRegion, torch.Tensor]]] = {}
    stored: dict[str, Stored] = {}
    for h, span in mine:
        owned, parts = stepped.get(h.param), h.parts(span)
        main = h.param.detach() if owned is None else owned.main.detach()
        for part in parts:
            pieces.setdefault(f"model.{part.source}", []).append((part, main))
        if owned is None or not with_optimizer:
            continue
        ensure_parameter_state(owned)
        for part in parts:
            prefix = f"optimizer.{part.source}."
            for name in state_names(owned.group):
                pieces.setdefault(prefix + name, []).append((part, owned.state[name]))
            # a tensor's first element is in one part, of one rank
            if counts_steps(owned.group) and not any(start for start, _ in part.region):
                stored[f"{prefix}step"] = torch.tensor(float(owned.group.get("step", 0)))
    for key, found in pieces.items():
        made = [StoredRegion(part.region, partial(part.value, tensor)) for part, tensor in found]
        stored[key] = StoredPieces(shapes[found[0][0].source], found[0][1].dtype, made)
    return stored


def model_parallel_random_state() -> dict[str, torch.Tensor]:
    """`random_state`, and the states that Megatron-core draws from inside of model-parallel regions."""
    tracked = get_cuda_rng_tracker().get_states()
    return {**random_state(), **{f"{_TRACKER}{name}": state for name, state in tracked.items()}}


def restore_tracked_states(saved: Mapping[str, torch.Tensor]) -> None:
    """Give Megatron-core the states that `model_parallel_random_state` had from it; without any, leave its own."""
    states = {name.removeprefix(_TRACKER): state for name, state in saved.items() if name.startswith(_TRACKER)}
    if states:
        get_cuda_rng_tracker().set_states(states)
