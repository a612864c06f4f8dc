"""Log-probabilities of target tokens: of whole logits, or of logits that tensor-parallel ranks split by vocabulary.

Of split logits, each rank has the columns of its tokens; the largest logit and the sum of exponentials of a row are
reduced over the ranks, never the logits. Source: the parallel cross entropy of Megatron-LM (Shoeybi et al., arXiv
1909.08053, 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed_mm.parallel.world import RankSet


class Normalized(NamedTuple):
    """Logits as log-probabilities, and those of the target tokens.

    Attributes:
        log_probabilities: [n, vocabulary] float32, of split logits this rank's columns.
        of_targets: [n] float32, the same on all ranks.
        columns: [n] int64, the column of each target token; valid where `is_own`.
        is_own: [n] bool: whether this rank has the column of the target token; None: it has all.
    """

    log_probabilities: torch.Tensor
    of_targets: torch.Tensor
    columns: torch.Tensor
    is_own: torch.Tensor | None

    def logit_gradient(self) -> torch.Tensor:
        """Return the gradient of `-of_targets.sum()` with respect to the logits; it takes over `log_probabilities`."""
        gradient = self.log_probabilities.exp_()
        rows = torch.arange(len(gradient), device=gradient.device)
        gradient[rows, self.columns] -= 1 if self.is_own is None else self.is_own.to(gradient.dtype)
        return gradient


def soft_cap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return `cap * tanh(logits / cap)` in float32, which lies between -cap and cap; the logits for a cap of None.

    Source: the capping of final logits in Gemma 2 (arXiv 2408.00118, 2), as in transformers' models with
    `final_logit_softcapping`.
    """
    return logits if cap is None else torch.tanh(logits.float() / cap) * cap


def before_soft_cap(gradient: torch.Tensor, capped: torch.Tensor | None, cap: float | None) -> torch.Tensor:
    """Return the gradient with respect to logits before `soft_cap`, in place.

    Args:
        gradient: [n, vocabulary] float32, that with respect to the capped logits.
        capped: [n, vocabulary] float32, the capped logits; None: they aren't capped.
        cap: as it was applied; None: not at all.
    """
    return gradient if cap is None or capped is None else gradient.mul_(1 - (capped / cap).square())


def normalize(logits: torch.Tensor, tokens: torch.Tensor, ranks: RankSet | None = None) -> Normalized:
    """Return log-probabilities, without graph for split logits.

    Args:
        logits: [n, vocabulary] float32; of split logits [n, vocabulary / ranks], this rank's columns.
        tokens: [n] int64, the target tokens.
        ranks: the ranks that split the vocabulary; None: the logits are whole.
    """
    if ranks is None:
        log_probabilities = F.log_softmax(logits, dim=-1)
        return Normalized(log_probabilities, log_probabilities.gather(1, tokens[:, None]).squeeze(1), tokens, None)
    own = logits.shape[1]
    columns = tokens - ranks.rank * own
    is_own = (columns >= 0) & (columns < own)
    columns = columns.clamp(0, own - 1)
    largest = logits.amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ranks.group)
    shifted = logits - largest[:, None]
    of_targets = shifted.gather(1, columns[:, None]).squeeze(1).masked_fill(~is_own, 0.0)
    sums = torch.stack([shifted.exp().sum(1), of_targets])
    dist.all_reduce(sums, group=ranks.group)
    log_sum = sums[0].log()
    return Normalized(shifted.sub_(log_sum[:, None]), sums[1] - log_sum, columns, is_own)


def target_log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, ranks: RankSet | None = None) -> torch.Tensor:
    """Return the log-probability of each target token, computed in float32.

    Args:
        logits: [n, vocabulary], any float dtype; of split logits [n, vocabulary / ranks], this rank's columns.
        tokens: [n] int64.
        ranks: the ranks that split the vocabulary; None: the logits are whole.

    Returns:
        [n] float32, the same on all ranks of `ranks`.
    """
    if ranks is None:
        return -F.cross_entropy(logits.float(), tokens, reduction="none")
    return _SplitLogProbabilities.apply(logits.float(), tokens, ranks)


class _SplitLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, ranks: RankSet
    ) -> torch.Tensor:
        normalized = normalize(logits, tokens, ranks)
        if logits.requires_grad:
            ctx.save_for_backward(normalized.logit_gradient())
        return normalized.of_targets

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * -grad_output[:, None], None, None


class HeadInputs(NamedTuple):
    """What logits are projected from: `hidden @ weight.T + bias`, and `low @ up.T` of an adapter of the head.

    Attributes:
        hidden, weight, bias: [n, h], [v, h], [v] or None.
        low, up: [n, r] and [v, r], an adapter's A x times its factor, and its B; None: it has none.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    low: torch.Tensor | None = None
    up: torch.Tensor | None = None

    def detached(self) -> HeadInputs:
        """Return the same values without graph, of which a function computes no gradients ahead."""
        return HeadInputs(*(None if value is None else value.detach() for value in self))  # type: ignore[arg-type]

    def logits(self, part: slice) -> torch.Tensor:
        """Return the logits of some positions, [n of the part, v] float32."""
        logits = F.linear(self.hidden[part], self.weight, self.bias)
        if self.low is not None and self.up is not None:
            logits = logits + F.linear(self.low[part], self.up)
        return logits.float()


def normalized_part(
    inputs: HeadInputs, part: slice, tokens: torch.Tensor, ranks: RankSet | None, cap: float | None
) -> tuple[Normalized, torch.Tensor | None]:
    """Project some positions, and return what `normalize` does of them, and their capped logits if there is a `cap`."""
    logits = soft_cap(inputs.logits(part), cap)
    return normalize(logits, tokens[part], ranks), None if cap is None else logits


class HeadGradients:
    """The gradients of `HeadInputs`, chunk by chunk; those of weights are summed in float32."""

    def __init__(self, inputs: HeadInputs, needs: Sequence[bool]) -> None:
        """
        Args:
            needs: of each input, whether its gradient is wanted; False for an input that is None.
        """
        self._inputs = inputs
        rows = {0, 3}  # one row for each position
        self._sums = [
            torch.zeros_like(value, dtype=None if i in rows else torch.float32)
            if value is not None and wanted
            else None
            for i, (value, wanted) in enumerate(zip(inputs, needs, strict=True))
        ]

    def add(self, part: slice, of_logits: torch.Tensor) -> None:
        """Add what the positions of `part` contribute.

        Args:
            of_logits: gradient of their logits, float32.
        """
        of_hidden, of_weight, of_bias, of_low, of_up = self._sums
        hidden, weight, _, low, up = self._inputs
        if of_bias is not None:
            of_bias += of_logits.sum(0)
        of_logits = of_logits.to(hidden.dtype)
        for sums, rows, matrix_sums, matrix in ((of_hidden, hidden, of_weight, weight), (of_low, low, of_up, up)):
            if sums is not None and matrix is not None:
                sums[part] = of_logits @ matrix
            if matrix_sums is not None and rows is not None and rows.dtype == torch.float32:
                matrix_sums.addmm_(of_logits.T, rows[part])
            elif matrix_sums is not None and rows is not None:
                matrix_sums += of_logits.T @ rows[part]

    def sums(self) -> list[torch.Tensor | None]:
        """Return the gradients in the dtypes of the inputs; None where none is wanted."""
        pairs = zip(self._sums, self._inputs, strict=True)
        return [None if total is None or value is None else total.to(value.dtype) for total, value in pairs]


class ChunkedLogProbabilities(torch.autograd.Function):
    """Head projection and log-probabilities of target tokens, one chunk of positions at a time.

    Only one chunk's logits exist at once: backward computes them again, as the gradient of each log-probability is
    known only then.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        chunk: int,
        ranks: RankSet | None = None,
        cap: float | None = None,
        low: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`HeadInputs` and tokens [n] → [n] float32; of a split head, v is this rank's part of the vocabulary.

        The logits are capped (`soft_cap`) if there is a `cap`.
        """
        inputs = HeadInputs(hidden, weight, bias, low, up)
        ctx.save_for_backward(*inputs, tokens)
        ctx.chunk, ctx.ranks, ctx.cap = chunk, ranks, cap
        parts = [normalized_part(inputs, part, tokens, ranks, cap)[0].of_targets for part in chunks(len(tokens), chunk)]
        return torch.cat(parts) if parts else torch.zeros(0, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *saved, tokens = ctx.saved_tensors
        inputs = HeadInputs(*saved)
        needs = ctx.needs_input_grad
        gradients = HeadGradients(inputs, (*needs[:3], *needs[7:]))

        def add(part: slice) -> None:  # a function, so that nothing of a chunk is there in the next one
            normalized, capped = normalized_part(inputs, part, tokens, ctx.ranks, ctx.cap)
            of_logits = normalized.logit_gradient().mul_(-grad_output[part, None])
            gradients.add(part, before_soft_cap(of_logits, capped, ctx.cap))

        for part in chunks(len(tokens), ctx.chunk):
            add(part)
        of_hidden, of_weight, of_bias, of_low, of_up = gradients.sums()
        return of_hidden, of_weight, of_bias, None, None, None, None, of_low, of_up


def chunks(length: int, size: int) -> list[slice]:
    """Return the slices of at most `size` that `length` positions consist of."""
    return [slice(start, start + size) for start in range(0, length, size)]
