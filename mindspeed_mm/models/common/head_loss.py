"""Projection of target positions only: the language-model head never receives the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.models.common.log_probabilities import ChunkedLogProbabilities, target_log_probabilities
from mindspeed_mm.models.common.loss import ChunkedCrossEntropy, Targets, weighted_cross_entropy
from mindspeed_mm.parallel import collectives
from mindspeed_mm.parallel.tensor import own_part, rank_set
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.errors import ConfigError

#: keys of config.json by which models change their logits after the output layer, and the value that changes nothing
_AFTER_THE_HEAD = {"final_logit_softcapping": None, "logits_scaling": 1, "logit_scale": 1}


def refuse_changed_logits(text_config: Any, name: str) -> None:
    """Refuse a model whose configuration changes its logits after the output layer.

    Args:
        text_config: configuration of its language model.
        name: name of the model's class, for the message.

    Raises:
        ConfigError: it caps or scales them.
    """
    for key, nothing in _AFTER_THE_HEAD.items():
        found = getattr(text_config, key, None)
        if found not in (None, nothing):
            raise _changed_logits(name, f"{key} {found:g} of config.json")


def _changed_logits(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name} caps or scales its logits after its output layer ({what}), which the loss here doesn't compute, so it "
        "can't be trained"
    )


class HeadLoss:
    """Makes a language-model head return the loss of the current targets instead of all logits.

    It works through hooks inside the head's own call, where the weight is gathered even if the head is an FSDP unit. It
    must be created before the model is wrapped, so that the hooks run between FSDP's gather and free. Of a head that
    tensor parallelism splits by vocabulary, the logits are never gathered.
    """

    def __init__(self, head: nn.Module) -> None:
        self._targets: Targets | None = None
        self._chunk: int | None = None
        self._factor: float | torch.Tensor | None = None
        self._each = False
        self._hidden: torch.Tensor | None = None
        self._returned: torch.Tensor | None = None
        self._is_checked = False
        head.register_forward_pre_hook(self._before)
        head.register_forward_hook(self._after)

    def expect(
        self,
        targets: Targets,
        chunk: int | None,
        factor: float | torch.Tensor | None = None,
        *,
        each: bool = False,
    ) -> None:
        """Make the next call of the head return the weighted cross-entropy sum (float32 scalar) for `targets`.

        Args:
            targets: target positions of the micro-batch.
            chunk: number of positions whose logits may exist at once; None: the logits of all targets.
            factor: approximate gradient of the sum in backward; None: gradients stay in range without it.
            each: return the log-probability of each target token, [n] float32, instead of the sum.
        """
        self._targets, self._chunk, self._factor, self._each = targets, chunk, factor, each

    def check_output(self, output: torch.Tensor, name: str) -> None:
        """Check once that the model has returned what the head did: some cap or scale their logits after it.

        Args:
            output: the `logits` of the model's output, after a call that `expect` has announced.
            name: name of the model's class, for the message.

        Raises:
            ConfigError: the model has changed it, which would change the loss instead of the logits.
        """
        returned, self._returned = self._returned, None
        if self._is_checked or returned is None:
            return
        expected = returned.detach().nan_to_num()
        if not torch.equal(output.detach().nan_to_num(), expected):
            raise _changed_logits(name, "found in its first forward pass")
        self._is_checked = bool(expected.any())

    def _before(self, head: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor] | None:
        if self._targets is None:
            return None
        hidden = args[0].flatten(0, -2).index_select(0, self._targets.index)
        if self._chunk is None and _ranks_of(head) is None:
            return (hidden,)
        self._hidden = hidden
        return (hidden[:0],)

    def _after(self, head: Any, args: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor | None:
        targets, self._targets = self._targets, None
        if targets is None:
            return None
        hidden, self._hidden = self._hidden, None
        self._returned = self._loss_of(head, logits, hidden, targets)
        return self._returned

    def _loss_of(self, head: Any, logits: torch.Tensor, hidden: torch.Tensor | None, targets: Targets) -> torch.Tensor:
        if hidden is None:
            return self._of_logits(logits, targets, None)
        ranks = _ranks_of(head)
        hidden = hidden if ranks is None else collectives.copy(hidden, ranks)
        weight, bias = (None if p is None else own_part(p) for p in (head.weight, getattr(head, "bias", None)))
        # the empty projection keeps the head's hooks in the graph although the loss below computes its own gradients
        return self._of_hidden(hidden, weight, bias, targets, ranks) + logits.sum().float()

    def _of_hidden(
        self, hidden: torch.Tensor, weight: Any, bias: Any, targets: Targets, ranks: RankSet | None
    ) -> torch.Tensor:
        if self._chunk is None:
            return self._of_logits(F.linear(hidden, weight, bias), targets, ranks)
        if self._each:
            return ChunkedLogProbabilities.apply(hidden, weight, bias, targets.tokens, self._chunk, ranks)
        return ChunkedCrossEntropy.apply(
            hidden, weight, bias, targets.tokens, targets.weights, self._chunk, self._factor, ranks
        )

    def _of_logits(self, logits: torch.Tensor, targets: Targets, ranks: RankSet | None) -> torch.Tensor:
        if self._each:
            return target_log_probabilities(logits, targets.tokens, ranks)
        return weighted_cross_entropy(logits, targets.tokens, targets.weights, ranks)


def _ranks_of(head: Any) -> RankSet | None:
    """Return the tensor-parallel ranks that split a gathered head by vocabulary; None: it is whole."""
    return rank_set(head.weight.device_mesh) if isinstance(head.weight, DTensor) else None
