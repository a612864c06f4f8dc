"""Read a checkpoint of any layout into Megatron-core chunks and their optimizer: on each rank the regions it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.dcp_reader import DcpReader, ReadRequest
from mindspeed_mm.checkpoint.megatron_optimizer import counts_steps, ensure_parameter_state, state_names
from mindspeed_mm.checkpoint.megatron_parts import Held, SourceRegion, Stepped
from mindspeed_mm.utils.log import notice


@torch.no_grad()
def read_tensors(
    reader: DcpReader, held: Sequence[Held], stepped: Mapping[nn.Parameter, Stepped], *, with_optimizer: bool
) -> None:
    """Fill parameters, copies in higher precision and the optimizer's state; what the checkpoint lacks stays as it is.

    Parameters are read one after the other: no more than one of them is in memory beside what is filled.
    """
    steps: dict[int, tuple[dict[str, Any], set[float]]] = {}
    for h in held:
        owned = stepped.get(h.param)
        wanted = [(f"model.{part.source}", part, h.param.data) for part in h.parts()]
        if owned is not None:
            parts = h.parts(owned.span)
            if owned.main.dtype != h.param.dtype:
                wanted += [(f"model.{part.source}", part, owned.main.data) for part in parts]
            if with_optimizer:
                ensure_parameter_state(owned)
                for name in state_names(owned.group):
                    wanted += [(f"optimizer.{part.source}.{name}", part, owned.state[name]) for part in parts]
        counted = h.made.sources if owned is not None and with_optimizer and counts_steps(owned.group) else ()
        counts = _read(reader, wanted, [f"optimizer.{source}.step" for source in counted])
        if owned is not None:
            steps.setdefault(id(owned.group), (owned.group, set()))[1].update(counts)
    for group, found in steps.values():
        if len(found) > 1:
            notice(
                f"checkpoint '{reader.directory}' holds parameters that took {min(found):g} to {max(found):g} steps; "
                "Megatron's optimizer counts those of a group together: the most are taken"
            )
        if found:
            group["step"] = int(max(found))


def _read(
    reader: DcpReader, wanted: Sequence[tuple[str, SourceRegion, torch.Tensor]], steps: Sequence[str]
) -> list[float]:
    """Read parts into the tensors that hold them; returns the values of the scalars `steps`."""
    requests, apart = [], []
    for key, part, tensor in wanted:
        if key not in reader.tensors:
            continue
        if len(part.pieces) == 1:
            out = part.value(tensor)
        else:  # not in one piece: through a tensor of its own
            out = torch.empty(part.sizes, dtype=reader.dtype(key))
            apart.append((part, tensor, out))
        requests.append(ReadRequest(key, part.region, out))
    scalars = [ReadRequest(key, (), torch.empty((), dtype=torch.float32)) for key in steps if key in reader.tensors]
    reader.read_into([*requests, *scalars])
    for part, tensor, out in apart:
        part.put(tensor, out)
    return [float(request.out) for request in scalars]
