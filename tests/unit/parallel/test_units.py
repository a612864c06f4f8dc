"""Units of fully_shard: children before parents, modules that share a weight together."""

from __future__ import annotations

from torch import nn

from mindspeed_mm.parallel.patterns import expand_patterns
from mindspeed_mm.parallel.units import group_into_units


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def units(model: nn.Module, *patterns: str) -> list[list[str]]:
    names = {id(m): n for n, m in model.named_modules()}
    found = expand_patterns(model, patterns, where="test")
    return [[names[id(m)] for m in unit] for unit in group_into_units(model, found)]


def test_children_come_before_parents() -> None:
    assert units(Tied(), "layers", "layers.{*}") == [["layers.0"], ["layers.1"], ["layers"]]


def test_tied_modules_become_one_unit() -> None:
    assert [sorted(u) for u in units(Tied(), "embed", "layers.{*}", "head")] == [
        ["layers.0"],
        ["layers.1"],
        ["embed", "head"],
    ]


def test_a_tied_module_off_the_list_joins_its_partner() -> None:
    for listed in ("embed", "head"):
        assert [sorted(u) for u in units(Tied(), listed)] == [["embed", "head"]]


def test_nothing_tied_is_listed() -> None:
    assert units(Tied(), "layers.{1}") == [["layers.1"]]
