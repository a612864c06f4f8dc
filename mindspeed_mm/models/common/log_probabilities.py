"""Log-probabilities of target tokens: of whole logits, or of logits that tensor-parallel ranks split by vocabulary.

Of split logits, each rank has the columns of its tokens; the largest logit and the sum of exponentials of a row are
reduced over the ranks, never the logits. Source: the parallel cross entropy of Megatron-LM (Shoeybi et al., arXiv
1909.08053, 3).
"""

from __future__ import annotations

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


def before_soft_cap(gradient: torch.Tensor, capped: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return the gradient with respect to logits before `soft_cap`, in place.

    Args:
        gradient: [n, vocabulary] float32, that with respect to the capped logits.
        capped: [n, vocabulary] float32, the capped logits.
        cap: as it was applied; None: not at all.
    """
    return gradient if cap is None else gradient.mul_(1 - (capped / cap).square())


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
    ) -> torch.Tensor:
        """hidden [n, h], weight [v, h], bias [v] or None, tokens [n] → [n] float32; of a split head, v is its part.

        The logits are capped (`soft_cap`) if there is a `cap`.
        """
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.chunk, ctx.ranks, ctx.cap = chunk, ranks, cap
        parts = [
            normalize(soft_cap(F.linear(hidden[part], weight, bias).float(), cap), tokens[part], ranks).of_targets
            for part in chunks(len(tokens), chunk)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, tokens = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs[1] else None
        grad_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if needs[2] else None
        for part in chunks(len(tokens), ctx.chunk):
            logits = soft_cap(F.linear(hidden[part], weight, bias).float(), ctx.cap)
            gradient = normalize(logits, tokens[part], ctx.ranks).logit_gradient() * -grad_output[part, None]
            gradient = before_soft_cap(gradient, logits, ctx.cap)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ weight
            if grad_weight is not None:
                grad_weight += (gradient.T @ hidden[part]).float()
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def chunks(length: int, size: int) -> list[slice]:
    """Return the slices of at most `size` that `length` positions consist of."""
    return [slice(start, start + size) for start in range(0, length, size)]
