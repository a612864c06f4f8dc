"""Parameter groups: decay by dimension, learning-rate multipliers by name."""

from __future__ import annotations

import pytest
from torch import nn

from mindspeed_mm.optimizer.groups import build_param_groups
from mindspeed_mm.utils.errors import ConfigError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.expert_bias = nn.Parameter(nn.Linear(3, 2).weight.data.clone())  # a bias by name, two-dimensional


def decays(groups: list[dict]) -> dict[str, tuple[float, float]]:
    return {n: (g["wd_mult"], g["lr_mult"]) for g in groups for n in g["names"]}


def test_decay_goes_by_dimension_not_by_name() -> None:
    assert decays(build_param_groups(Model().named_parameters())) == {
        "expert_bias": (1.0, 1.0),
        "tower.weight": (1.0, 1.0),
        "tower.bias": (0.0, 1.0),
        "norm.weight": (0.0, 1.0),
        "norm.bias": (0.0, 1.0),
    }


def test_names_exclude_from_decay_and_scale_the_rate() -> None:
    groups = build_param_groups(
        Model().named_parameters(), no_decay_names=["EXPERT"], scaled_names=["tower"], lr_mult=0.1
    )
    found = decays(groups)
    assert found["expert_bias"] == (0.0, 1.0)
    assert found["tower.weight"] == (1.0, 0.1)
    assert found["tower.bias"] == (0.0, 0.1)


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.tower.requires_grad_(False)
    assert not any(n.startswith("tower") for n in decays(build_param_groups(model.named_parameters())))


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--lr-scale-modules towr: no trainable parameter.*did you mean 'tower'"):
        build_param_groups(Model().named_parameters(), scaled_names=["towr"])


def test_nothing_trainable_is_an_error() -> None:
    model = Model().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter is trainable"):
        build_param_groups(model.named_parameters())
