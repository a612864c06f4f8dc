"""Load-balancing loss of mixture-of-experts routers, computed per sample: no split of a global batch changes it.

For one sample of T tokens and a model with E experts in each of L layers, the loss is `E * sum_e f_e * P_e`: f_e is the
number of times that expert e is among a token's best k, divided by L * T, and P_e is the mean of its probability.
Source: equations 4 to 6 of Switch Transformers (Fedus, Zoph and Shazeer, arXiv 2101.03961), over k choices and all
layers at once as in transformers' `load_balancing_loss_func`; for a single sample both give the same number.

f and P are means, and their product isn't linear: computed over a micro-batch, the loss would depend on how the global
batch is cut. Here each sample has its own loss, which is weighted in the step as its tokens are in the token loss:
`sum_s w_s * aux_s / sum_s w_s`, where w_s is the number of its targets for per_token_loss, 1 for per_sample_loss, and
the square root of that number for square_loss. Numerator and denominator are plain sums over the global batch, and the
denominator is the token loss's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from mindspeed_mm.models.common.loss import Targets
from mindspeed_mm.parallel.collectives import total
from mindspeed_mm.parallel.sequence import SequenceShard
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: of transformers' formula; another one (Doge's, over pairs of keys) has others
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass
class SampleShares:
    """The samples of a micro-batch and their weights.

    Attributes:
        sample: [batch * sequence] int64, the number of each position's sample, `len(tokens)` for padding.
        tokens: [samples] float32, the number of each sample's positions.
        weights: [samples] float32, the sum of the weights of each sample's targets in the token loss.
    """

    sample: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(
        cls,
        targets: Targets,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> SampleShares:
        """Find the samples of a micro-batch; on the host this costs no synchronisation with the device.

        Args:
            targets: targets of the micro-batch.
            input_ids: [batch, sequence].
            attention_mask: [batch, sequence], 0 for padding; None: there is none.
            documents: [batch, sequence] int64, number of each position's sample in a packed row, 0 for padding.
        """
        rows = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1).expand(input_ids.shape)
        is_token = torch.ones_like(rows, dtype=torch.bool) if attention_mask is None else attention_mask > 0
        if documents is not None:
            rows, is_token = rows * (documents.max() + 1) + documents, documents > 0
        found, numbers, tokens = rows[is_token].unique(return_inverse=True, return_counts=True)
        sample = torch.full(rows.shape, len(found), device=rows.device)
        sample[is_token] = numbers
        sample = sample.flatten()
        each = torch.ones_like(targets.index, dtype=torch.float32) if targets.weights is None else targets.weights
        weights = torch.zeros(len(found), device=rows.device).index_add_(0, sample[targets.index], each)
        return cls(sample, tokens.float(), weights)

    def cut(self, shard: SequenceShard) -> SampleShares:
        """Return these samples with the numbers of a shard's positions only; what is filled up is padding."""
        rows = self.sample.view(len(shard.index), shard.length)
        return replace(self, sample=shard.cut(rows, 1, fill=len(self.tokens)).flatten())


def balance_loss(
    router_logits: Sequence[torch.Tensor], top_k: int, shares: SampleShares, context: RankSet | None = None
) -> torch.Tensor:
    """Return the sum over samples of weight * load-balancing loss.

    Args:
        router_logits: a tensor for each layer with experts, [batch * sequence, experts], any float dtype.
        top_k: number of experts that a token is routed to.
        shares: the samples and their weights.
        context: ranks that have the other positions of the same samples; f and P are summed over them before the
            product, once. None: there are none.

    Returns:
        float32 scalar, the same on all ranks of `context`; differentiable through the probabilities of this rank.
    """
    experts, samples = router_logits[0].shape[-1], len(shares.tokens)
    chosen = torch.zeros(samples + 1, experts, device=shares.sample.device)
    probability = torch.zeros_like(chosen)
    for logits in router_logits:
        routed = logits.float().softmax(-1)
        best = torch.zeros_like(routed).scatter_(1, routed.detach().topk(top_k, dim=-1).indices, 1.0)
        chosen = chosen.index_add(0, shares.sample, best)
        probability = probability.index_add(0, shares.sample, routed)
    if context is not None:
        chosen, probability = total(torch.stack([chosen, probability]), context)
    rows = shares.tokens * len(router_logits)
    each = experts * (chosen * probability)[:samples].sum(1) / rows.square()
    return (each * shares.weights).sum()


class AddGradient(torch.autograd.Function):
    """Return the first of two scalars, with the gradient of their sum: the second is trained but not reported."""

    @staticmethod
    def forward(ctx: Any, reported: torch.Tensor, added: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Two scalars → the first."""
        return reported.view_as(reported)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return the gradient for each of the two."""
        return grad, grad


class RouterLoss:
    """Collects the outputs of a model's routers in a forward pass, and computes their loss.

    A router's output is recorded inside its layer. Non-reentrant recompute keeps the output's autograd graph; reentrant
    recompute runs the layer without a graph, and is refused.
    """

    def __init__(self, model: PreTrainedModel, coefficient: float) -> None:
        """
        Args:
            model: a transformers model, not wrapped yet.
            coefficient: weight of the loss beside the token loss.

        Raises:
            ConfigError: transformers has no such loss for this model.
        """
        self.coefficient = coefficient
        self._name = type(model).__name__
        self._routers = _routers(model) if has_balance_loss(model) else {}
        self._top_k: int = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
        if not self._routers or not self._top_k:
            raise ConfigError(
                f"model.json: loss_cfg.router_aux_loss_coef is {coefficient:g}, but {self._name} has no load-balancing "
                "loss in transformers (it has no experts, or keeps them balanced by other means); write 0, or leave "
                "the key out"
            )
        self._collected: dict[int, list[torch.Tensor]] | None = None
        for router in self._routers:
            router.register_forward_hook(self._keep)

    def expect(self) -> None:
        """Record the routers' outputs in the next forward pass of the model."""
        self._collected = {}

    def take(self, shares: SampleShares, context: RankSet | None = None) -> torch.Tensor:
        """Return the loss of the forward pass since `expect`: the sum over samples of weight * loss, a float32 scalar.

        Args:
            shares: the samples, at the positions of this rank.
            context: ranks that have the other positions of the same samples; a collective. None: there are none.

        Raises:
            ConfigError: the routers ran without an autograd graph, or on another number of positions.
        """
        by_router, self._collected = self._collected or {}, None
        collected: list[torch.Tensor] = []
        for parts in by_router.values():
            # a layer may have run on some rows of the micro-batch at a time (chunk_mbs_modules)
            is_split = len(parts) > 1 and sum(map(len, parts)) == len(shares.sample)
            collected += [torch.cat(parts)] if is_split else parts
        if {len(logits) for logits in collected} != {len(shares.sample)}:
            raise ConfigError(
                f"loss_cfg.router_aux_loss_coef: the routers of {self._name} ran on "
                f"{sorted({len(logits) for logits in collected})} positions, expected {len(shares.sample)}; write 0 to "
                "train without their loss"
            )
        is_trained = torch.is_grad_enabled() and any(p.requires_grad for r in self._routers for p in r.parameters())
        if is_trained and not all(logits.requires_grad for logits in collected):
            raise ConfigError(
                f"loss_cfg.router_aux_loss_coef: layers of {self._name} are recomputed in the reentrant way, which "
                "hides their routers; set use_reentrant: false"
            )
        return balance_loss(collected, self._top_k, shares, context)

    @torch.compiler.disable  # in a graph it would be of one layer, and of the forward pass alone
    def _keep(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._collected is not None:  # None: a layer that runs again in backward
            logits = output[self._routers[router]] if isinstance(output, tuple) else output
            self._collected.setdefault(id(router), []).append(logits.flatten(0, -2))


def has_balance_loss(model: PreTrainedModel) -> bool:
    """Whether transformers adds a load-balancing loss to this model's own loss, by the formula above."""
    modules = [sys.modules.get(base.__module__) for base in type(model).__mro__]
    formulas = [vars(module).get("load_balancing_loss_func") for module in modules if module is not None]
    return any(formula is not None and [*signature(formula).parameters] == _ARGUMENTS for formula in formulas)


def chosen_coefficient(stated: float | None, hf_config: PretrainedConfig) -> float:
    """Return the coefficient of the load-balancing loss.

    Args:
        stated: the value in model.json; None: model.json has none.
        hf_config: the model's configuration; without a value in model.json its `router_aux_loss_coef` is used if its
            `output_router_logits` is set.
    """
    text = hf_config.get_text_config()
    if stated is not None:
        return stated
    return float(getattr(text, "router_aux_loss_coef", 0.0)) if getattr(text, "output_router_logits", False) else 0.0


def _routers(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Return the modules of the decoder whose output transformers records as `router_logits`, with its place in it."""
    classes: dict[type, int] = {}
    for part in model.modules():
        recorded = getattr(part, "_can_record_outputs", None) or {}
        for recorder in _as_list(recorded.get("router_logits")):
            if isinstance(recorder, OutputRecorder):
                classes[recorder.target_class] = recorder.index
    found = (
        (module, index)
        for module in model.get_decoder().modules()
        for c, index in classes.items()
        if isinstance(module, c)
    )
    return dict(found)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
