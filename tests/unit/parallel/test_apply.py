"""The one order in which parallelisms are applied to a model, and who may change it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common import base_model
from mindspeed_mm.models.common.base_model import FSDP2Mixin, applies_flags, refuse_own_sharding
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.parallel.apply import (
    MODEL_STEPS,
    ORDER,
    WRAPPING_STEPS,
    Parallelizable,
    ParallelRequest,
    ParallelStep,
    apply_parallelisms,
)
from mindspeed_mm.parallel.recompute import BlockRecompute
from mindspeed_mm.utils.errors import ConfigError

FULL = BlockRecompute("full", "block", 1)


class Recorder(nn.Module, FSDP2Mixin):
    """A model whose every step notes that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def _pre_fully_shard(self, process_group: Any, fsdp2_config_path: Any) -> tuple[dict[str, Any], Fsdp2Config]:
        self.calls.append("pre")
        self._dims = Dims(dp=2, dp_shard=2, ep=2)
        return {"reshard_after_forward": False}, Fsdp2Config()

    def set_expert_parallel(self, **kwargs: Any) -> None:
        self.calls.append(f"experts {kwargs}")

    def apply_recompute(self, blocks: BlockRecompute) -> None:
        self.calls.append(f"recompute {blocks.method} {blocks.num_layers}")

    def set_recompute_modules_to_wrap(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("recompute")

    def set_fullyshard_modules_to_wrap(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"fully_shard {kwargs}")

    def set_modules_to_prefetch(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("prefetch")

    def _post_fully_shard(self) -> None:
        self.calls.append("post")


class OwnSharding(Recorder):
    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        self.calls.append(f"own {fsdp2_kwargs}")


class AroundSharding(Recorder):
    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        self.calls.append("before")
        super()._fully_shard(fsdp2_kwargs, fsdp2_config)
        self.calls.append("after")


EXPERTS = "experts {'reshard_after_forward': False}"
WRAPPED = ["fully_shard {'reshard_after_forward': False}", "prefetch"]


def calls_of(kind: type[Recorder], blocks: BlockRecompute) -> list[str]:
    model = kind()
    with build_context(BuildContext(recompute=blocks)):
        assert model.fully_shard() is True
    return model.calls


def test_a_step_is_called_where_the_order_has_it() -> None:
    assert calls_of(Recorder, BlockRecompute()) == ["pre", EXPERTS, "recompute", *WRAPPED, "post"]
    assert calls_of(Recorder, FULL) == ["pre", EXPERTS, "recompute block 1", "recompute", *WRAPPED, "post"]


def test_a_class_that_shards_itself_replaces_what_wraps_but_not_what_flags_ask_for() -> None:
    own = "own {'reshard_after_forward': False}"
    assert calls_of(OwnSharding, BlockRecompute()) == ["pre", EXPERTS, own, "post"]
    assert calls_of(OwnSharding, FULL) == ["pre", EXPERTS, "recompute block 1", own, "post"]
    assert calls_of(AroundSharding, FULL) == [
        "pre", EXPERTS, "recompute block 1", "before", "recompute", *WRAPPED, "after", "post"
    ]  # fmt: skip


def test_lists_follow_the_order() -> None:
    for steps in (MODEL_STEPS, WRAPPING_STEPS):
        places = [ORDER.index(step.parallelism) for step in steps]
        assert all(first <= second for first, second in pairwise(places))
    asked = {step.parallelism for step in (*MODEL_STEPS, *WRAPPING_STEPS)}
    assert asked == {"float8", "tensor", "experts", "context", "mlp", "compile"} | {
        "recompute",
        "offload",
        "chunks",
        "fully_shard",
    }
    assert ORDER.index(MODEL_STEPS[-1].parallelism) <= ORDER.index(WRAPPING_STEPS[0].parallelism)


def note(name: str) -> Any:
    def apply(model: Any, request: ParallelRequest) -> None:
        model.calls.append(f"{name} {request.dims.ep}")

    return apply


@pytest.mark.parametrize("kind", [Recorder, OwnSharding])
def test_a_parallelism_is_one_more_line(monkeypatch: pytest.MonkeyPatch, kind: type[Recorder]) -> None:
    """It reaches a class that shards itself; what isn't asked for is not called."""
    tensor = ParallelStep("tensor", note("tensor"), asked=lambda request: request.dims.ep > 1)
    context = ParallelStep("context", note("context"), asked=lambda request: request.dims.cp > 1)
    compiled = ParallelStep("compile", note("compile"))
    monkeypatch.setattr(base_model, "MODEL_STEPS", (tensor, context, *MODEL_STEPS))
    monkeypatch.setattr(base_model, "WRAPPING_STEPS", (WRAPPING_STEPS[0], compiled, *WRAPPING_STEPS[1:]))
    calls = calls_of(kind, FULL)
    assert calls[:4] == ["pre", "tensor 2", EXPERTS, "recompute block 1"]
    if kind is Recorder:
        assert calls[4:] == ["recompute", "compile 2", *WRAPPED, "post"]


def test_steps_are_applied_one_after_the_other() -> None:
    steps = [ParallelStep(place, note(place)) for place in ORDER]
    model: Any = Recorder()
    typed: Parallelizable = model
    apply_parallelisms(typed, ParallelRequest(Dims(ep=4)), steps)
    assert model.calls == [f"{place} 4" for place in ORDER]


class OwnDoor(nn.Module):
    def fully_shard(self, **kwargs: Any) -> bool:
        return True


class OwnDoorOverTheMixin(nn.Module, FSDP2Mixin):
    def fully_shard(self, process_group: Any = None, fsdp2_config_path: Any = None) -> bool:
        return True


def test_flags_are_left_to_the_mixin_and_to_nobody_else() -> None:
    assert applies_flags(Recorder()) and applies_flags(OwnSharding())
    assert not applies_flags(OwnDoor()) and not applies_flags(OwnDoorOverTheMixin())


@pytest.mark.parametrize(
    ("dims", "key", "what"),
    [
        (Dims(ring=2), "--context-parallel-size 2", "tokens"),
        (Dims(tp=2), "--tensor-model-parallel-size 2", "layers"),
        (Dims(dp=2, ep=2), "expert_parallel_size 2", "experts"),
    ],
)
def test_a_model_that_shards_itself_in_its_own_way_is_refused_a_parallelism(dims: Dims, key: str, what: str) -> None:
    refuse_own_sharding(Recorder(), dims)
    refuse_own_sharding(OwnDoor(), Dims(dp=2))
    for model in (OwnDoor(), OwnDoorOverTheMixin()):
        with pytest.raises(ConfigError, match=rf"{key}: {type(model).__name__} .* doesn't split {what} over ranks"):
            refuse_own_sharding(model, dims)


@pytest.mark.parametrize("dims", [Dims(dp=2, ep=2), Dims(tp=2)])
def test_a_class_that_builds_no_meshes_is_refused_what_needs_them(dims: Dims) -> None:
    with build_context(BuildContext(dims=dims)), pytest.raises(ConfigError, match=r"call super\(\)._pre_fully_shard"):
        Recorder().fully_shard()
