"""Projection of target positions only: the language-model head never receives the whole sequence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.models.common.adapters import is_adapted, low_rank_parts
from mindspeed_mm.models.common.log_probabilities import (
    ChunkedLogProbabilities,
    HeadInputs,
    soft_cap,
    target_log_probabilities,
)
from mindspeed_mm.models.common.loss import LossOptions, Targets, chunked_cross_entropy, weighted_cross_entropy
from mindspeed_mm.parallel import collectives
from mindspeed_mm.parallel.tensor import own_part, rank_set
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.errors import ConfigError

#: keys of config.json by which models scale their logits after the output layer
_AFTER_THE_HEAD = ("logits_scaling", "logit_scale")
#: the key by which they cap them, as `soft_cap` does
_CAP = "final_logit_softcapping"


def cap_of_logits(text_config: Any, name: str) -> float | None:
    """Return the cap that a model applies to its logits after the output layer; None: it changes nothing.

    Args:
        text_config: configuration of its language model.
        name: name of the model's class, for the message.

    Raises:
        ConfigError: it scales them.
    """
    for key in _AFTER_THE_HEAD:
        found = getattr(text_config, key, None)
        if found not in (None, 1):
            raise _changed_logits(name, f"{key} {found:g} of config.json")
    return getattr(text_config, _CAP, None) or None


def _may_chunk(head: nn.Module, options: LossOptions) -> bool:
    """Return whether an output layer's logits may be computed in chunks, which happens without its forward method.

    Raises:
        ConfigError: loss_cfg asks for chunks, and the layer has DoRA's magnitudes.
    """
    has_magnitudes = any("lora_magnitude_vector" in name for name, _ in head.named_parameters())
    if has_magnitudes and options.compute_mode != "default":
        raise ConfigError(
            f"--lora-use-dora: loss_cfg.compute_mode {options.compute_mode} of model.json computes logits without the "
            "magnitudes of the output layer's adapters; write default, or leave the output layer out of "
            "--lora-target-modules"
        )
    layer = head.get_submodule("base_layer") if is_adapted(head) else head
    if options.compute_mode != "default":
        return True
    return not has_magnitudes and isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _changed_logits(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name} changes its logits after its output layer ({what}), which the loss here doesn't compute, so it can't "
        "be trained"
    )


class _Carried(torch.autograd.Function):
    """Return zeros in the place of a loss; the loss gets their gradient.

    A cap leaves zeros as they are, and its slope there is 1: they carry the loss through a model that caps its logits.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """A tensor of any shape → zeros."""
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the gradient."""
        return grad


class _Received(torch.autograd.Function):
    """Return the loss that zeros have carried; its gradient goes to them."""

    @staticmethod
    def forward(ctx: Any, zeros: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Two tensors of the same shape → the second."""
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Return the gradient for the zeros."""
        return grad, None


class HeadLoss:
    """Makes a language-model head return the loss of the current targets instead of all logits.

    It works through hooks inside the head's own call, where the weight is gathered even if the head is an FSDP unit. It
    must be created before the model is wrapped, so that the hooks run between FSDP's gather and free. Of a head that
    tensor parallelism splits by vocabulary, the logits are never gathered.

    The loss passes through what the model does with its logits, so that the model's output is what backward begins at:
    a cap there is applied to the logits here, and not to the loss.
    """

    def __init__(self, head: nn.Module, options: LossOptions, cap: float | None = None) -> None:
        """
        Args:
            head: the output layer.
            options: say how many logits may exist at once.
            cap: what the model caps its logits at after the output layer (`soft_cap`); None: it doesn't.

        Raises:
            ConfigError: the loss is computed in chunks, and the head has adapters with magnitudes.
        """
        self._cap, self._options, self._may_chunk = cap, options, _may_chunk(head, options)
        self._rows = 0
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
        rows: int,
        factor: float | torch.Tensor | None = None,
        *,
        each: bool = False,
    ) -> None:
        """Make the next call of the head return the weighted cross-entropy sum (float32 scalar) for `targets`.

        Args:
            targets: target positions of the micro-batch.
            rows: rows of the micro-batch.
            factor: approximate gradient of the sum in backward; None: gradients stay in range without it.
            each: return the log-probability of each target token, [n] float32, instead of the sum.
        """
        self._targets, self._rows, self._factor, self._each = targets, rows, factor, each

    def read(self, output: torch.Tensor, name: str) -> torch.Tensor:
        """Return what the head has computed; once, check what the model does with its logits after the head.

        Args:
            output: the `logits` of the model's output, after a call that `expect` has announced.
            name: name of the model's class, for the message.

        Raises:
            ConfigError: the model changes them in another way than by the cap, which would change the loss instead.
        """
        returned, self._returned = self._returned, None
        if returned is None:
            return output
        if not self._is_checked:
            self._check(output.detach(), returned.detach(), name)
        return output if self._cap is None else _Received.apply(output[:-1].view_as(returned), returned.detach())

    def _check(self, output: torch.Tensor, returned: torch.Tensor, name: str) -> None:
        if self._cap is not None:
            expected = soft_cap(torch.tensor(self._cap), self._cap)
            if not torch.allclose(output[-1].float().cpu(), expected, rtol=1e-2):
                raise _changed_logits(name, f"found in its first forward pass, beside {_CAP} of config.json")
            self._is_checked = True
            return
        returned = returned.nan_to_num()
        if not torch.equal(output.nan_to_num(), returned):
            raise _changed_logits(name, "found in its first forward pass")
        self._is_checked = bool(returned.any())

    def _before(self, head: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor] | None:
        if self._targets is None:
            return None
        hidden = args[0].flatten(0, -2).index_select(0, self._targets.index)
        ranks, self._chunk = _ranks_of(head), None
        if self._may_chunk:
            vocabulary = math.ceil(len(head.weight) / (1 if ranks is None else ranks.size))
            self._chunk = self._options.positions_per_chunk(self._rows, len(self._targets.tokens), vocabulary)
        if self._chunk is None and ranks is None:
            return (hidden,)
        self._hidden = hidden
        return (hidden[:0],)

    def _after(self, head: Any, args: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor | None:
        targets, self._targets = self._targets, None
        if targets is None:
            return None
        hidden, self._hidden = self._hidden, None
        self._returned = loss = (
            self._of_logits(logits, targets, None) if hidden is None else self._loss_of(head, hidden, targets)
        )
        if self._cap is None:
            return loss
        return torch.cat([_Carried.apply(loss).flatten(), loss.new_full((1,), self._cap)])  # the cap itself is checked

    def _loss_of(self, head: Any, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        ranks = _ranks_of(head)
        hidden = hidden if ranks is None else collectives.copy(hidden, ranks)
        weight, bias = (None if p is None else own_part(p) for p in (head.weight, getattr(head, "bias", None)))
        low, up = low_rank_parts(head, hidden) if is_adapted(head) else (None, None)
        return self._of_hidden(HeadInputs(hidden, weight, bias, low, up), targets, ranks)

    def _of_hidden(self, inputs: HeadInputs, targets: Targets, ranks: RankSet | None) -> torch.Tensor:
        if self._chunk is None:
            return self._of_logits(inputs.logits(slice(None)), targets, ranks)
        if self._each:
            hidden, weight, bias, *adapter = inputs
            return ChunkedLogProbabilities.apply(
                hidden, weight, bias, targets.tokens, self._chunk, ranks, self._cap, *adapter
            )
        return chunked_cross_entropy(inputs, targets, self._chunk, factor=self._factor, ranks=ranks, cap=self._cap)

    def _of_logits(self, logits: torch.Tensor, targets: Targets, ranks: RankSet | None) -> torch.Tensor:
        logits = soft_cap(logits, self._cap)
        if self._each:
            return target_log_probabilities(logits, targets.tokens, ranks)
        return weighted_cross_entropy(logits, targets.tokens, targets.weights, ranks)


def _ranks_of(head: Any) -> RankSet | None:
    """Return the tensor-parallel ranks that split a gathered head by vocabulary; None: it is whole."""
    return rank_set(head.weight.device_mesh) if isinstance(head.weight, DTensor) else None
