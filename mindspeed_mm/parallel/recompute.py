"""Activation recompute by module path.

The module's own `forward` is replaced by a checkpointed one, so module names (and with them state-dict keys) stay
those of the unmodified model, and FSDP's hooks stay outside: gather once, run, free; in backward gather, run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.utils.log import notice


def apply_recompute(modules: Mapping[str, nn.Module], use_reentrant: bool) -> None:
    """Make each of `modules` drop its activations in forward and recompute them in backward.

    Args:
        modules: path → module, for example from `expand_patterns`.
        use_reentrant: which of torch's two checkpoint implementations to use. The reentrant one gives a block no
            gradient at all if none of its inputs needs one (a frozen embedding below it); such a call is run
            non-reentrant, with one notice.
    """
    for path, module in modules.items():
        if getattr(module, "_mm_recomputed", False):
            continue
        module.forward = _recomputed(module, module.forward, use_reentrant, path)  # type: ignore[method-assign]
        module._mm_recomputed = True  # type: ignore[assignment]


def _recomputed(module: nn.Module, forward: Callable[..., Any], use_reentrant: bool, path: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        reentrant = use_reentrant
        if reentrant and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            if any(p.requires_grad for p in module.parameters()):
                notice(
                    f"use_reentrant: true would give '{path}' and its like no gradient, as none of their inputs "
                    "needs one "
                    "(a frozen module below them): they are recomputed with use_reentrant: false",
                    key=f"reentrant {type(module).__name__}",
                )
            reentrant = False
        if not reentrant:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        # the reentrant implementation takes positional tensors only: pass the flat leaves
        def from_leaves(*flat: Any) -> Any:
            inner_args, inner_kwargs = tree_unflatten(flat, spec)
            return forward(*inner_args, **inner_kwargs)

        return checkpoint(from_leaves, *leaves, use_reentrant=True)

    return run
