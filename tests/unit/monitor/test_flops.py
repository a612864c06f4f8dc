"""FLOPs against torch's own counter on a real tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.loading.counting import CountingIterator, drop_host_fields
from mindspeed_mm.data.plan.cost import AttentionCost
from mindspeed_mm.models.common.family import TEXT_TRAITS
from mindspeed_mm.models.common.loss import select_targets
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.monitor.flops import flops_model
from tests.support.counted_flops import counted_flops


def batch(config: object) -> dict[str, torch.Tensor]:
    """One row: an image of 16 patches (4 tokens) in 64 tokens, 20 targets."""
    ids = torch.randint(10, 200, (1, 64))
    ids[:, 2:6] = config.image_token_id  # type: ignore[attr-defined]
    labels = torch.full_like(ids, -100)
    labels[:, -20:] = ids[:, -20:]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "mm_token_type_ids": (ids == config.image_token_id).long(),  # type: ignore[attr-defined]
        "pixel_values": torch.randn(16, 1176),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def test_what_torch_counts(qwen2_5_vl_dir: Path) -> None:
    """Its windows are counted with the patches; 20 of 64 positions have a target."""
    model = TransformersModel({"init_from_hf_path": str(qwen2_5_vl_dir)})
    example = batch(model.model.config)
    iterator = CountingIterator(
        iter([{**example, "media_sizes": torch.tensor([[4, 16, 256], [0, 0, 0], [0, 0, 0]])}]), 1, DefaultAdapter()
    )
    rows = dict(next(iterator))
    drop_host_fields(rows)
    estimate = flops_model(model.model, model.traits)
    assert estimate is not None
    counts = iterator.take()
    assert (counts.tokens, counts.targets, counts.lengths) == (64, 20, [64])
    targets = select_targets(rows["labels"], "per_token_loss")
    found = counted_flops(lambda: model(**rows, targets=targets)["loss"].backward())
    attention = estimate.attention.of(64) + estimate.towers["image"].per_squared_patch * 256
    assert estimate.of(counts) - attention == pytest.approx(found.matrices, rel=0.03)
    assert estimate.attention.of(64) == 4 * 64 * 64 * 64 / 2 * 2 * 3


@pytest.mark.parametrize("length", [5, 8, 19, 40])
def test_windows_and_chunks_see_fewer_pairs(length: int) -> None:
    """Against masks: a token sees itself and those before it; half of the pairs of a token with itself are left out."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    causal = distance >= 0
    chunk = torch.arange(length) // 8
    seen = {
        "whole": causal,
        "windows": causal & (distance < 8),
        "chunks": causal & (chunk[:, None] == chunk),
    }
    costs = {
        "whole": AttentionCost(2.0),
        "windows": AttentionCost(windows={8: 2.0}),
        "chunks": AttentionCost(chunks={8: 2.0}),
    }
    for name, cost in costs.items():
        pairs = int(seen[name].sum()) - min(length, 8 if name == "windows" else length) / 2
        assert cost.of(length) == pytest.approx(2 * pairs, abs=length), name


def test_a_token_goes_through_its_experts_only() -> None:
    """Two of eight experts: a quarter of their weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, head_dim=16, vocab_size=128))
    estimate = flops_model(model, TEXT_TRAITS)
    attention, router = 2 * 64 * 64 + 2 * 64 * 32, 8 * 64
    assert estimate is not None
    assert estimate.per_token == 6 * (attention + router + 2 * 3 * 24 * 64)


def test_a_frozen_tower_costs_its_forward_only(qwen2_5_vl_dir: Path) -> None:
    whole = TransformersModel({"init_from_hf_path": str(qwen2_5_vl_dir)})
    frozen = TransformersModel(
        {"init_from_hf_path": str(qwen2_5_vl_dir), "image_encoder": {"vision_encoder": {"freeze": True}}}
    )
    frozen.model.model.visual.requires_grad_(False)
    a, b = (flops_model(m.model, m.traits) for m in (whole, frozen))
    assert a is not None and b is not None
    trained, forward = a.towers["image"], b.towers["image"]
    first = whole.model.model.visual.patch_embed.proj.weight.numel()  # its input has no gradient
    assert forward.per_patch * 3 == trained.per_patch + 2 * first
    assert forward.per_squared_patch * 3 == trained.per_squared_patch
    assert b.per_token == a.per_token
