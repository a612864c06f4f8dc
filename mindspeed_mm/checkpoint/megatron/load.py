"""Read a checkpoint of any layout into Megatron-core chunks and their optimizer; each rank reads only its regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.dcp_reader import DcpReader, ReadRequest
from mindspeed_mm.checkpoint.megatron.optimizer import counts_steps, state_names
from mindspeed_mm.checkpoint.megatron.parts import LocalParameter, MainParameter, SourceRegion
from mindspeed_mm.optimizer.eight_bit_state import EightBitTensor
from mindspeed_mm.utils.log import notice


@torch.no_grad()
def read_tensors(
    reader: DcpReader,
    local: Sequence[LocalParameter],
    mains: Mapping[nn.Parameter, MainParameter],
    *,
    with_optimizer: bool,
) -> None:
    """Fill parameters, master weights and the optimizer's state; tensors missing in the checkpoint stay unchanged.

    Parameters are read one after the other, so that at most one of them is in memory in addition to the targets.
    """
    steps: dict[int, tuple[dict[str, Any], set[float]]] = {}
    for p in local:
        owned, decoded = mains.get(p.param), []
        wanted = [(f"model.{part.source}", part, p.param.data) for part in p.parts()]
        if owned is not None:
            parts = p.parts(owned.span)
            if owned.main.dtype != p.param.dtype:
                wanted += [(f"model.{part.source}", part, owned.main.data) for part in parts]
            if with_optimizer:
                for name in state_names(owned.group):
                    state = owned.state[name]
                    if isinstance(state, EightBitTensor):
                        decoded.append((state, state.values()))
                        state = decoded[-1][1]
                    wanted += [(f"optimizer.{part.source}.{name}", part, state) for part in parts]
        counted = p.mapping.sources if owned is not None and with_optimizer and counts_steps(owned.group) else ()
        counts = _read(reader, wanted, [f"optimizer.{source}.step" for source in counted])
        for state, values in decoded:
            state.put(values)
        if owned is not None:
            steps.setdefault(id(owned.group), (owned.group, set()))[1].update(counts)
    for group, found in steps.values():
        if len(found) > 1:
            notice(
                f"checkpoint '{reader.directory}' holds parameters that took {min(found):g} to {max(found):g} steps; "
                "Megatron's optimizer has one step count for each group, which is set to the largest"
            )
        if found:
            group["step"] = int(max(found))


def _read(
    reader: DcpReader, wanted: Sequence[tuple[str, SourceRegion, torch.Tensor]], steps: Sequence[str]
) -> list[float]:
    """Read parts into their tensors; returns the values of the scalars `steps`."""
    requests, copied = [], []
    for key, part, tensor in wanted:
        if key not in reader.tensors:
            continue
        if len(part.pieces) == 1:
            out = part.value(tensor)
        else:  # several pieces: read into a temporary tensor
            out = torch.empty(part.sizes, dtype=reader.dtype(key))
            copied.append((part, tensor, out))
        requests.append(ReadRequest(key, part.region, out))
    scalars = [ReadRequest(key, (), torch.empty((), dtype=torch.float32)) for key in steps if key in reader.tensors]
    reader.read_into([*requests, *scalars])
    for part, tensor, out in copied:
        part.put(tensor, out)
    return [float(request.out) for request in scalars]
