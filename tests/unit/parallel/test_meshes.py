"""Which mesh the parameters of a module are sharded over, asked by path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from mindspeed_mm.parallel import fsdp2
from mindspeed_mm.parallel.fsdp2 import ShardPlan, use_summed_gradients, wrap_modules
from mindspeed_mm.parallel.meshes import ParameterMeshes
from mindspeed_mm.parallel.patterns import containing_path
from mindspeed_mm.parallel.units import whole_units


def mesh(ranks: int) -> Any:
    return SimpleNamespace(size=lambda: ranks)


FOUR, TWO, ONE = mesh(4), mesh(2), mesh(1)
MESHES = ParameterMeshes(FOUR).with_special(["layers.1.mlp.experts", "layers.10"], TWO).with_special(["head"], ONE)


@pytest.mark.parametrize(
    "path, expected",
    [
        ("", FOUR),
        ("layers.1", FOUR),
        ("layers.1.mlp", FOUR),
        ("layers.1.mlp.experts", TWO),
        ("layers.1.mlp.experts.0.down", TWO),
        ("layers.10.norm", TWO),
        ("layers.100", FOUR),
        ("head", ONE),
        ("header", FOUR),
    ],
)
def test_a_module_has_the_mesh_of_the_innermost_module_that_is_named(path: str, expected: Any) -> None:
    assert MESHES.of(path) is expected


def test_the_innermost_of_nested_paths_holds_a_module() -> None:
    assert containing_path("a.b.c", ["", "a.b", "a"]) == "a.b"
    assert containing_path("a", ["a.b"]) is None
    assert containing_path("x", [""]) == ""


def test_ranks_are_spanned_by_any_mesh() -> None:
    assert ParameterMeshes(ONE).with_special(["experts"], TWO).span_ranks
    assert not ParameterMeshes(ONE).with_special(["experts"], ONE).span_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 2)


def plan_of(model: Model) -> ShardPlan:
    """Over four ranks, `norm` and `layers.1` whole."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ignored = {path: model.get_submodule(path) for path in ("norm", "layers.1")}
    params = {p for module in ignored.values() for p in module.parameters()}
    plan = ShardPlan(ParameterMeshes(FOUR), policy, OffloadPolicy(), True, params)
    plan.keep_whole(whole_units(model, ignored), ONE)
    return plan


@pytest.mark.parametrize(
    "root, listed, expected",
    [
        # children first; the model's own unit keeps its parameters between forward and backward
        ("", ["layers.0", "norm"], {"layers.0": True, "layers.1": False, "norm": False, "": None}),
        # a part of the model is asked for by its path in the model
        ("layers", ["0", "1"], {"layers.0": True, "layers.1": False, "layers": None}),
        ("layers.1", [], {"layers.1": False}),
    ],
)
def test_each_unit_is_sharded_over_its_own_mesh(root: str, listed: list[str], expected: dict[str, Any]) -> None:
    model = Model()
    paths, calls = {id(m): path for path, m in model.named_modules()}, {}

    def note(module: nn.Module, **kwargs: Any) -> None:
        calls[paths[id(module)]] = kwargs

    part, plan = model.get_submodule(root), plan_of(model)
    with mock.patch.object(fsdp2, "fully_shard", note):
        wrap_modules(part, {path: part.get_submodule(path) for path in listed}, plan, root)
    assert {path: kwargs["reshard_after_forward"] for path, kwargs in calls.items()} == expected
    for path, kwargs in calls.items():
        whole = path in ("norm", "layers.1")
        assert kwargs["mesh"] is (ONE if whole else FOUR), path
        assert kwargs["ignored_params"] == (None if whole else plan.ignored_params)


def test_gradients_are_summed_over_meshes_of_several_ranks_only() -> None:
    model, asked = Model(), []

    class Sharded(nn.Parameter):
        device_mesh = ONE

    class Unit(nn.Linear):
        def set_gradient_divide_factor(self, factor: float) -> None:
            asked.append((self, factor))

        def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
            asked.append((self, enable))

    for number, ranks in enumerate((FOUR, ONE)):
        model.layers[number] = Unit(2, 2)
        model.layers[number].weight = Sharded(torch.zeros(2, 2))
        model.layers[number].weight.device_mesh = ranks
    with mock.patch.object(fsdp2, "FSDPModule", Unit), mock.patch.object(fsdp2, "DTensor", Sharded):
        use_summed_gradients(model)
    assert asked == [(model.layers[0], 1.0), (model.layers[0], True)]


def test_a_caller_overrides_what_every_unit_has() -> None:
    plan = plan_of(Model())
    plan.override({"mesh": TWO, "reshard_after_forward": False, "ignored_params": None})
    assert plan.kwargs()["mesh"] is TWO and plan.meshes.of("norm") is ONE
    assert plan.kwargs()["reshard_after_forward"] is False and plan.ignored_params == set()
    with pytest.raises(TypeError, match="'shard_placement_fn' is no argument that every unit of fully_shard has"):
        plan.override({"shard_placement_fn": None})
