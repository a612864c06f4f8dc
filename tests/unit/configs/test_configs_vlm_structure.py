"""transformers' configuration from model.json's numbers, beside a HF directory or without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.utils.errors import ConfigError
from tests.unit.configs.published_vlm import SIZES, published_model


def built(content: dict[str, Any]) -> Any:
    return VLMModelConfig.from_dict(content, file="m.json").hf_config()


def changed(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one key replaced, or removed where the value is `...`."""
    content = json.loads(json.dumps(content))
    *parents, last = path.split(".")
    place = content
    for name in parents:
        place = place.setdefault(name, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


def numbers_of(directory: Path) -> dict[str, Any]:
    """What model.json would say about a Qwen2.5-VL directory."""
    config = json.loads((directory / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    rope = text["rope_parameters"]
    return {
        "img_context_token_id": config["image_token_id"],
        "video_token_id": config["video_token_id"],
        "vision_start_token_id": config["vision_start_token_id"],
        "text_decoder": {
            "num_layers": text["num_hidden_layers"],
            "hidden_size": text["hidden_size"],
            "ffn_hidden_size": text["intermediate_size"],
            "num_attention_heads": text["num_attention_heads"],
            "num_query_groups": text["num_key_value_heads"],
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["max_position_embeddings"],
            "layernorm_epsilon": text["rms_norm_eps"],
            "attention_dropout": text["attention_dropout"],
            "init_method_std": text["initializer_range"],
            "rope_theta": rope["rope_theta"],
            "mrope_section": rope["mrope_section"],
            "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        },
        "image_encoder": {
            "vision_encoder": {
                "num_layers": vision["depth"],
                "hidden_size": vision["hidden_size"],
                "ffn_hidden_size": vision["intermediate_size"],
                "num_attention_heads": vision["num_heads"],
                "in_channels": vision["in_channels"],
                "patch_size": vision["patch_size"],
                "spatial_merge_size": vision["spatial_merge_size"],
                "temporal_patch_size": vision["temporal_patch_size"],
                "tokens_per_second": vision["tokens_per_second"],
                "window_attn_size": vision["window_size"],
                "fullatt_block_indexes": vision["fullatt_block_indexes"],
                "out_hidden_size": vision["out_hidden_size"],
            }
        },
    }


@pytest.mark.parametrize("size", SIZES)
def test_published_numbers_build_the_published_models(said: list[str], size: str) -> None:
    content = published_model(size)
    config = built(content)
    text, vision = config.text_config, config.vision_config
    given = content["text_decoder"]
    assert (text.num_hidden_layers, text.hidden_size, text.intermediate_size, text.vocab_size) == (
        given["num_layers"],
        given["hidden_size"],
        given["ffn_hidden_size"],
        given["vocab_size"],
    )
    assert (text.num_attention_heads, text.num_key_value_heads) == (
        given["num_attention_heads"],
        given["num_query_groups"],
    )
    assert (text.rms_norm_eps, text.max_position_embeddings, text.initializer_range) == (1e-6, 128000, 0.01)
    assert text.rope_parameters == {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    assert config.tie_word_embeddings is text.tie_word_embeddings is (size == "3b")
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.window_size) == (32, 1280, 16, 112)
    assert (vision.intermediate_size, vision.out_hidden_size) == (
        3420 if size in ("3b", "7b") else 3456,
        text.hidden_size,
    )
    assert (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size) == (14, 2, 2)
    assert (vision.tokens_per_second, list(vision.fullatt_block_indexes)) == (2, [7, 15, 23, 31])
    assert (config.image_token_id, config.video_token_id, config.vision_start_token_id) == (151655, 151656, 151652)
    assert config.architectures == ["Qwen2_5_VLForConditionalGeneration"] and config.model_type == "qwen2_5_vl"
    assert all("no effect here" in line for line in said)


def test_numbers_and_directory_say_the_same(qwen2_5_vl_dir: Path, said: list[str]) -> None:
    """A directory beside its own numbers is taken as it is; the numbers alone give an equal configuration."""
    numbers = numbers_of(qwen2_5_vl_dir)
    beside = built({**numbers, "init_from_hf_path": str(qwen2_5_vl_dir), "model_id": "qwen2_5vl"})
    alone = built(numbers)
    assert said == []
    for part in ("text_config", "vision_config"):
        expected, found = getattr(beside, part).to_dict(), getattr(alone, part).to_dict()
        names = set(numbers_to_compare(part))
        assert {n: found[n] for n in names} == {n: expected[n] for n in names}
    assert alone.tie_word_embeddings == beside.tie_word_embeddings == beside.text_config.tie_word_embeddings
    assert alone.image_token_id == beside.image_token_id


def numbers_to_compare(part: str) -> list[str]:
    text = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size"
    vision = "depth hidden_size intermediate_size num_heads in_channels patch_size spatial_merge_size window_size"
    return (text if part == "text_config" else vision + " temporal_patch_size out_hidden_size").split()


def test_a_directory_alone_is_enough(qwen2_5_vl_dir: Path, qwen3_dir: Path, said: list[str]) -> None:
    assert built({"init_from_hf_path": str(qwen2_5_vl_dir)}).model_type == "qwen2_5_vl"
    text = built({"init_from_hf_path": str(qwen3_dir), "model_id": "qwen3", "text_decoder": {"qk_layernorm": True}})
    assert text.model_type == "qwen3" and text.tie_word_embeddings is True
    assert said == []


@pytest.mark.parametrize(
    "path, value, parts",
    [
        ("text_decoder.num_layers", 3, ["'text_decoder.num_layers' is 3", "num_hidden_layers is 2"]),
        ("text_decoder.hidden_size", 96, ["'text_decoder.hidden_size' is 96"]),
        ("text_decoder.ffn_hidden_size", 7, ["'text_decoder.ffn_hidden_size' is 7", "intermediate_size is"]),
        ("text_decoder.num_query_groups", 1, ["'text_decoder.num_query_groups' is 1", "num_key_value_heads is"]),
        ("text_decoder.vocab_size", 9999, ["'text_decoder.vocab_size' is 9999", "vocab_size is"]),
        ("text_decoder.layernorm_epsilon", 0.1, ["'text_decoder.layernorm_epsilon' is 0.1", "rms_norm_eps is"]),
        ("text_decoder.untie_embeddings_and_output_weights", ..., []),
        ("image_encoder.vision_encoder.num_layers", 9, ["'image_encoder.vision_encoder.num_layers' is 9", "depth is"]),
        ("image_encoder.vision_encoder.window_attn_size", 7, ["window_attn_size' is 7", "window_size is"]),
        ("image_encoder.vision_encoder.fullatt_block_indexes", [0], ["fullatt_block_indexes' is [0]"]),
        ("image_encoder.vision_encoder.patch_size", 16, ["patch_size' is 16", "patch_size is 14"]),
        ("img_context_token_id", 3, ["'img_context_token_id' is 3", "image_token_id is"]),
        ("video_token_id", 3, ["'video_token_id' is 3", "video_token_id is"]),
        ("model_id", "qwen3", ["'model_id' is 'qwen3'", "config.json is 'qwen2_5_vl'"]),
        ("image_encoder.vision_projector.hidden_size", 7, ["vision_projector.hidden_size' is 7", "hidden size"]),
        ("image_encoder.vision_projector.ffn_hidden_size", 7, ["ffn_hidden_size' is 7", "spatial_merge_size²"]),
        ("image_encoder.vision_projector.input_size", 7, ["input_size' is 7", "tower's hidden size"]),
        ("image_encoder.vision_projector.num_layers", 2, ["vision_projector.num_layers' is 2; expected 1"]),
        ("image_encoder.vision_encoder.layernorm_epsilon", 1e-5, ["layernorm_epsilon' is 1e-05; expected 1e-06"]),
        ("image_encoder.vision_encoder.out_hidden_size", 7, ["out_hidden_size' is 7; expected"]),
        ("image_encoder.vision_encoder.num_query_groups", 1, ["num_query_groups' is 1; expected"]),
        ("text_decoder.kv_channels", 7, ["'text_decoder.kv_channels' is 7; expected"]),
        ("text_decoder.add_qkv_bias", False, ["'text_decoder.add_qkv_bias' is false; expected true"]),
        ("text_decoder.qk_layernorm", True, ["'text_decoder.qk_layernorm' is true; expected false"]),
        ("text_decoder.mrope_section", [1, 1, 1], ["'text_decoder.mrope_section' is [1, 1, 1]", "half the size"]),
    ],
)
def test_numbers_that_contradict_the_directory(qwen2_5_vl_dir: Path, path: str, value: Any, parts: list[str]) -> None:
    content = {**numbers_of(qwen2_5_vl_dir), "init_from_hf_path": str(qwen2_5_vl_dir)}
    if value is ...:
        untied = content["text_decoder"]["untie_embeddings_and_output_weights"]
        value, parts = not untied, [f"'{path}' is {str(not untied).lower()}", "tie_word_embeddings is"]
    with pytest.raises(ConfigError) as caught:
        built(changed(content, path, value))
    for part in ["m.json: ", *parts]:
        assert part in str(caught.value)
    assert str(qwen2_5_vl_dir / "config.json") in str(caught.value) or "; expected " in str(caught.value)


@pytest.mark.parametrize(
    "path, value, found",
    [
        ("text_decoder.max_position_embeddings", 77, lambda c: c.text_config.max_position_embeddings),
        ("text_decoder.rope_theta", 77.0, lambda c: c.text_config.rope_parameters["rope_theta"]),
        ("text_decoder.attention_dropout", 0.5, lambda c: c.text_config.attention_dropout),
        ("text_decoder.init_method_std", 0.5, lambda c: c.text_config.initializer_range),
    ],
)
def test_numbers_that_win_over_the_directory(
    qwen2_5_vl_dir: Path, said: list[str], path: str, value: Any, found: Any
) -> None:
    config = built(changed({"init_from_hf_path": str(qwen2_5_vl_dir)}, path, value))
    assert found(config) == value
    assert len(said) == 1 and f"m.json: '{path}' is {value}" in said[0] and "m.json's is taken" in said[0]


def test_padding_of_the_vocabulary_is_no_contradiction(qwen2_5_vl_dir: Path, said: list[str]) -> None:
    size = built({"init_from_hf_path": str(qwen2_5_vl_dir)}).text_config.vocab_size
    config = built({"init_from_hf_path": str(qwen2_5_vl_dir), "text_decoder": {"vocab_size": size + 128}})
    assert config.text_config.vocab_size == size
    assert len(said) == 1 and f"vocab_size is {size}, which is taken" in said[0]


def test_the_video_token_in_the_place_of_the_image_token(qwen2_5_vl_dir: Path, said: list[str]) -> None:
    """A published file holds it."""
    config = built({"init_from_hf_path": str(qwen2_5_vl_dir)})
    image, video = config.image_token_id, config.video_token_id
    beside = built({"init_from_hf_path": str(qwen2_5_vl_dir), "img_context_token_id": video})
    assert beside.image_token_id == image
    alone = built(published_model("7b") | {"img_context_token_id": 151656})
    assert (alone.image_token_id, alone.video_token_id) == (151655, 151656)
    assert len([line for line in said if "the video token" in line]) == 2


def test_synonyms(said: list[str]) -> None:
    """ffn_hidden_size and rope_theta go before; the others do where these are absent."""
    tower = "image_encoder.vision_encoder"
    content = changed(published_model("7b"), f"{tower}.intermediate_size", 1)
    assert built(content).vision_config.intermediate_size == 3420
    assert any(f"'{tower}.intermediate_size' is 1 and has no effect" in line for line in said)
    assert built(changed(content, f"{tower}.ffn_hidden_size", ...)).vision_config.intermediate_size == 1
    content = changed(published_model("7b"), "text_decoder.rotary_base", 5.0)
    assert built(content).text_config.rope_parameters["rope_theta"] == 1e6
    assert built(changed(content, "text_decoder.rope_theta", ...)).text_config.rope_parameters["rope_theta"] == 5.0
    content = changed(published_model("7b"), "text_decoder.group_query_attention", False)
    assert built(content).text_config.num_key_value_heads == 28


def test_missing_numbers_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        built({"model_id": "qwen2_5vl", "text_decoder": {"num_layers": 2}})
    message = str(caught.value)
    assert message.startswith("m.json: without 'init_from_hf_path'") and "text_decoder.num_layers" not in message
    for key in ("text_decoder.hidden_size", "text_decoder.vocab_size", "image_encoder.vision_encoder.num_layers"):
        assert key in message
    with pytest.raises(ConfigError, match=r"these are missing: text_decoder\.vocab_size$"):
        built(changed(published_model("7b"), "text_decoder.vocab_size", ...))
    with pytest.raises(
        ConfigError, match="only qwen2_5_vl can be described by numbers alone, and 'model_id' is 'qwen3'"
    ):
        built({"model_id": "qwen3"})


@pytest.mark.parametrize(
    "path, value, sentence",
    [
        ("text_decoder.num_query_groups", 3, "'text_decoder.num_query_groups' is 3, which doesn't divide 28"),
        ("text_decoder.num_attention_heads", 27, "hidden_size' is 3584, which 27 attention heads don't divide"),
        ("image_encoder.vision_encoder.num_attention_heads", 7, "hidden_size' is 1280, which 7 attention heads don't"),
        ("text_decoder.mrope_section", [16, 24, 25], r"65 in all; expected half the size of a head, 64"),
    ],
)
def test_numbers_that_do_not_fit_each_other(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(changed(published_model("7b"), path, value))
    assert sentence in str(caught.value)


def test_directories_that_cannot_be_used(tmp_path: Path, qwen2_5_vl_dir: Path, qwen3_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"init_from_hf_path: .*gone does not exist"):
        built({"init_from_hf_path": str(tmp_path / "gone")})
    shutil.copy(qwen2_5_vl_dir / "model.safetensors", tmp_path)
    with pytest.raises(ConfigError, match=r"has no config.json .model\.safetensors."):
        built({"init_from_hf_path": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match=r"config\.json: 'model_type' is 'nothing', which transformers"):
        built({"init_from_hf_path": str(tmp_path)})
    vision = {"vision_encoder": {"num_layers": 2}}
    with pytest.raises(ConfigError, match="describes a model without a vision tower"):
        built({"init_from_hf_path": str(qwen3_dir), "image_encoder": vision})
    with pytest.raises(ConfigError, match="the model has no such positions"):
        built({"init_from_hf_path": str(qwen3_dir), "text_decoder": {"mrope_section": [2, 3, 3]}})
