"""Which blocks --recompute-granularity full recomputes where fsdp2.yaml says nothing, and that numbers stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.recompute import BlockRecompute, recompute_blocks


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


def recompute(model: Model, blocks: BlockRecompute, config: Fsdp2Config | None = None) -> Model:
    recompute_blocks(model, block_lists(model), config or Fsdp2Config(), blocks)
    return model


def trained(model: Model) -> tuple[list[int], list[torch.Tensor]]:
    """Runs of each block in a step; loss and gradients."""
    torch.manual_seed(1)
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    return [block.runs for block in (*model.tower, *model.layers)], [loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "blocks, runs",
    [
        (BlockRecompute(None), [1, 1, 1, 1, 1, 1]),
        (BlockRecompute("selective"), [1, 1, 1, 1, 1, 1]),
        (BlockRecompute("full"), [2, 2, 2, 2, 2, 2]),
        (BlockRecompute("full", "uniform", 1), [2, 2, 2, 2, 2, 2]),
        (BlockRecompute("full", "uniform", 3), [2, 2, 2, 2, 2, 2]),
        (BlockRecompute("full", "block", 1), [2, 1, 2, 1, 1, 1]),
        (BlockRecompute("full", "block", 3), [2, 2, 2, 2, 2, 1]),
        (BlockRecompute("full", "block", 40), [2, 2, 2, 2, 2, 2]),
    ],
    ids=lambda x: " ".join(str(v) for v in vars(x).values() if v) or "absent" if hasattr(x, "__dict__") else "",
)
def test_blocks_run_again_in_backward_and_nothing_else_changes(blocks: BlockRecompute, runs: list[int]) -> None:
    found, values = trained(recompute(Model(), blocks))
    assert found == runs
    for value, expected in zip(values, trained(Model())[1], strict=True):
        assert torch.equal(value, expected)


def test_what_is_recomputed_is_said(said: list[str]) -> None:
    recompute(Model(), BlockRecompute("full", "uniform", 3))
    assert said[0] == "--recompute-granularity full: recomputed in backward are tower (2 blocks), layers (4 blocks)"
    assert "every block is recomputed by itself" in said[1]


@pytest.mark.parametrize("modules", [["layers.{0}"], []], ids=["some", "none"])
def test_fsdp2_yaml_decides_where_it_says_what_is_recomputed(said: list[str], modules: list[str]) -> None:
    model = recompute(Model(), BlockRecompute("full", "block", 2), Fsdp2Config(recompute_modules=modules))
    assert trained(model)[0] == [1] * 6
    assert said == ["--recompute-granularity full has no effect here: fsdp2.yaml's recompute_modules decide"]


def test_a_model_without_blocks_says_so(said: list[str]) -> None:
    recompute(Model(lists=0), BlockRecompute("full"))
    assert len(said) == 1 and "Model has no list of blocks; name what is to be recomputed" in said[0]
