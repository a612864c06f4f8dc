"""Patches for megatron-core, whatever the device: its optimizers, and what it lacks without Transformer Engine.

Separate from the CPU adaptor, as a CUDA machine without these two libraries needs them as well.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def apply_compatibility() -> None:
    """Patch megatron-core 0.16 for a process without Transformer Engine, once; with it nothing is done."""
    # megatron's modules each warn that the two libraries are missing, which is expected here
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if not has_transformer_engine():
        _apply()


@functools.cache
def _apply() -> None:
    from megatron.core import jit
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # torch.compile of small fusions: needs a C++ toolchain, warms up for seconds, and our specs use none of them
    jit.jit_fuser = lambda function: function
    # the router refers to it even where its import failed (NameError)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # split sizes become numbers only `if tensor.is_cuda`; c10d needs numbers everywhere
    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = _as_numbers


def use_optimizers(adam: type[torch.optim.Optimizer], sgd: Callable[..., torch.optim.Optimizer]) -> None:
    """Let megatron-core build these optimizers, whatever it found installed.

    With torch.optim's Adam the distributed optimizer can't be saved or resumed (distrib_optimizer.py: an assert on
    `step`, a missing key, an operation in place on a leaf).

    Args:
        adam: of Apex's surface.
        sgd: takes parameter groups, `lr`, `weight_decay` and `momentum`.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.SGD, optimizer.USING_PYTORCH_OPTIMIZER = adam, sgd, False
    distrib_optimizer.Adam = adam
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
        distributed: Any = distrib_optimizer.DistributedOptimizer
        distributed._set_main_param_and_optimizer_states = torch.no_grad()(
            distributed._set_main_param_and_optimizer_states
        )


def _as_numbers(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) and as_numpy else tensor
