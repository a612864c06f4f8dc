"""Recompute that keeps outputs of operations: what runs again in backward, and that no number changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.block_recompute import recompute_by_flags
from mindspeed_mm.models.common.build_context import BuildContext
from mindspeed_mm.models.common.memory_layers import plan_memory
from mindspeed_mm.parallel.recompute import BlockRecompute, apply_recompute
from mindspeed_mm.parallel.selective import kept_outputs
from mindspeed_mm.utils.errors import ConfigError

LAYERS, WIDTH = 3, 16


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn, self.mlp, self.dropout = Attention(dropout), MLP(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.self_attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        kinds = {"mm": "linear", "addmm": "linear", "native_layer_norm": "norm", "silu": "silu"}
        if "attention" in name and "backward" not in name:
            self.runs["attention"] += 1
        elif name in kinds:
            self.runs[kinds[name]] += 1
        return func(*args, **(kwargs or {}))


def backward(model: Model) -> tuple[dict[str, int], list[torch.Tensor]]:
    """The operators of a backward pass; loss and gradients."""
    torch.manual_seed(1)
    loss = model(torch.linspace(-1, 1, 2 * 5 * WIDTH).view(2, 5, WIDTH).requires_grad_()).square().sum()
    with Operators() as operators:
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return dict(operators.runs), [loss.detach(), *gradients]


PLAIN = {"linear": 8 * LAYERS}  # of each layer's four products, two each
ALL = {"linear": 11 * LAYERS, "norm": 2 * LAYERS, "silu": LAYERS, "attention": LAYERS}  # not the last product


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        ((), ALL),
        (("linear",), {**ALL, **PLAIN}),
        (("attention",), {name: n for name, n in ALL.items() if name != "attention"}),
        (("linear", "attention"), {**PLAIN, "norm": 2 * LAYERS, "silu": LAYERS}),
    ],
)
def test_what_runs_again(keep: Any, again: dict[str, int]) -> None:
    model = Model()
    apply_recompute({f"layers.{i}": block for i, block in enumerate(model.layers)}, use_reentrant=True, keep=keep)
    expected, values = backward(Model())
    assert expected == PLAIN
    found, kept = backward(model)
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
    if keep:
        assert found == again
    else:  # the reentrant engine runs the last product of a block again, too
        assert found == {**ALL, "linear": 12 * LAYERS}


def test_attention_with_dropout_draws_the_same_numbers_again() -> None:
    kept = Model(dropout=0.5)
    apply_recompute({f"layers.{i}": b for i, b in enumerate(kept.layers)}, use_reentrant=False, keep=("attention",))
    assert all(torch.equal(a, b) for a, b in zip(backward(kept)[1], backward(Model(dropout=0.5))[1], strict=True))


@pytest.mark.parametrize(("dropout", "is_kept"), [(0.0, True), (0.5, False)])
def test_kernels_that_draw_numbers_run_again(dropout: float, is_kept: bool) -> None:
    """With dropout the host takes no kernel: the policy is asked about one of a device."""
    policy = kept_outputs(["attention"])()[0].policy_fn
    kernel, q = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.zeros(1, 1, 4, 8)
    expected = CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(None, kernel, q, q, q, dropout) == expected
    assert policy(None, kernel, query=q, key=q, value=q, dropout_p=dropout) == expected


@pytest.mark.parametrize(
    ("modules", "again"),
    [
        (("core_attn",), {**PLAIN, "attention": LAYERS}),
        (("mlp",), {"linear": 9 * LAYERS, "silu": LAYERS}),
        (("layernorm", "core_attn"), {**PLAIN, "attention": LAYERS, "norm": 2 * LAYERS}),
    ],
)
def test_parts_of_blocks(modules: tuple[str, ...], again: dict[str, int], said: list[str]) -> None:
    model, asked = Model(), BlockRecompute("selective", modules=modules)
    recompute_by_flags(model, Fsdp2Config(), asked)
    found, values = backward(model)
    assert found == again and len(said) == len(modules)
    assert all(torch.equal(a, b) for a, b in zip(values, backward(Model())[1], strict=True))
    asked = BlockRecompute("selective", modules=("moe",))
    recompute_by_flags(model, Fsdp2Config(), asked)
    assert said[-1] == "--recompute-granularity selective, moe: there is nothing like it in the blocks of Model"


@pytest.mark.parametrize(("number", "attention"), [(None, LAYERS), (0, 0), (1, LAYERS - 1), (9, 0)])
def test_whole_blocks_that_keep_attention(number: int | None, attention: int) -> None:
    model = Model()
    recompute_by_flags(model, Fsdp2Config(), BlockRecompute("full", blocks_that_keep_attention=number))
    assert backward(model)[0].get("attention", 0) == attention


def test_the_file_replaces_the_flags(said: list[str]) -> None:
    model = Model()
    recompute_by_flags(model, Fsdp2Config(recompute_modules=[]), BlockRecompute("selective"))
    assert backward(model)[0] == PLAIN and "fsdp2.yaml's recompute_modules decide" in said[0]


def test_what_is_planned() -> None:
    file = Fsdp2Config(recompute_modules=["layers.{0}"], recompute_keep=["attention"])
    planned = plan_memory(Model(), file, Dims(), BuildContext())
    assert list(planned.recomputed) == ["layers.0"] and planned.kept == ("attention",)
    asked = BuildContext(recompute=BlockRecompute("selective"), swap_attention=True, chunk_mlp_tokens=4)
    planned = plan_memory(Model(), Fsdp2Config(), Dims(), asked)
    attention = [f"layers.{i}.self_attn" for i in range(LAYERS)]
    assert list(planned.recomputed) == list(planned.offloaded) == attention and planned.kept == ("linear",)
    assert list(planned.chunked_mlps) == [f"layers.{i}.mlp" for i in range(LAYERS)]
    with pytest.raises(ConfigError, match="a ring of 2 context-parallel ranks merges the results of its kernels"):
        plan_memory(Model(), file, Dims(ring=2), BuildContext())
    compiled = Fsdp2Config(compile=True)
    with pytest.raises(
        ConfigError, match=r"'layers.0' is compiled as a whole, and 'layers.0.self_attn' in it is to be"
    ):
        plan_memory(Model(), compiled, Dims(), BuildContext(swap_attention=True))
    with pytest.raises(
        ConfigError, match=r"'layers.0' is compiled as a whole, and what it keeps \(attention\) is to be"
    ):
        plan_memory(Model(), file.model_copy(update={"compile": True}), Dims(), BuildContext())


def test_swapped_attention_of_what_is_recomputed(said: list[str]) -> None:
    file = Fsdp2Config(recompute_modules=["layers.{0}"])
    planned = plan_memory(Model(), file, Dims(), BuildContext(swap_attention=True))
    assert list(planned.offloaded) == ["layers.1.self_attn", "layers.2.self_attn"] and said == []
    everything = BuildContext(swap_attention=True, recompute=BlockRecompute("full"))
    assert not plan_memory(Model(), Fsdp2Config(), Dims(), everything).offloaded
    assert "--swap-attention has no effect here: all blocks are recomputed" in said[-1]
    assert not plan_memory(nn.Linear(1, 1), Fsdp2Config(), Dims(), BuildContext(swap_attention=True)).offloaded
    assert "no attention was found in the blocks of Linear" in said[-1]


def test_the_reentrant_engine_keeps_nothing() -> None:
    assert Fsdp2Config.from_dict({"recompute_keep": ["linear"], "use_reentrant": False}).recompute_keep == ["linear"]
    with pytest.raises(ConfigError, match="'use_reentrant' is true, and 'recompute_keep' needs the other engine"):
        Fsdp2Config.from_dict({"recompute_keep": ["linear"], "use_reentrant": True})
    with pytest.raises(ConfigError, match="recompute_keep"):
        Fsdp2Config.from_dict({"recompute_keep": ["matmul"]})
