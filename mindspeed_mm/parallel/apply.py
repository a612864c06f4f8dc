"""The parallelisms, and what else changes how a model runs, in the one order in which they are applied to it.

    tensor → experts → context → recompute → compile → fully_shard

- tensor splits layers: whatever follows sees the parts, and shards them further.
- experts get a mesh of their own (`ParameterMeshes.with_special`) before the blocks around them are wrapped.
- context hooks into the language model, inside of what recompute runs again: the second forward pass of a block must
  see the same part of a row as the first.
- recompute replaces the forward of blocks, inside of what is compiled.
- compile takes what one block computes, without the hooks that gather its parameters.
- fully_shard comes last and outermost: parameters are gathered before a unit runs any of the others.

A parallelism is a file of its own in this folder and one line in a list below, which calls it where `asked` says that
the run wants it. Where a model's class may apply it in its own way, the line calls a method of `FSDP2Mixin`. There is
nothing yet for tensor, experts, context and compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

from mindspeed_mm.parallel.dims import Dims
from mindspeed_mm.parallel.recompute import BlockRecompute

Parallelism: TypeAlias = Literal["tensor", "experts", "context", "recompute", "compile", "fully_shard"]
ORDER: tuple[Parallelism, ...] = get_args(Parallelism)


class Parallelizable(Protocol):
    """The methods of a model that steps call; FSDP2Mixin has them, and a model's class may override each."""

    def apply_recompute(self, blocks: BlockRecompute) -> None:
        """Recompute blocks in backward as the flags say."""

    def set_recompute_modules_to_wrap(self) -> None:
        """Recompute the modules that fsdp2.yaml names."""

    def set_fullyshard_modules_to_wrap(self, **fsdp2_kwargs: Any) -> None:
        """Make the modules that fsdp2.yaml names units of fully_shard."""

    def set_modules_to_prefetch(self) -> None:
        """Gather the parameters of units before they run, as many as fsdp2.yaml says."""


@dataclass(frozen=True)
class ParallelRequest:
    """What a run asks for, beside fsdp2.yaml, which a model knows.

    Attributes:
        dims: sizes of the kinds of parallelism.
        blocks: what the flags say of recompute.
        fsdp2_kwargs: keyword arguments of fully_shard.
    """

    dims: Dims = field(default_factory=Dims)
    blocks: BlockRecompute = field(default_factory=BlockRecompute)
    fsdp2_kwargs: Mapping[str, Any] = field(default_factory=dict)


def _always(request: ParallelRequest) -> bool:
    return True


@dataclass(frozen=True)
class ParallelStep:
    """One line of the order.

    Attributes:
        parallelism: the place in `ORDER`.
        apply: applies it to a model, in place.
        asked: whether a run asks for it. Methods with a published name are always called, as a class may override
            them to do something where fsdp2.yaml asks for nothing.
    """

    parallelism: Parallelism
    apply: Callable[[Parallelizable, ParallelRequest], None]
    asked: Callable[[ParallelRequest], bool] = _always


#: Applied to every model, before its `_fully_shard`.
MODEL_STEPS: tuple[ParallelStep, ...] = (
    # tensor
    # experts
    # context
    ParallelStep(
        "recompute",
        lambda model, request: model.apply_recompute(request.blocks),
        asked=lambda request: request.blocks.granularity == "full",
    ),
)

#: What `_fully_shard` applies, unless a model's class has one of its own.
WRAPPING_STEPS: tuple[ParallelStep, ...] = (
    ParallelStep("recompute", lambda model, request: model.set_recompute_modules_to_wrap()),
    # compile
    ParallelStep("fully_shard", lambda model, request: model.set_fullyshard_modules_to_wrap(**request.fsdp2_kwargs)),
    ParallelStep("fully_shard", lambda model, request: model.set_modules_to_prefetch()),
)


def apply_parallelisms(model: Parallelizable, request: ParallelRequest, steps: Sequence[ParallelStep]) -> None:
    """Apply to `model` those of `steps` that are asked for, one after the other.

    Args:
        model: is changed in place; values of its parameters aren't needed.
        steps: `MODEL_STEPS` or `WRAPPING_STEPS`.
    """
    for step in steps:
        if step.asked(request):
            step.apply(model, request)
