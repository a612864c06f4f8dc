"""FLOPs of a forward and backward pass as torch's own counter counts them, apart for matrices and for attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _forward(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **how: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **how: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _grouped(left: Any, right: Any, *rest: Any, out_shape: Any = None, **how: Any) -> int:
    """Of each token with the weights of one expert; or, for the gradient of the weights, the other way round."""
    return 2 * left[0] * left[1] * right[-1] if len(right) == 3 else 2 * left[0] * left[1] * right[1]


#: kernels of the host that torch's counter doesn't know, by the formulas that it has for those of CUDA
OF_THE_HOST = {
    aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    aten._grouped_mm: _grouped,
}


class Counted(NamedTuple):
    """FLOPs of matrices, and of the scores and values of attention.

    A fused kernel computes the scores again in its backward pass: 7 products of whole matrices in place of 6.
    """

    matrices: int
    attention: int


def counted_flops(run: Callable[[], object]) -> Counted:
    """Count what `run` computes."""
    with FlopCounterMode(display=False, custom_mapping=OF_THE_HOST) as counter:
        run()
    by_operator = counter.get_flop_counts()["Global"]
    attention = sum(n for name, n in by_operator.items() if "attention" in str(name) or "bmm" in str(name))
    return Counted(sum(by_operator.values()) - attention, attention)
