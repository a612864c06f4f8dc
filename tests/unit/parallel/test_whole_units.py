"""Which modules are wrapped so that ignored ones compute in the dtype of the others."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm.parallel.units import whole_units


def model() -> nn.Module:
    root = nn.Module()
    root.embed, root.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    root.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    root.quantised = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    root.activation = nn.GELU()
    return root


def names(root: nn.Module, *ignored: str) -> list[str]:
    return list(whole_units(root, {path: root.get_submodule(path) for path in ignored}))


def test_a_list_has_no_forward() -> None:
    assert names(model(), "blocks", "head") == ["blocks.0", "blocks.1", "head"]


def test_modules_of_several_dtypes_and_of_none_are_left_alone() -> None:
    assert names(model(), "quantised", "activation") == []


def test_a_tied_module_goes_along() -> None:
    root = model()
    root.head.weight = root.embed.weight
    assert names(root, "head") == ["head", "embed"]
    assert torch.equal(root.head.weight, root.embed.weight)
