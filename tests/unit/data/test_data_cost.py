"""What a sample costs, foreseen from config.json, against what the FLOPs counter says of the built model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DeepseekVLHybridConfig

from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.data.media.media import MediaSize, SampleSize
from mindspeed_mm.data.plan.cost import AttentionCost, CostModel
from mindspeed_mm.models.common.family import freeze_parts
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.monitor.flops import FlopsModel, flops_model


def counter_of(directory: Path, *frozen: str) -> FlopsModel:
    """The coefficients by `monitor/flops.py`, which counts the parameters of the model itself."""
    config = AutoConfig.from_pretrained(directory)
    model_class = ModelHub.find(config.model_type)
    assert model_class is not None
    with torch.device("meta"):
        model = model_class(config)
    freeze_parts(model, model_class.traits, dict.fromkeys(frozen, True))
    counted = flops_model(model, model_class.traits)
    assert counted is not None
    return counted


def text_only(length: int, counted: FlopsModel) -> float:
    return counted.of(BatchCounts(tokens=length, targets=length, lengths=[length]))


def test_texts_cost_what_the_counter_counts(qwen3_dir: Path, deep_qwen3_dir: Path) -> None:
    for directory in (qwen3_dir, deep_qwen3_dir):
        costs, counted = CostModel.from_config(directory), counter_of(directory)
        assert costs.cost(SampleSize(1)) == pytest.approx(text_only(1, counted), rel=0.03)
        assert costs.attention == counted.attention


@pytest.mark.parametrize(
    "frozen, options",
    [
        ((), {}),
        (("vision_encoder", "vision_projector"), {"tower_trained": False}),
        (("text_decoder",), {"text_trained": False}),
        (("text_decoder", "vision_encoder", "vision_projector"), {"text_trained": False, "tower_trained": False}),
    ],
)
def test_pictures_and_frozen_parts(qwen2_5_vl_dir: Path, frozen: tuple[str, ...], options: dict[str, bool]) -> None:
    costs, counted = CostModel.from_config(qwen2_5_vl_dir, **options), counter_of(qwen2_5_vl_dir, *frozen)
    assert costs.cost(SampleSize(500)) == pytest.approx(text_only(500, counted), rel=0.03)
    image = counted.towers["image"]
    config = json.loads((qwen2_5_vl_dir / "config.json").read_text())["vision_config"]
    whole = image.per_patch + image.per_token / config["spatial_merge_size"] ** 2
    assert costs.per_patch == pytest.approx(whole, rel=1e-6)
    assert costs.per_squared_patch == pytest.approx(image.per_squared_patch)


def test_pictures_in_two_resolutions(tmp_path: Path) -> None:
    """Of the published sizes of DeepSeek-VL 7B, whose second encoder costs most of a picture."""
    config = DeepseekVLHybridConfig(tie_word_embeddings=False)
    config.save_pretrained(tmp_path)
    costs, image = CostModel.from_config(tmp_path), counter_of(tmp_path).towers["image"]
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    counted = image.of(MediaSize(tokens=patches))
    assert costs.cost(SampleSize(0, patches, patches**2)) == pytest.approx(counted, rel=0.03)


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TEXT = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 10
}  # fmt: skip


def test_known_numbers(tmp_path: Path) -> None:
    """By hand: 2 layers of 4·8·8 for attention and 3·8·16 for the MLP, 8·10 for the head; towers of other families."""
    dense = 2 * 3 * (2 * (4 * 64 + 3 * 128) + 80)
    costs = CostModel.from_config(write(tmp_path, TEXT))
    assert (costs.per_token, costs.attention, costs.per_patch) == (dense, AttentionCost(3 * 4 * 8 * 2), 0)
    experts = {**TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    assert CostModel.from_config(write(tmp_path, experts)).per_token == 2 * 3 * (2 * (4 * 64 + 3 * 8 * 8) + 80)
    tower = {"embed_dim": 4, "hidden_size": 8, "depth": 3, "mlp_ratio": 2, "patch_size": 2, "hidden_act": "quick_gelu"}
    for config in ({**TEXT, "vision_config": tower}, {"thinker_config": {"text_config": TEXT, "vision_config": tower}}):
        costs = CostModel.from_config(write(tmp_path, config) / "config.json")
        per_patch = 2 * 2 * 12 * 4 + 3 * 2 * (3 * (4 * 16 + 2 * 4 * 8) + 16 + 4 * 8)
        assert (costs.per_token, costs.per_patch, costs.per_squared_patch) == (dense, per_patch, 3 * 4 * 4 * 3)


@pytest.mark.parametrize("config", [None, {"n_embd": 8}, {**TEXT, "vision_config": {"width": 3}}])
def test_without_the_usual_names_tokens_are_counted(tmp_path: Path, said: list[str], config: Any) -> None:
    costs = CostModel.from_config(write(tmp_path, config) if config else tmp_path)
    assert costs.cost(SampleSize(7, 100, 10_000)) == 7
    assert [line for line in said if "config.json" in line and "its tokens are counted" in line]


def test_a_pack_costs_what_its_samples_do() -> None:
    costs = CostModel(1.0, AttentionCost(1.0), 2.0, 0.25)
    assert costs.cost(SampleSize(4, 3, 9)) == 4 + 8 + 6 + 2.25
