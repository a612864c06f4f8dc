"""The order in which parallelisms and other transformations are applied to a model.

    float8 → tensor → experts → context → mlp → compile → recompute → offload → chunks → fully_shard

- float8 replaces linear layers by others with the same parameters; all that follows sees these.
- tensor splits layers: the following transformations see the parts, and shard them further.
- experts get a separate mesh (`ParameterMeshes.with_special`) before the blocks around them are wrapped.
- context hooks into the language model, inside of recomputed blocks: the second forward pass of a block must receive
  the same part of a row as the first.
- mlp lets the MLPs inside of blocks run on parts of the tokens.
- compile replaces the forward method of blocks by a compiled one, without the hooks that gather their parameters.
- recompute calls it again in backward: what autograd's hooks and a reentrant backward pass do is no part of a graph.
- offload moves what a module keeps for backward, of a recomputed one its input.
- chunks calls a module, with recompute and offload, on some rows of a micro-batch at a time.
- fully_shard is last and outermost: parameters are gathered before a unit runs any of the others.

Each parallelism is one file in this folder and one entry in a list below, which is applied if its `asked` returns True.
If a model's class may override how it is applied, the entry calls a method of `FSDP2Mixin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.parallel.recompute import BlockRecompute

Parallelism: TypeAlias = Literal[
    "float8", "tensor", "experts", "context", "mlp", "compile", "recompute", "offload", "chunks", "fully_shard"
]
ORDER: tuple[Parallelism, ...] = get_args(Parallelism)


class Parallelizable(Protocol):
    """The methods of a model that the steps call; FSDP2Mixin implements them, and a model's class may override each."""

    def set_float8(self) -> None:
        """Let linear layers multiply in float8."""

    def set_tensor_parallel(self) -> None:
        """Split layers over tensor-parallel ranks."""

    def set_expert_parallel(self, **fsdp2_kwargs: Any) -> None:
        """Split the experts that fsdp2.yaml names over ranks, and shard each rank's part."""

    def set_context_parallel(self) -> None:
        """Split the tokens of rows over the context-parallel ranks."""

    def set_compile(self) -> None:
        """Compile the computation of the modules that fsdp2.yaml names."""

    def set_chunk_mlp(self) -> None:
        """Run MLPs on parts of the tokens, as fsdp2.yaml or the flag says."""

    def apply_recompute(self, blocks: BlockRecompute) -> None:
        """Recompute blocks in backward according to the flags."""

    def set_recompute_modules_to_wrap(self) -> None:
        """Recompute the modules that fsdp2.yaml names."""

    def set_activation_offload(self) -> None:
        """Keep what the modules that fsdp2.yaml names save for backward in host memory until then."""

    def set_chunk_mbs(self) -> None:
        """Run the modules that fsdp2.yaml names on chunks of a micro-batch."""

    def set_fullyshard_modules_to_wrap(self, **fsdp2_kwargs: Any) -> None:
        """Wrap the modules that fsdp2.yaml names as units of fully_shard."""

    def set_modules_to_prefetch(self) -> None:
        """Prefetch the parameters of as many units as fsdp2.yaml sets."""


@dataclass(frozen=True)
class ParallelRequest:
    """The parallelism settings of a run in addition to fsdp2.yaml, which the model has itself.

    Attributes:
        dims: sizes of the parallelisms.
        blocks: recompute flags.
        fsdp2_kwargs: keyword arguments of fully_shard.
        float8: whether linear layers multiply in float8.
        compiled: whether modules are compiled.
    """

    dims: Dims = field(default_factory=Dims)
    blocks: BlockRecompute = field(default_factory=BlockRecompute)
    fsdp2_kwargs: Mapping[str, Any] = field(default_factory=dict)
    float8: bool = False
    compiled: bool = False


def _always(request: ParallelRequest) -> bool:
    return True


@dataclass(frozen=True)
class ParallelStep:
    """One entry of the order.

    Attributes:
        parallelism: its position in `ORDER`.
        apply: applies the parallelism to a model, in place.
        asked: whether a run requests the parallelism. Methods with a published name are always called, as a class may
            override them to act even if fsdp2.yaml requests nothing.
    """

    parallelism: Parallelism
    apply: Callable[[Parallelizable, ParallelRequest], None]
    asked: Callable[[ParallelRequest], bool] = _always


#: Applied to every model, before its `_fully_shard`.
MODEL_STEPS: tuple[ParallelStep, ...] = (
    ParallelStep("float8", lambda model, request: model.set_float8(), asked=lambda request: request.float8),
    ParallelStep(
        "tensor", lambda model, request: model.set_tensor_parallel(), asked=lambda request: request.dims.tp > 1
    ),
    ParallelStep(
        "experts",
        lambda model, request: model.set_expert_parallel(**request.fsdp2_kwargs),
        asked=lambda request: request.dims.splits_experts,
    ),
    ParallelStep(
        "context",
        lambda model, request: model.set_context_parallel(),
        asked=lambda request: request.dims.cp > 1,
    ),
    ParallelStep("mlp", lambda model, request: model.set_chunk_mlp()),
    ParallelStep("compile", lambda model, request: model.set_compile(), asked=lambda request: request.compiled),
    ParallelStep(
        "recompute",
        lambda model, request: model.apply_recompute(request.blocks),
        asked=lambda request: request.blocks.granularity is not None,
    ),
)

#: Applied by `_fully_shard`, unless a model's class overrides it.
WRAPPING_STEPS: tuple[ParallelStep, ...] = (
    ParallelStep("recompute", lambda model, request: model.set_recompute_modules_to_wrap()),
    ParallelStep("offload", lambda model, request: model.set_activation_offload()),
    ParallelStep("chunks", lambda model, request: model.set_chunk_mbs()),
    ParallelStep("fully_shard", lambda model, request: model.set_fullyshard_modules_to_wrap(**request.fsdp2_kwargs)),
    ParallelStep("fully_shard", lambda model, request: model.set_modules_to_prefetch()),
)


def apply_parallelisms(model: Parallelizable, request: ParallelRequest, steps: Sequence[ParallelStep]) -> None:
    """Apply the requested ones of `steps` to `model`, in order.

    Args:
        model: changed in place; it may be on the meta device.
        steps: `MODEL_STEPS` or `WRAPPING_STEPS`.
    """
    for step in steps:
        if step.asked(request):
            step.apply(model, request)
