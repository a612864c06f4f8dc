"""Frozen weights in the dtype in which they compute: half the memory of float32, and no cast when they are gathered.

Values stay as they are: only what is stored in that dtype, or in a part of it, is kept in it. A weight that is stored
in a wider dtype stays in float32, so that checkpoints and exports write what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.parallel.units import is_sharded
from mindspeed_mm.utils.adapter_names import stored_name
from mindspeed_mm.utils.log import notice


@torch.no_grad()
def narrow_frozen(
    model: nn.Module,
    dtype: torch.dtype,
    stored: Mapping[str, torch.dtype],
    is_kept: Callable[[str], bool],
    where: str,
) -> None:
    """Replace frozen float32 parameters of a sharded model with uninitialised ones of `dtype`, before they are read.

    Trained parameters are unchanged: fully_shard requires one dtype of them in a unit, and of frozen ones none. It
    takes replaced parameters over in the first forward pass.

    Args:
        dtype: the dtype in which units compute, 16 bits.
        stored: name of a parameter → dtype of the values that will be read into it; parameters without one stay.
        is_kept: name of a parameter → whether it stays in float32 whatever the others do.
        where: what the values are read from, for the message.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    wide: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for own_name, param in module._parameters.items():
            name = stored_name(f"{path}.{own_name}" if path else own_name)
            if param is None or name not in stored or is_kept(name) or not _can_be_narrowed(param):
                continue
            if torch.promote_types(stored[name], dtype) != dtype:
                wide.append(name)
                continue
            if id(param) not in replaced:
                narrow = nn.Parameter(torch.empty_like(param, dtype=dtype), requires_grad=False)
                replaced[id(param)] = (param, narrow)  # keeps the old one alive, so that its id is not reused
            module._parameters[own_name] = replaced[id(param)][1]
    if wide:
        dtypes = ", ".join(sorted({str(stored[name]).removeprefix("torch.") for name in wide}))
        notice(
            f"frozen weights stay in float32, as '{where}' holds them in {dtypes}, which {str(dtype)[6:]} would round: "
            f"{wide[0]}{f' and {len(wide) - 1} more' if len(wide) > 1 else ''}",
            key=f"frozen in float32 {where}",
        )


def _can_be_narrowed(param: nn.Parameter) -> bool:
    """Whether a parameter is frozen, in float32, and gathered by fully_shard, which casts it to the compute dtype."""
    return (
        not param.requires_grad
        and param.dtype == torch.float32
        and is_sharded(param)
        and isinstance(param, DTensor)
        and type(param._local_tensor) is torch.Tensor
    )
