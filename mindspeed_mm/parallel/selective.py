"""Which outputs of operations a recomputed module keeps, so that backward doesn't run these operations again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

Operation: TypeAlias = Literal["linear", "attention"]

#: products with weights, of torch and of torch_npu
_LINEAR = frozenset(
    {"mm", "addmm", "linear", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "npu_linear"}
    | {"npu_grouped_matmul"}
)
_DROPOUT = MappingProxyType({"dropout_p": 0.0, "p_dropout": 0.0, "dropout": 0.0, "keep_prob": 1.0})


def kept_outputs(operations: Collection[Operation]) -> Callable[[], Any]:
    """Return the `context_fn` of torch's checkpoint that keeps the outputs of operations.

    Args:
        operations: "linear", products of activations with weights (of experts, too); "attention", the fused kernels of
            attention, those with dropout excepted: the random numbers that they draw must be drawn again.
    """
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, frozenset(operations)))


def _policy(
    operations: frozenset[Operation], context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    is_kept = ("linear" in operations and _name(operator) in _LINEAR) or (
        "attention" in operations and _is_attention(operator) and not _drops(operator, args, kwargs)
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: Any) -> str:
    """Name of an operator without its namespace and overload; "" of one of higher order."""
    return operator._schema.name.partition("::")[2] if isinstance(operator, torch._ops.OpOverload) else ""


def _is_attention(operator: Any) -> bool:
    """Whether an operator is a kernel of attention: of PyTorch (flex_attention, too), flash-attn or torch_npu."""
    name = _name(operator) or str(operator)
    return ("attention" in name or "flash_attn" in name) and "backward" not in name


def _drops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a kernel drops elements at random."""
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return any(given.get(name, nothing) != nothing for name, nothing in _DROPOUT.items())
