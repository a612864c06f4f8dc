"""Cross-entropy over target tokens, summed exactly, whole or in chunks.

A step's loss is `sum over the global batch of weight * cross-entropy / denominator`. Which weights and which
denominator is the loss type:

| loss_type | weight of a token | denominator |
|---|---|---|
| per_token_loss | 1 | target tokens of the global batch |
| per_sample_loss | 1 / targets of its row | rows of the global batch |
| square_loss | 1 / sqrt(targets of its row) | sum of these weights over the global batch |
| token_loss | 1 | targets of the same micro-batch on all ranks; mean over micro-batches |
| default | 1 | targets of the micro-batch on one rank; mean over micro-batches and ranks |

The first three don't depend on how a global batch is cut into ranks and micro-batches; the last two do, as published.
Source: names and meanings of MindSpeed-MM's `loss_cfg`; square averaging as in InternVL 2.5 (arXiv 2412.05271, 3.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed_mm.configs.flags.model import LossArguments
from mindspeed_mm.configs.model_config import MAX_LOGITS_MIB, LossConfig, LossType, choose_loss_type
from mindspeed_mm.models.common.log_probabilities import (
    HeadGradients,
    HeadInputs,
    before_soft_cap,
    chunks,
    normalized_part,
    target_log_probabilities,
)
from mindspeed_mm.parallel.sequence import FILL, SequenceShard
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.labels import IGNORE_INDEX

ComputeMode = Literal["default", "chunk", "dynamic_chunk"]


@dataclass(frozen=True)
class LossOptions:
    """loss_cfg of model.json.

    Attributes:
        loss_type: see the module's table.
        compute_mode: `default` computes the logits of all target tokens at once, unless they are larger than
            `max_logits_mib`; `chunk` those of at most `chunk_size` positions per row at a time; `dynamic_chunk` those
            of at most `chunk_size` positions in all.
        chunk_size: see compute_mode.
        max_logits_mib: size in float32 that logits have at most with compute_mode default. Each chunk reads and writes
            the float32 gradient of the head's weight once, which takes a smaller part of the time the larger it is.
    """

    loss_type: LossType = "per_token_loss"
    compute_mode: ComputeMode = "default"
    chunk_size: int = 1024
    max_logits_mib: float = MAX_LOGITS_MIB

    @classmethod
    def of(cls, flags: LossArguments, cfg: LossConfig) -> LossOptions:
        """Return the options that the flags and `loss_cfg` state.

        Raises:
            ConfigError: they ask for different loss types.
        """
        loss_type = choose_loss_type(flags, cfg)
        return cls(loss_type, cfg.compute_mode, cfg.effective_chunk_size, cfg.max_logits_mib)

    def positions_per_chunk(self, batch: int, targets: int, vocabulary: int) -> int | None:
        """Return the number of positions whose logits may exist at once; None: all.

        For dynamic_chunk the published rule is the largest power of two per row that keeps batch * chunk within bounds.

        Args:
            batch: rows of the micro-batch.
            targets: its target positions.
            vocabulary: tokens whose logits this rank computes.
        """
        if self.compute_mode == "default":
            most = max(1, int(self.max_logits_mib * 2**20) // (4 * vocabulary))
            return None if targets <= most else math.ceil(targets / math.ceil(targets / most))
        if self.compute_mode == "chunk":
            return self.chunk_size * batch
        per_row = max(1, self.chunk_size // max(1, batch))
        return (1 << (per_row.bit_length() - 1)) * batch


@dataclass
class Targets:
    """Target positions of a micro-batch, with the tokens they predict and their weights.

    Attributes:
        index: [n] int64, positions in the flattened [batch * sequence] hidden states.
        tokens: [n] int64, the tokens they must predict.
        weights: [n] float32 or None (all 1).
        denominator: float32 scalar that this micro-batch adds to the step's denominator.
    """

    index: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor | None
    denominator: torch.Tensor

    def cut(self, shard: SequenceShard) -> Targets:
        """Return those at the positions of a shard, on the host, with the denominator of the whole micro-batch.

        Selected on whole rows, a target at the end of a shard keeps its token, which is on another rank.
        """
        places = shard.places(self.index)
        own = places != FILL
        weights = None if self.weights is None else self.weights[own]
        return replace(self, index=places[own], tokens=self.tokens[own], weights=weights)


def targets_of_batch(batch: dict[str, Any], loss_type: LossType, documents: torch.Tensor | None = None) -> Targets:
    """Find the target positions of a micro-batch by its `labels`; see `select_targets`.

    `labels_are_shifted` is removed from the batch: true where labels already are the tokens after each position.
    """
    shifted = bool(batch.pop("labels_are_shifted", False))
    return select_targets(batch["labels"], loss_type, documents, is_shifted=shifted)


def select_targets(
    labels: torch.Tensor, loss_type: LossType, documents: torch.Tensor | None = None, *, is_shifted: bool = False
) -> Targets:
    """Find the target positions of a micro-batch.

    Args:
        labels: [batch, sequence] int64, -100 where there is no target. On the host this costs no synchronisation with
            the device.
        loss_type: see the module's table; for packed rows, "row" there means one sample.
        documents: [batch, sequence] int64, number of each position's sample in a packed row, 0 for padding; a sample's
            last token never predicts the next sample's first, unless labels are shifted and say so. None: each row is
            one sample.
        is_shifted: a label is the token after its position; else it is the token at its position.
    """
    shifted = labels if is_shifted else F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    is_target = shifted != IGNORE_INDEX
    row = torch.arange(len(labels), device=labels.device).unsqueeze(1).expand(labels.shape)
    if documents is not None:
        is_target &= documents > 0
        if not is_shifted:
            is_target &= F.pad(documents[:, 1:], (0, 1)) == documents
        row = row * (documents.max() + 1) + documents
    index = is_target.flatten().nonzero().squeeze(1)
    tokens = shifted.flatten()[index]
    row = row.flatten()[index]
    per_row = is_target.sum(1) if documents is None else torch.bincount(row)
    weights = None
    if loss_type in ("per_sample_loss", "square_loss"):
        lengths = per_row.clamp(min=1).float()
        row_weight = 1 / lengths if loss_type == "per_sample_loss" else lengths.rsqrt()
        weights = row_weight[row]
    if loss_type == "per_sample_loss":
        denominator = (per_row > 0).sum().float()
    elif loss_type == "square_loss":
        denominator = weights.sum() if weights is not None else per_row.sum().float()
    else:
        denominator = per_row.sum().float()
    return Targets(index, tokens, weights, denominator)


def weighted_cross_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    ranks: RankSet | None = None,
) -> torch.Tensor:
    """Return the sum of weight * cross-entropy, computed in float32.

    Args:
        logits: [n, vocabulary], any float dtype; of split logits [n, vocabulary / ranks], this rank's columns.
        tokens: [n] int64.
        weights: [n] float32, or None for 1.
        ranks: the ranks that split the vocabulary; None: the logits are whole.

    Returns:
        float32 scalar.
    """
    if weights is None and ranks is None:
        return F.cross_entropy(logits.float(), tokens, reduction="sum")
    return weighted_sum(target_log_probabilities(logits, tokens, ranks), weights)


def weighted_sum(log_probabilities: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of weight * cross-entropy of target tokens with these log-probabilities, [n] float32."""
    return -(log_probabilities if weights is None else log_probabilities * weights).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head projection and cross-entropy, one chunk of positions at a time: only one chunk's logits exist at once.

    The gradients are computed in the forward pass, chunk by chunk, and scaled in backward, so nothing is computed
    twice. In float16 they are multiplied by the expected gradient of the loss, so that they stay in float16's range.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        weights: torch.Tensor | None,
        chunk: int,
        factor: float | torch.Tensor | None = None,
        ranks: RankSet | None = None,
        cap: float | None = None,
        low: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`HeadInputs`, tokens [n], weights [n] or None → float32 scalar sum.

        Of a head that the `ranks` split, v is this rank's part of the vocabulary, and the gradients of `hidden` and
        `low` this rank's part of a sum. The logits are capped (`soft_cap`) if there is a `cap`.
        """
        ctx.factor = factor
        inputs = HeadInputs(hidden, weight, bias, low, up)
        needs = [value is not None and value.requires_grad for value in inputs]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradients = HeadGradients(inputs, needs)

        def loss_of(part: slice) -> torch.Tensor:  # a function, so that nothing of a chunk is there in the next one
            normalized, capped = normalized_part(inputs, part, tokens, ranks, cap)
            if any(needs):
                grad_logits = before_soft_cap(normalized.logit_gradient(), capped, cap)
                if weights is not None:
                    grad_logits *= weights[part, None]
                if factor is not None:
                    grad_logits *= factor
                gradients.add(part, grad_logits)
            return weighted_sum(normalized.of_targets, None if weights is None else weights[part])

        for part in chunks(len(tokens), chunk):
            total += loss_of(part)
        ctx.save_for_backward(*gradients.sums())
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Scale the gradients computed in forward."""
        left = grad_output if ctx.factor is None else grad_output / ctx.factor
        of_head = [None if g is None else g * left.to(g.dtype) for g in ctx.saved_tensors]
        return (*of_head[:3], None, None, None, None, None, None, *of_head[3:])


def chunked_cross_entropy(
    inputs: HeadInputs,
    targets: Targets,
    chunk: int,
    *,
    factor: float | torch.Tensor | None = None,
    ranks: RankSet | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Return the sum of weight * cross-entropy, float32 scalar, of at most `chunk` positions at a time.

    Args:
        inputs: of the target positions.
        targets: their tokens and weights.
        chunk: number of positions whose logits may exist at once.
        factor: approximate gradient of the sum in backward; None: gradients stay in range without it.
        ranks: the ranks that split the head by vocabulary; None: it is whole.
        cap: what logits are capped at (`soft_cap`); None: they aren't.
    """
    if not torch.is_grad_enabled():
        inputs = inputs.detached()
    hidden, weight, bias, *adapter = inputs
    return ChunkedCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden, weight, bias, targets.tokens, targets.weights, chunk, factor, ranks, cap, *adapter
    )


class LossOutput(TypedDict):
    """Output of a model's `forward` for a micro-batch with targets.

    Attributes:
        loss: float32 scalar with graph: a sum, or a mean where `denominator` is None.
        denominator: float32 scalar; the sum is divided by it over the global batch. None: the mean is averaged over
            micro-batches and ranks.
        metrics: name → number, or pair (sum, denominator) of float32 scalars. With a mean, `loss` is the pair that it
            was computed from, by which a step without targets is recognised.
        log_probabilities: [n] float32 with graph, the log-probability of each target token; only if asked for.
    """

    loss: torch.Tensor
    denominator: torch.Tensor | None
    metrics: dict[str, Any]
    log_probabilities: NotRequired[torch.Tensor]


def finish_loss(
    weighted_sum: torch.Tensor, denominator: torch.Tensor, loss_type: LossType, group: dist.ProcessGroup | None = None
) -> LossOutput:
    """Return the output of a model's `forward` for a micro-batch's weighted sum.

    Args:
        weighted_sum: float32 scalar from `weighted_cross_entropy` or `ChunkedCrossEntropy`.
        denominator: that of `Targets`.
        loss_type: see the module's table.
        group: the data-parallel group, for token_loss.
    """
    if loss_type in ("per_token_loss", "per_sample_loss", "square_loss"):
        return {"loss": weighted_sum, "denominator": denominator, "metrics": {}}
    own = (weighted_sum.detach(), denominator)
    if loss_type == "token_loss" and dist.is_initialized():
        everywhere = denominator.clone()
        dist.all_reduce(everywhere, group=group)
        denominator = everywhere / dist.get_world_size(group)
    mean = weighted_sum / denominator.clamp(min=torch.finfo(torch.float32).tiny)
    return {"loss": mean, "denominator": None, "metrics": {"loss": own}}
