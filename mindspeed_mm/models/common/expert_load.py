"""How evenly the tokens of a step are spread over experts, counted where they are sent to them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mindspeed_mm.parallel.experts import find_experts
from mindspeed_mm.utils.log import notice

#: what is logged: the largest number of tokens of an expert ÷ the mean, and how many experts got none
FIGURES = ("expert_imbalance", "dead_experts")


@dataclass(frozen=True)
class RoutedTokens:
    """How many tokens were sent to each expert; a metric whose figures are made after its sum over the global batch.

    Attributes:
        counts: [experts of all layers] float.
        layers: path of a layer's experts → their number, in the order of `counts`.
    """

    counts: torch.Tensor
    layers: Mapping[str, int] = field(default_factory=dict)

    def shares(self) -> dict[str, list[float]]:
        """Return layer → share of its tokens that each expert got; reads the device."""
        values, found = self.counts.tolist(), {}
        for (layer, number), end in zip(self.layers.items(), itertools.accumulate(self.layers.values())):
            own = values[end - number : end]
            found[layer] = [value / max(sum(own), 1.0) for value in own]
        return found


def load_figures(counts: torch.Tensor) -> torch.Tensor:
    """Return the figures of `FIGURES`, each as a sum and its denominator: [4], on the same device.

    Args:
        counts: [experts of all layers] float, of a whole global batch; every layer sends each token to as many experts.
    """
    dead = (counts == 0).sum().to(counts)
    return torch.stack([counts.max(), counts.mean(), dead, torch.ones_like(dead)])


class ExpertLoad:
    """Counts the tokens that a forward pass sends to each expert of a model; padding doesn't count.

    Counts are taken from the inputs of the experts modules, before expert parallelism moves tokens to other ranks: each
    rank counts its own tokens. They stay on the device.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: not split over ranks yet.
        """
        self._name = type(model).__name__
        found = {path: (module, len(next(module.parameters()))) for path, module in find_experts(model).items()}
        self._layers = {path: number for path, (_, number) in found.items()}
        self._experts = {id(module): number for module, number in found.values()}
        self._is_token: torch.Tensor | None = None
        self._counts: dict[int, torch.Tensor] | None = None
        for module in find_experts(model).values():
            module.register_forward_pre_hook(self._count)

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts modules."""
        return bool(self._experts)

    def expect(self, is_token: torch.Tensor | None) -> None:
        """Count in the next forward pass.

        Args:
            is_token: [batch, sequence] bool, False for padding; None: there is none.
        """
        self._is_token, self._counts = is_token, {}

    def take(self) -> RoutedTokens | None:
        """Return the counts of the forward pass since `expect`; None if not every experts module ran on every token."""
        counts, self._counts = self._counts or {}, None
        if counts.keys() != self._experts.keys():
            notice(
                f"{' and '.join(FIGURES)} are not logged: in a forward pass of {self._name}, {len(counts)} of "
                f"{len(self._experts)} experts modules ran on the tokens of a micro-batch",
                key="expert load",
            )
            return None
        return RoutedTokens(torch.cat([counts[key] for key in self._experts]), self._layers) if counts else None

    @torch.compiler.disable  # in a graph it would be of one layer, and of the forward pass alone
    @torch.no_grad()
    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._counts is None:  # a layer that runs again in backward
            return
        chosen: torch.Tensor = args[1]  # [tokens, experts of a token], of all experts
        weight = torch.ones_like(chosen, dtype=torch.float32)
        if self._is_token is not None:
            if self._is_token.numel() != len(chosen):
                return
            weight *= self._is_token.flatten().unsqueeze(1)
        number = self._experts[id(module)]
        # a number beyond the last expert stands for none
        found = torch.zeros(number + 1, device=chosen.device)
        found.index_add_(0, chosen.flatten().clamp(max=number), weight.flatten())
        self._counts[id(module)] = self._counts.get(id(module), 0) + found[:number]
