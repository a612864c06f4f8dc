"""The load-balancing loss of experts, per sample, so that no split of a global batch changes it.

Of one sample, over its T tokens in all L layers with experts: `E * sum_e f_e * P_e`, f_e the number of times that an
expert is among a token's best k over L * T, P_e the mean of its probability. Source: equations 4 to 6 of Switch
Transformers (Fedus, Zoph and Shazeer, arXiv 2101.03961), over k choices and all layers at once as transformers'
`load_balancing_loss_func` has it; of a sample alone the two are the same number.

f and P are means whose product isn't linear: taken over a micro-batch, the loss would depend on how the global batch
is cut. Here each sample of a row has one of its own, and weighs in the step what its tokens weigh in the token loss:
`sum_s w_s * aux_s / sum_s w_s`, w_s being the number of its targets for per_token_loss, 1 for per_sample_loss, the root
of that number for square_loss. Numerator and denominator are plain sums over the global batch, and the denominator is
the token loss's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from mindspeed_mm.models.common.loss import Targets
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass
class SampleShares:
    """The samples of a micro-batch, and how much each counts.

    Attributes:
        sample: [batch * sequence] int64, the number of each position's sample, `len(tokens)` for padding.
        tokens: [samples] float32, how many positions each has.
        weights: [samples] float32, the sum of its targets' weights in the token loss.
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
            targets: of the micro-batch.
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


def balance_loss(router_logits: Sequence[torch.Tensor], top_k: int, shares: SampleShares) -> torch.Tensor:
    """Sum over samples of weight * load-balancing loss.

    Args:
        router_logits: of each layer with experts, [batch * sequence, experts], any float dtype.
        top_k: experts that a token is sent to.
        shares: the samples.

    Returns:
        float32 scalar, differentiable through the probabilities.
    """
    experts, samples = router_logits[0].shape[-1], len(shares.tokens)
    chosen = torch.zeros(samples + 1, experts, device=shares.sample.device)
    probability = torch.zeros_like(chosen)
    for logits in router_logits:
        routed = logits.float().softmax(-1)
        best = torch.zeros_like(routed).scatter_(1, routed.detach().topk(top_k, dim=-1).indices, 1.0)
        chosen = chosen.index_add(0, shares.sample, best)
        probability = probability.index_add(0, shares.sample, routed)
    rows = shares.tokens * len(router_logits)
    each = experts * (chosen * probability)[:samples].sum(1) / rows.square()
    return (each * shares.weights).sum()


class AddGradient(torch.autograd.Function):
    """Train the sum of two scalars, and report the first: its value, with the gradient of both."""

    @staticmethod
    def forward(ctx: Any, reported: torch.Tensor, added: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Two scalars → the first."""
        return reported.view_as(reported)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """The gradient, for both."""
        return grad, grad


class RouterLoss:
    """Collects the outputs of a model's routers in a forward pass, and computes their loss.

    A router's output is taken where it is made, inside its layer. Under non-reentrant recompute it keeps its graph;
    the reentrant kind runs the layer without one, and is refused.
    """

    def __init__(self, model: PreTrainedModel, coefficient: float) -> None:
        """
        Args:
            model: a transformers model, not wrapped yet.
            coefficient: weight of the loss beside the token loss.

        Raises:
            ConfigError: transformers knows no such loss for this model.
        """
        self.coefficient = coefficient
        self._name = type(model).__name__
        self._routers = _routers(model) if has_balance_loss(model) else []
        self._top_k: int = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
        if not self._routers or not self._top_k:
            raise ConfigError(
                f"model.json: loss_cfg.router_aux_loss_coef is {coefficient:g}, but {self._name} has no load-balancing "
                "loss in transformers (it has no experts, or keeps them balanced by other means); write 0, or leave "
                "the key out"
            )
        self._collected: list[torch.Tensor] | None = None
        for router in self._routers:
            router.register_forward_hook(self._keep)

    def expect(self) -> None:
        """Collect in the next forward pass of the model."""
        self._collected = []

    def take(self, shares: SampleShares) -> torch.Tensor:
        """The loss of the forward pass since `expect`: sum over its samples of weight * loss, float32 scalar.

        Raises:
            ConfigError: the routers ran without a graph, or on other positions than the samples'.
        """
        collected, self._collected = self._collected or [], None
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
        return balance_loss(collected, self._top_k, shares)

    def _keep(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._collected is not None:  # None: a layer that runs again in backward
            logits = output[0] if isinstance(output, tuple) else output
            self._collected.append(logits.flatten(0, -2))


def has_balance_loss(model: PreTrainedModel) -> bool:
    """Whether transformers adds a load-balancing loss to this model's own loss."""
    modules = [sys.modules.get(base.__module__) for base in type(model).__mro__]
    return any(hasattr(module, "load_balancing_loss_func") for module in modules)


def chosen_coefficient(stated: float | None, hf_config: PretrainedConfig) -> float:
    """The weight of the load-balancing loss.

    Args:
        stated: model.json's; None: it states none.
        hf_config: whose `output_router_logits` asks for the loss with the weight beside it.
    """
    text = hf_config.get_text_config()
    if stated is not None:
        return stated
    return float(getattr(text, "router_aux_loss_coef", 0.0)) if getattr(text, "output_router_logits", False) else 0.0


def _routers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of the decoder whose first output transformers records as `router_logits`."""
    classes = set()
    for part in model.modules():
        recorded = getattr(part, "_can_record_outputs", None) or {}
        for recorder in _as_list(recorded.get("router_logits")):
            if isinstance(recorder, OutputRecorder) and recorder.index == 0:
                classes.add(recorder.target_class)
    return [m for m in model.get_decoder().modules() if isinstance(m, tuple(classes))]


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
