"""Chunked MLP: the MLP of a block runs on some tokens at a time, and so does its recompute in backward.

Only the intermediate activations of one part are alive at once. An MLP treats tokens one by one, so that its outputs
are those of all tokens together; the gradients of its weights are summed over the parts, in another order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.utils.errors import ConfigError


def apply_chunked_mlp(modules: Mapping[str, nn.Module], tokens: int, where: str, dim: int = -2) -> None:
    """Let each of `modules` run on parts of its input's tokens in training; `forward` is replaced.

    Args:
        modules: path → module that takes hidden states and treats each token by itself.
        tokens: of a part, over all rows.
        where: key or flag, for messages.
        dim: dimension of the input that is split.
    """
    for path, module in modules.items():
        module.forward = _chunked(module, module.forward, path, tokens, where, dim)  # type: ignore[method-assign]
        module._mm_recomputed = True  # type: ignore[assignment]


def _chunked(
    module: nn.Module, forward: Callable[..., Any], path: str, tokens: int, where: str, dim: int
) -> Callable[..., Any]:
    draws = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())

    @functools.wraps(forward)
    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(hidden, *args, **kwargs)
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if given or hidden.dim() < 2:
            raise ConfigError(
                f"{where}: '{path}' is called with a tensor of shape {list(hidden.shape)} and {len(given)} further "
                "ones; expected hidden states [..., tokens, size] alone; leave it out of chunk_mlp_modules"
            )
        size = max(1, tokens * hidden.shape[dim] // max(1, math.prod(hidden.shape[:-1])))
        if hidden.shape[dim] <= size:
            return forward(hidden, *args, **kwargs)
        call = functools.partial(forward, *args, **kwargs) if not args else lambda part: forward(part, *args, **kwargs)
        parts = hidden.split(size, dim)
        if torch.is_grad_enabled():
            outputs = [checkpoint(call, part, use_reentrant=False, preserve_rng_state=draws) for part in parts]
        else:
            outputs = [call(part) for part in parts]
        return _joined(outputs, parts, path, where, dim)

    return run


def _joined(outputs: list[Any], parts: tuple[torch.Tensor, ...], path: str, where: str, dim: int) -> Any:
    """Join what the parts return; a tensor that isn't of tokens, as a bias that the caller adds, is that of the first.

    Raises:
        ConfigError: nothing that is returned is of the parts' tokens.
    """
    leaves, spec = [], tree_flatten(outputs[0])[1]
    is_joined = False
    for values in zip(*(tree_flatten(output)[0] for output in outputs), strict=True):
        first = values[0]
        if isinstance(first, torch.Tensor) and first.shape[:-1] == parts[0].shape[:-1]:
            is_joined = True
            leaves.append(torch.cat(values, dim))
        else:
            leaves.append(first)
    if not is_joined:
        raise ConfigError(
            f"{where}: '{path}' returns no tensor of the shape {list(parts[0].shape[:-1])} + [size] of its input's "
            "tokens; leave it out of chunk_mlp_modules"
        )
    return tree_unflatten(leaves, spec)
