"""Muon: the update of a weight matrix is its momentum, orthogonalised; all other parameters are updated by AdamW.

Sources: Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon): Nesterov momentum, five Newton–Schulz steps
in bfloat16 and their coefficients; embeddings, output layer, biases and norms by AdamW. Moonlight (arXiv 2502.16982):
the scale of an update, with which learning rate and weight decay are those of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer.clip import local_tensor
from mindspeed_mm.optimizer.elementwise import AdamW
from mindspeed_mm.optimizer.whole_matrices import MatrixPart, MatrixRanks, RankGroups, SplitMatrix
from mindspeed_mm.parallel.experts import find_experts
from mindspeed_mm.utils.adapter_names import is_adapter

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_BATCH = 2**24  # number of values of a rank whose matrices are exchanged at a time
_HEADS = ("lm_head", "output_layer")


def matrix_names(model: nn.Module, head: nn.Module | None = None) -> set[str]:
    """Return the names of the trained parameters of `model` that Muon orthogonalises.

    These are the weights of two dimensions, A and B of LoRA adapters among them, and the weights
    [experts, rows, columns] of stacked experts and of their adapters. Not among them
    are embeddings, recognised by class or by "embed" in their path, the output layer, and the kernels of convolutions:
    they embed pixels or sound, or are of one channel each. A parameter with several names, a tied one, must be a matrix
    by all of them.

    Args:
        model: the sharded model.
        head: its output layer, if that isn't called lm_head or output_layer.
    """
    stacked = {id(p) for experts in find_experts(model).values() for p in experts.parameters() if p.dim() == 3}
    others = {id(p) for p in head.parameters()} if head is not None else set()
    named: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        words = path.split(".")
        is_other = isinstance(module, (nn.Embedding, _ConvNd)) or any(
            "embed" in word.lower() or word in _HEADS for word in words
        )
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            # of three dimensions are the adapters of stacked experts
            is_weight = param.dim() in ((2, 3) if is_adapter(path) else (2,)) and name.endswith("weight")
            if is_other or not (is_weight or id(param) in stacked):
                others.add(id(param))
            elif param.requires_grad:
                named.setdefault(f"{path}.{name}" if path else name, param)
    return {name for name, param in named.items() if id(param) not in others}


def orthogonalize(matrices: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return about the nearest orthogonal matrix of each matrix; its singular values are between about 0.7 and 1.2.

    Each Newton–Schulz step maps the singular values of x by a·s + b·s³ + c·s⁵: x ← a·x + (b·xxᵀ + c·(xxᵀ)²)x.

    Args:
        matrices: [..., rows, columns].
        steps: number of steps.
        dtype: floating-point type of the computation and of the result.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(dtype)
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon for the parameter groups with `orthogonalized`, AdamW for the others.

    A matrix is orthogonalised whole, whatever the sharding of its parameter: the ranks that have its parts (of
    fully_shard and of tensor parallelism) send them to one of them, which computes and sends the parts of the result
    back. Stacked experts are matrices of their own. State, by parameter and sharded as it: `momentum_buffer`, or that
    of AdamW.

    Attributes:
        grad_scale, found_inf, divides: see `ElementWise`.

    m ← momentum·m + (1 − momentum)·g; u = orthogonalize(momentum·m + (1 − momentum)·g);
    w ← (1 − lr·weight_decay)·w − lr·matched_adamw_rms·√max(rows, columns)·u
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        ns_steps: int = 5,
        matched_adamw_rms: float = 0.2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """A collective of all ranks, which must have the same groups.

        Args:
            groups: parameter groups, each with a bool `orthogonalized`; parameters of such a group are [rows, columns]
                or [experts, rows, columns].
            lr: learning rate of groups without their own.
            momentum, ns_steps, matched_adamw_rms: of the matrices; the last one is the root mean square of an update
                divided by the learning rate, as is usual with AdamW.
            betas, eps: of AdamW.
            fused: AdamW's kernel is fused, and gradients are divided by `grad_scale`.
            dtype: floating-point type of the Newton–Schulz steps.
        """
        super().__init__(list(groups), {"lr": lr, "weight_decay": 0.0, "fused": fused})
        self.divides = fused
        self._momentum, self._steps, self._rms, self._dtype = momentum, ns_steps, matched_adamw_rms, dtype
        rest = [group for group in self.param_groups if not group["orthogonalized"]]
        self._adamw = AdamW(rest, lr=lr, betas=betas, eps=eps, fused=fused) if rest else None
        self._ranks: dict[int, MatrixRanks] = {}
        self._parts: dict[int, tuple[MatrixPart, ...]] = {}
        self._find_parts()

    def _find_parts(self) -> None:
        groups = RankGroups()
        by_ranks: dict[MatrixRanks, list[nn.Parameter]] = {}
        for group in self.param_groups:
            for param in group["params"] if group["orthogonalized"] else ():
                ranks = groups.of(param)
                if ranks is not None:
                    self._ranks[id(param)] = ranks
                    by_ranks.setdefault(ranks, []).append(param)
        for ranks, params in by_ranks.items():
            self._parts |= zip(map(id, params), ranks.split(params), strict=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a collective of the ranks that share matrices."""
        finite = None if self.found_inf is None else self.found_inf == 0
        rest = []
        for group in self.param_groups:
            if not group["orthogonalized"]:
                rest.append(group)
                continue
            for ranks, params in self._batches(group["params"]):
                self._step_matrices(group, ranks, params, finite)
        if self._adamw is not None and rest:
            self._adamw.param_groups, self._adamw.state = rest, self.state
            self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
            self._adamw.step()

    @torch.no_grad()
    def ensure_state(self) -> None:
        """Create the missing state of all parameters, as their first step would."""
        for group in self.param_groups:
            for param in group["params"] if group["orthogonalized"] else ():
                self._ensure_momentum(param)
        if self._adamw is not None:
            self._adamw.state = self.state
            self._adamw.ensure_state()

    def take_back(self) -> None:
        """See `ElementWise`."""
        if self._adamw is not None:
            self._adamw.take_back()

    def _batches(self, params: Iterable[nn.Parameter]) -> Iterator[tuple[MatrixRanks | None, list[nn.Parameter]]]:
        """Split parameters with gradients into batches of about `_BATCH` values of a rank, alike on all ranks."""
        waiting: dict[MatrixRanks | None, list[nn.Parameter]] = {}
        values: dict[MatrixRanks | None, int] = {}
        for param in params:
            if param.grad is None:
                continue
            ranks = self._ranks.get(id(param))
            waiting.setdefault(ranks, []).append(param)
            values[ranks] = values.get(ranks, 0) + param.numel() // (1 if ranks is None else ranks.size)
            if values[ranks] >= _BATCH or ranks is None:
                yield ranks, waiting.pop(ranks)
                values[ranks] = 0
        yield from waiting.items()

    def _step_matrices(
        self,
        group: dict[str, Any],
        ranks: MatrixRanks | None,
        params: Sequence[nn.Parameter],
        finite: torch.Tensor | None,
    ) -> None:
        device = accelerator.current().device()
        directions = [self._advance(param, finite).to(device) for param in params]
        if ranks is None:
            updates = [orthogonalize(d, self._steps, self._dtype) if d.numel() else d for d in directions]
        else:
            matrices = []
            for param, direction in zip(params, directions, strict=True):
                matrix = SplitMatrix(param.size(-2), param.size(-1), self._parts[id(param)])
                matrices += [matrix] * direction.size(0)
            parts = [part for direction in directions for part in direction.unbind(0)]
            found = ranks.apply(lambda m: orthogonalize(m, self._steps, self._dtype), parts, matrices)
            updates = []
            for direction in directions:
                updates.append(torch.stack(found[: direction.size(0)]) if direction.size(0) else direction)
                del found[: direction.size(0)]
        for param, update in zip(params, updates, strict=True):
            weight = local_tensor(param.detach())
            size = group["lr"] * self._rms * math.sqrt(max(param.shape[-2:]))
            new = weight * (1 - group["lr"] * group["weight_decay"])
            new.add_(update.view(weight.shape).to(new), alpha=-size)
            weight.copy_(new if finite is None else torch.where(finite.to(new.device), new, weight))

    def _ensure_momentum(self, param: nn.Parameter) -> torch.Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        return state["momentum_buffer"]

    def _advance(self, param: nn.Parameter, finite: torch.Tensor | None) -> torch.Tensor:
        """Advance the momentum; returns what is to be orthogonalised, [matrices, rows, columns] of this rank."""
        kept = local_tensor(self._ensure_momentum(param))
        assert param.grad is not None
        grad = local_tensor(param.grad).to(kept.dtype)
        if self.grad_scale is not None:
            grad = grad / self.grad_scale.to(grad.device)
        momentum = kept.lerp(grad, 1 - self._momentum)
        direction = grad.lerp(momentum, self._momentum).to(self._dtype)
        kept.copy_(momentum if finite is None else torch.where(finite.to(kept.device), momentum, kept))
        return direction if direction.dim() == 3 else direction.unsqueeze(0)
