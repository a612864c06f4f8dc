"""FLOPs of a predictor's training step, by torch's formulas for the operators of a forward pass of each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_OF_THE_HOST = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch has formulas for CUDA's alone


class PredictorFlops:
    """Sums the FLOPs of the predictor's micro-batches; frozen encoders and autoencoders are not counted.

    Matrices and attention of a forward pass are counted. Backward, the gradient of inputs costs as much again, and that
    of weights as much as their share of the matrices that are trained.
    """

    def __init__(self, predictor: nn.Module) -> None:
        """
        Args:
            predictor: the model that is trained, not sharded yet.
        """
        matrices = [p for p in predictor.parameters() if p.dim() > 1]
        trained = sum(p.numel() for p in matrices if p.requires_grad)
        whole = sum(p.numel() for p in matrices)
        self._passes = 1 + any(p.requires_grad for p in predictor.parameters()) + trained / max(whole, 1)
        self._known: dict[tuple[Any, ...], int] = {}
        self._sum = 0.0

    def run(self, inputs: Sequence[Any], predict: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a training forward pass of the predictor and add its FLOPs.

        Args:
            inputs: what it is given; its tensors' shapes decide what it costs.
            predict: runs it.
        """
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        if shapes in self._known:
            predicted = predict()
        else:
            with _Operators() as operators:
                predicted = predict()
            self._known[shapes] = operators.flops
        self._sum += self._known[shapes] * self._passes
        return predicted

    def take(self) -> float:
        """Return the sum since the last call and start anew."""
        total, self._sum = self._sum, 0.0
        return total


class _Operators(TorchDispatchMode):
    """Adds up the FLOPs of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        elif func.overloadpacket is _OF_THE_HOST:
            self.flops += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        return result
