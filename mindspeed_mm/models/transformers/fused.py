"""Fused kernels in a model of transformers: layers whose code is Llama's get the device's kernel.

A layer is known by its code, not by its name: the body of its forward method must be that of Llama's layer, but for the
names of arguments. The classes of transformers stay as they are; a layer of the built model gets a subclass.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.fused import FusedKernels
from mindspeed_mm.configs.flags.model import FusedKernelArguments
from mindspeed_mm.utils.log import info_rank0, notice

_ROTARY = "apply_rotary_pos_emb"
Forward = Callable[..., Any]


def use_fused_kernels(model: nn.Module, flags: FusedKernelArguments) -> None:
    """Let the layers of a model compute by the device's fused kernels, as the flags ask.

    What the device has no kernels for, and what no layer of the model has, is said once; the model then computes as it
    did.

    Args:
        model: built, with its adapters, not sharded yet; it may be on the meta device.
    """
    asked = {
        "--use-fused-rmsnorm": (flags.use_fused_rmsnorm, _rms_norm),
        "--use-fused-swiglu": (flags.use_fused_swiglu, _swiglu),
        "--use-fused-rotary-pos-emb": (flags.use_fused_rotary_pos_emb, _rotary),
    }
    given = {spelling: find for spelling, (is_given, find) in asked.items() if is_given}
    if not given:
        return
    device = accelerator.current()
    kernels = device.fused_kernels()
    if kernels is None:
        notice(f"{', '.join(given)}: no effect here: {device.why_no_fused_kernels()}")
        return
    for spelling, find in given.items():
        fused: Counter[str] = Counter()
        for module in model.modules():
            forward = find(module, kernels)
            if forward is not None:
                fused[type(module).__name__] += 1
                layer: Any = type(module)
                module.__class__ = _with_forward(layer, forward)
        if fused:
            info_rank0(f"{spelling}: {', '.join(f'{number} {name}' for name, number in sorted(fused.items()))}")
        else:
            notice(f"{spelling}: no effect here: no layer of {type(model).__name__} computes as Llama's do")


def _rms_norm(module: nn.Module, kernels: FusedKernels) -> Forward | None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return _rms_norm_forward(kernels) if _has_body_of(module, LlamaRMSNorm.forward) else None


@functools.cache
def _rms_norm_forward(kernels: FusedKernels) -> Forward:
    def forward(self: Any, hidden_states: Any) -> Any:
        return kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return forward


def _swiglu(module: nn.Module, kernels: FusedKernels) -> Forward | None:
    from transformers.activations import ACT2FN
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

    is_known = _has_body_of(module, LlamaMLP.forward) or _has_body_of(module, Qwen2_5_VLMLP.forward)
    if not is_known or type(module.act_fn) not in (nn.SiLU, type(ACT2FN["silu"])):
        return None
    return _swiglu_forward(kernels)


@functools.cache
def _swiglu_forward(kernels: FusedKernels) -> Forward:
    def forward(self: Any, hidden_states: Any) -> Any:
        return self.down_proj(kernels.silu_mul(self.gate_proj(hidden_states), self.up_proj(hidden_states)))

    return forward


def _rotary(module: nn.Module, kernels: FusedKernels) -> Forward | None:
    """Return the layer's own forward method with the kernel in the place of the function that it calls."""
    from transformers.models.llama import modeling_llama

    forward = _without_deprecations(type(module).forward)
    if not isinstance(forward, FunctionType) or forward.__closure__ or _ROTARY not in forward.__code__.co_names:
        return None
    for name, original in ((_ROTARY, modeling_llama.apply_rotary_pos_emb), ("rotate_half", modeling_llama.rotate_half)):
        if _body(forward.__globals__.get(name)) != _body(original):
            return None
    return _rotary_forward(forward, kernels)


def _without_deprecations(function: Any) -> Any:
    """Return the function that transformers' decorator for keyword arguments of older names wraps."""
    while function.__code__.co_filename.endswith("utils/deprecation.py") and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@functools.cache
def _rotary_forward(forward: FunctionType, kernels: FusedKernels) -> Forward:
    original = forward.__globals__[_ROTARY]

    def rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return kernels.rotary(q, k, cos, sin) if unsqueeze_dim == 1 else original(q, k, cos, sin, unsqueeze_dim)

    names = {**forward.__globals__, _ROTARY: rotary}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@functools.cache
def _with_forward(layer: type[Any], forward: Forward) -> type[Any]:
    return type(layer.__name__, (layer,), {"forward": forward, "__module__": layer.__module__})


def _has_body_of(module: nn.Module, forward: Forward) -> bool:
    return _body(type(module).forward) == _body(forward) is not None


@functools.cache
def _body(function: Any) -> str | None:
    """Return what a function does, with its arguments numbered instead of named; None: it has no source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    numbers = {argument.arg: f"argument {i}" for i, argument in enumerate(definition.args.args)}
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            node.id = numbers.get(node.id, node.id)
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    return ast.dump(ast.Module(body, []))
