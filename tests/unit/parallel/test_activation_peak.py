"""Bytes of activations at 32,768 tokens, counted on a device that is told of but computes nothing (fake tensors)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config, Qwen3Model

from mindspeed_mm.parallel.chunk_mlp import apply_chunked_mlp
from mindspeed_mm.parallel.offload import apply_offload
from mindspeed_mm.parallel.recompute import apply_recompute
from tests.support.live_bytes import live_bytes_of_a_device

LAYERS, WIDTH, TOKENS = 16, 64, 32_768
Prepare = Callable[[Mapping[str, nn.Module]], None]


def model() -> Qwen3Model:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "vocab_size": 64}
    return Qwen3Model(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)).train()


def attention_of(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {f"{path}.self_attn": block.get_submodule("self_attn") for path, block in blocks.items()}


def recomputed_and_offloaded(blocks: Mapping[str, nn.Module]) -> None:
    apply_recompute(blocks, use_reentrant=False)
    apply_offload(blocks)


def chunked_mlps(blocks: Mapping[str, nn.Module]) -> None:
    mlps = {f"{path}.mlp": block.get_submodule("mlp") for path, block in blocks.items()}
    apply_chunked_mlp(mlps, TOKENS // 8, "chunk_mlp_tokens")


def chunked_and_recomputed(blocks: Mapping[str, nn.Module]) -> None:
    chunked_mlps(blocks)
    apply_recompute(blocks, use_reentrant=False)


PREPARED: dict[str, Prepare] = {
    "nothing": lambda blocks: None,
    "offload": apply_offload,
    "offload of attention": lambda blocks: apply_offload(attention_of(blocks)),
    "recompute": functools.partial(apply_recompute, use_reentrant=False),
    "recompute and offload": recomputed_and_offloaded,
    "recompute but of linear": functools.partial(apply_recompute, use_reentrant=False, keep=("linear",)),
    "recompute but of attention": functools.partial(apply_recompute, use_reentrant=False, keep=("attention",)),
    "chunked MLP": chunked_mlps,
    "recompute and chunked MLP": chunked_and_recomputed,
}


def peak(prepare: Prepare, tokens: int) -> int:
    """Bytes that are alive at once, above parameters and inputs, in a step."""
    trained = model()
    prepare({f"layers.{i}": block for i, block in enumerate(trained.layers)})
    x = torch.randn(1, tokens, WIDTH, requires_grad=True)
    with live_bytes_of_a_device() as live:
        trained(inputs_embeds=x, use_cache=False, attention_mask={"full_attention": None})[0].sum().backward()
    return live.peak


@functools.cache
def fake_peak(name: str, tokens: int = TOKENS) -> int:
    with FakeTensorMode():
        return peak(PREPARED[name], tokens)


@pytest.mark.parametrize(
    ("name", "of", "most"),
    [
        ("offload", "nothing", 0.15),
        ("recompute and offload", "nothing", 0.09),
        ("recompute and offload", "recompute", 0.75),
        ("recompute but of linear", "nothing", 0.51),
        ("chunked MLP", "nothing", 0.52),
        pytest.param("offload of attention", "nothing", 0.75, marks=pytest.mark.full),
        pytest.param("recompute but of attention", "nothing", 0.16, marks=pytest.mark.full),
        pytest.param("recompute and chunked MLP", "nothing", 0.08, marks=pytest.mark.full),
        pytest.param("recompute and chunked MLP", "recompute", 0.7, marks=pytest.mark.full),
    ],
)
def test_share_of_activations(name: str, of: str, most: float) -> None:
    found = fake_peak(name) / fake_peak(of)
    print(f"{name} ÷ {of}: {found:.3f}")
    assert 0.9 * most < found <= most


@pytest.mark.parametrize("name", ["nothing", "offload"])
def test_a_step_that_computes_has_the_same_peak(name: str) -> None:
    assert peak(PREPARED[name], 128) == pytest.approx(fake_peak(name, 128), rel=0.01)
