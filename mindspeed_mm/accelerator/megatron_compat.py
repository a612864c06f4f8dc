"""Patches for megatron-core where Transformer Engine and Apex are not installed, whatever the device.

Separate from the CPU adaptor, as a CUDA machine without these two libraries needs them as well.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterable
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
    from megatron.core import jit, optimizer
    from megatron.core.optimizer import distrib_optimizer
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
    # with torch.optim's Adam the distributed optimizer can't be saved or resumed (distrib_optimizer.py: an assert on
    # `step`, a missing key, an operation in place on a leaf): it gets an Adam of Apex's shape
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
        distrib_optimizer.Adam = FusedAdam
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
        distributed: Any = distrib_optimizer.DistributedOptimizer
        distributed._set_main_param_and_optimizer_states = torch.no_grad()(
            distributed._set_main_param_and_optimizer_states
        )


def _as_numbers(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) and as_numpy else tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW with Apex's surface: `step` in the parameter group, exactly `exp_avg` and `exp_avg_sq` for a parameter.

    The arithmetic is torch's own fused kernel's, so that both backends take the same steps.

    Attributes:
        found_inf: float scalar on the device; 1: the kernel leaves parameters and moments as they are, and `step` is
            counted all the same. None: it always steps.
    """

    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        **_: Any,
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam: bias_correction=False is not supported")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            if not params:
                continue
            for param in params:
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            # filled on the device: a copy of the host's number would wait for it
            step = torch.full((), float(group["step"]), device=params[0].device)
            kernel(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [step] * len(params),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=self.found_inf,
            )
