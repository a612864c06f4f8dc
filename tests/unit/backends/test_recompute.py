"""Which blocks --recompute-granularity full recomputes where fsdp2.yaml says nothing, and that numbers stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.backends.recompute import recompute_blocks
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.runs = nn.Linear(4, 4), nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.dropout(self.linear(x)).sin()


class Model(nn.Module):
    """Two lists of blocks."""

    def __init__(self, lists: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.ModuleList([Block() for _ in range(2 * (lists > 1))])
        self.layers = nn.ModuleList([Block() for _ in range(4 * (lists > 0))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.tower, *self.layers):
            x = block(x)
        return x


def flags(granularity: str | None, method: str | None = None, number: int | None = None) -> Any:
    return SimpleNamespace(recompute_granularity=granularity, recompute_method=method, recompute_num_layers=number)


def trained(model: Model) -> tuple[list[int], list[torch.Tensor]]:
    """Runs of each block in a step; loss and gradients."""
    torch.manual_seed(1)
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    return [block.runs for block in (*model.tower, *model.layers)], [loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "args, runs",
    [
        (flags(None), [1, 1, 1, 1, 1, 1]),
        (flags("selective"), [1, 1, 1, 1, 1, 1]),
        (flags("full"), [2, 2, 2, 2, 2, 2]),
        (flags("full", "uniform", 1), [2, 2, 2, 2, 2, 2]),
        (flags("full", "uniform", 3), [2, 2, 2, 2, 2, 2]),
        (flags("full", "block", 1), [2, 1, 2, 1, 1, 1]),
        (flags("full", "block", 3), [2, 2, 2, 2, 2, 1]),
        (flags("full", "block", 40), [2, 2, 2, 2, 2, 2]),
    ],
    ids=lambda x: " ".join(str(v) for v in vars(x).values() if v) or "absent" if hasattr(x, "__dict__") else "",
)
def test_blocks_run_again_in_backward_and_nothing_else_changes(args: Any, runs: list[int]) -> None:
    model = Model()
    recompute_blocks(model, Fsdp2Config(), args)
    found, values = trained(model)
    assert found == runs
    for value, expected in zip(values, trained(Model())[1], strict=True):
        assert torch.equal(value, expected)


def test_what_is_recomputed_is_said(said: list[str]) -> None:
    recompute_blocks(Model(), Fsdp2Config(), flags("full", "uniform", 3))
    assert said[0] == "--recompute-granularity full: recomputed in backward are tower (2 blocks), layers (4 blocks)"
    assert "every block is recomputed by itself" in said[1]


@pytest.mark.parametrize("modules", [["layers.{0}"], []], ids=["some", "none"])
def test_fsdp2_yaml_decides_where_it_says_what_is_recomputed(said: list[str], modules: list[str]) -> None:
    model = Model()
    recompute_blocks(model, Fsdp2Config(recompute_modules=modules), flags("full", "block", 2))
    assert trained(model)[0] == [1] * 6
    assert said == ["--recompute-granularity full has no effect here: fsdp2.yaml's recompute_modules decide"]


def test_a_model_without_blocks_says_so(said: list[str]) -> None:
    recompute_blocks(Model(lists=0), Fsdp2Config(), flags("full"))
    assert len(said) == 1 and "Model has no list of blocks; name what is to be recomputed" in said[0]
