"""Which sizes of a sharded block are symbols of its compiled function: a constant makes faster code."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mindspeed_mm.parallel.compile import apply_compile
from tests.support.compiled import counting
from tests.support.workers import RankPool

RECORDING = "recording_symbols"
FOUND: list[int] = []


def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
    """A backend of torch.compile."""
    FOUND.append(sum(not isinstance(each, torch.Tensor) or not each.dim() for each in inputs))
    return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_size, self.scale = 4, 0.5
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads = self.inner(hidden).view(*hidden.shape[:-1], -1, self.head_size)
        cos, sin = (table.unsqueeze(-2) for table in tables)
        return hidden + (heads * cos + heads.flip(-1) * sin).flatten(-2) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, tables)
        return hidden


def symbols_of_graphs(head_sizes: list[int]) -> list[int]:
    """Number of inputs of each graph that are numbers, after passes of as many lengths."""
    FOUND.clear()
    if RECORDING not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(record, name=RECORDING)
    model = Model()
    apply_compile(model, dict(model.layers.named_children()), RECORDING, "fsdp2.yaml: compile")
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    with counting():
        for tokens, size in enumerate(head_sizes, 3):
            tables = torch.randn(2, tokens, size)
            model(torch.randn(tokens, 8, requires_grad=True), (tables[0], tables[1])).sum().backward()
    return FOUND


def test_only_numbers_of_tokens_are_symbols(ranks1: RankPool) -> None:
    """Neither what a module states, nor its inputs' last sizes, which are those of heads."""
    (found,) = ranks1.run(symbols_of_graphs, [4] * 5)
    assert found == [3]  # of one input each


def test_another_last_size_is_compiled_for(ranks1: RankPool) -> None:
    (found,) = ranks1.run(symbols_of_graphs, [4, 4, 1, 4, 1])
    assert found == [3, 3]  # a size of one is a kind of its own
