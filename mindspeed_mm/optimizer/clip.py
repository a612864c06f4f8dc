"""Gradient norm of parameters on any mixture of meshes, with one reduction shared with the step's other sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from mindspeed_mm.utils.wrapped import unwrapped


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, outside of autograd, or the tensor itself."""
    # not to_local(), which would launch a view of it
    return unwrapped(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def number_of_copies(tensor: torch.Tensor, world_size: int) -> int:
    """Return how many of the `world_size` ranks have the same part of `tensor`.

    Raises:
        ValueError: the tensor has a Partial placement.
    """
    if not isinstance(tensor, DTensor):
        return world_size
    different = 1
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"ranks hold parts of a sum, {placement}: reduce it first")
        # Not `is_shard()`: it is False for the strided shards that fully_shard creates of tensor-parallel parameters.
        if not isinstance(placement, Replicate):
            different *= tensor.device_mesh.size(dim)
    return world_size // different


@torch.no_grad()
def local_squared_norm(
    parameters: Iterable[nn.Parameter], copies: Iterable[int], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return this rank's contribution to the squared L2 norm of all gradients.

    The sum of the contributions over all ranks is the squared norm of the whole gradients: the contribution of a
    replicated part is divided by its number of copies. So one reduction suffices for plain parameters and for those
    that are sharded over different meshes.

    Args:
        copies: `number_of_copies` of each parameter.

    Returns:
        a scalar of `dtype`, or None if no parameter has a gradient.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for param, number in zip(parameters, copies, strict=True):
        if param.grad is not None:
            part = local_tensor(param.grad)
            if part.numel():
                by_copies.setdefault(number, []).append(part)
    total: torch.Tensor | None = None
    for number, parts in by_copies.items():
        norms = torch.stack(torch._foreach_norm(parts, 2.0, dtype=torch.float32)).to(dtype)
        contribution = norms.square().sum() / number
        total = contribution if total is None else total + contribution
    return total


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by `factor` in place."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            part = local_tensor(param.grad)
            by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        if isinstance(factor, torch.Tensor):
            factor = factor.to(device)
        torch._foreach_mul_(parts, factor)


@torch.no_grad()
def sum_plain_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of parameters outside of FSDP (trained modules that it ignores) over `group`.

    A rank without a gradient for such a parameter adds zeros.
    """
    plain = [p for p in parameters if p.requires_grad and not (isinstance(p, DTensor) and p.device_mesh.size() > 1)]
    if not plain:
        return
    for param in plain:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    gradients = [local_tensor(p.grad) for p in plain if p.grad is not None]
    flat = torch.cat([g.flatten().float() for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips gradients of norm `norm` to `max_norm`; 1 if `max_norm` is 0.

    Source: torch.nn.utils.clip_grad_norm_, including its 1e-6.
    """
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def all_parameters(groups: Sequence[dict]) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's groups, in order."""
    return [p for group in groups for p in group["params"]]
