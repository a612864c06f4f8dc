"""FLOPs against torch's own counter on a real tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.loading.counting import CountingIterator
from mindspeed_mm.models.common.family import TEXT_TRAITS
from mindspeed_mm.models.common.loss import select_targets
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.monitor.flops import flops_model


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


def test_close_to_what_torch_counts(qwen2_5_vl_dir: Path) -> None:
    model = TransformersModel({"init_from_hf_path": str(qwen2_5_vl_dir)})
    example = batch(model.model.config)
    iterator = CountingIterator(iter([example]), 1, DefaultAdapter())
    rows = dict(next(iterator))
    estimate = flops_model(model.model, model.traits)
    assert estimate is not None
    counts = iterator.take()
    assert (counts.tokens, counts.targets, counts.squared_lengths, counts.patches) == (64, 20, 64 * 64, 16)
    with FlopCounterMode(display=False) as counter:
        model(**rows, targets=select_targets(rows["labels"], "per_token_loss"))["loss"].backward()
    # torch counts whole attention scores, the merger per merged patch, and not the embedding
    assert 0.7 < estimate.of(counts) / counter.get_total_flops() < 1.3


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
    assert b.per_patch * 3 == a.per_patch
    assert b.per_token == a.per_token
