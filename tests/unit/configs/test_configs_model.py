"""model.json: published examples, freezing, attention, loss, families' own keys, mistakes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mindspeed_mm.configs import model_config
from mindspeed_mm.configs.config import ConfigReader
from mindspeed_mm.configs.flags.model import LossArguments
from mindspeed_mm.configs.model_config import (
    LossConfig,
    TransformersModelConfig,
    choose_loss_type,
    register_model_keys,
    warn_of_near_model_keys,
)
from mindspeed_mm.utils.errors import ConfigError

# Keys of a published model.json, with the dummy layer counts that it holds for another trainer's checks.
PUBLISHED: dict[str, Any] = {
    "model_id": "internvl",
    "init_from_hf_path": "./ckpt/hf_path/InternVL3_5-30B-A3B-Instruct",
    "img_context_token_id": 151671,
    "image_encoder": {
        "vision_encoder": {
            "model_id": "qwen2vit",
            "num_layers": 32,
            "hidden_size": 1280,
            "num_attention_heads": 16,
            "freeze": True,
            "attn_implementation": "sdpa",
            "attn_layout": "TND",
        },
        "vision_projector": {"model_id": "lnmlp", "num_layers": 1, "freeze": True},
    },
    "text_decoder": {
        "model_id": "qwen3lm",
        "num_layers": 999,
        "hidden_size": 999,
        "num_attention_heads": 999,
        "max_position_embeddings": 9999999,
        "freeze": False,
        "attn_implementation": "flash_attention_2",
        "use_npu_fused_moe": True,
        "activation_offload": False,
    },
    "loss_cfg": {"loss_type": "per_token_loss", "compute_mode": "dynamic_chunk"},
    "patch": {"clip_grad_async": True},
}


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "_family_keys", {})


def with_keys(**keys: Any) -> dict[str, Any]:
    return {"model_id": "qwen3", "init_from_hf_path": "hf", **keys}


def test_published_file(said: list[str]) -> None:
    config = TransformersModelConfig.from_dict(ConfigReader(PUBLISHED, file="model.json"))
    assert config.model_id == "internvl" and config.init_from_hf_path.endswith("Instruct")
    assert (config.freeze_vision_encoder, config.freeze_vision_projector, config.freeze_text_decoder) == (
        True,
        True,
        False,
    )
    assert config.freeze_audio_encoder is None
    assert (config.attention_of("vision"), config.attention_of("text"), config.attention_of("audio")) == (
        "sdpa",
        "flash_attention_2",
        None,
    )
    assert config.loss_cfg.effective_chunk_size == 4096
    authoritative = [line for line in said if "authoritative" in line]
    assert len(authoritative) == 1 and "text_decoder.num_layers" in authoritative[0]
    for key in ("vision_encoder.attn_layout", "use_npu_fused_moe", "patch.clip_grad_async", "activation_offload"):
        assert sum(key in line for line in said) == 1
    before = len(said)
    TransformersModelConfig.from_dict(PUBLISHED)
    assert len(said) == before  # once is enough


def test_defaults(said: list[str]) -> None:
    config = TransformersModelConfig.from_dict({"init_from_hf_path": "hf"})
    assert not config.train_from_scratch and config.plugin == [] and config.model_id is None and said == []
    freezes = (config.freeze_vision_encoder, config.freeze_vision_projector, config.freeze_text_decoder)
    assert freezes == (None, None, None)  # no key = trained
    assert config.loss_cfg == LossConfig() and config.loss_cfg.effective_chunk_size == 1024


@pytest.mark.parametrize(
    "keys, part, value",
    [
        ({"freeze_vision_model": True}, "freeze_vision_encoder", True),
        ({"vision_encoder": {"freeze": "True"}}, "freeze_vision_encoder", True),
        ({"freeze_vision_projection": False}, "freeze_vision_projector", False),
        ({"vision_projector": {"freeze": 1}}, "freeze_vision_projector", True),
        ({"freeze_language_model": True}, "freeze_text_decoder", True),
        ({"audio_encoder": {"audio_encoder": {"freeze": True}}}, "freeze_audio_encoder", True),
        ({"freeze_vision_model": True, "vision_encoder": {"freeze": True}}, "freeze_vision_encoder", True),
        ({"freeze_vision_model": None}, "freeze_vision_encoder", None),
    ],
)
def test_freezing_by_any_published_name(keys: dict[str, Any], part: str, value: bool | None) -> None:
    assert getattr(TransformersModelConfig.from_dict(with_keys(**keys)), part) is value


def test_attention_of_the_whole_model() -> None:
    config = TransformersModelConfig.from_dict(
        with_keys(attn_implementation="eager", text_decoder={"attn_implementation": "sdpa"})
    )
    assert (config.attention_of("text"), config.attention_of("vision")) == ("sdpa", "eager")


@pytest.mark.parametrize(
    "keys, parts",
    [
        ({"init_from_hf_path": ""}, ["'init_from_hf_path' is missing"]),
        (
            {"init_from_hf_pth": "x", "init_from_hf_path": None},
            ["'init_from_hf_pth'", "did you mean 'init_from_hf_path'"],
        ),
        ({"text_decodr": {}}, ["unknown key 'text_decodr'", "'text_decoder'"]),
        ({"text_decoder": {"freez": True}}, ["unknown key 'text_decoder.freez'", "'freeze'"]),
        ({"text_decoder": {"num_layer": 3}}, ["unknown key 'text_decoder.num_layer'", "'num_layers'"]),
        (
            {"model_id": "step3_vl", "speech_token_size": 1},
            ["'model_id' is 'step3_vl'", "StepVLForConditionalGeneration"],
        ),
        ({"loss_type": "default"}, ["unknown key 'loss_type'", "'loss_type' belongs at 'loss_cfg.loss_type'"]),
        ({"extra": {"nested": {"dict": 1}}}, ["unknown key 'extra'", "keys here"]),
        ({"text_decoder": {"freeze": "nein"}}, ["'text_decoder.freeze' is 'nein'", "true or false"]),
        ({"text_decoder": "big"}, ["'text_decoder' is 'big'", "an object"]),
        ({"train_from_scratch": 2}, ["'train_from_scratch' is 2", "true or false"]),
        ({"text_decoder": {"attn_implementation": "sdap"}}, ["'sdap'", "did you mean 'sdpa'"]),
        ({"text_decoder": {"attn_implementation": "var_len_fa"}}, ["'var_len_fa'", "not there yet"]),
        ({"loss_cfg": {"loss_type": "per_token"}}, ["'loss_cfg.loss_type' is 'per_token'", "'per_token_loss'"]),
        ({"loss_cfg": {"loss_type": "raw"}}, ["'raw'", "exact"]),
        ({"loss_cfg": {"compute_mode": "chunks"}}, ["'loss_cfg.compute_mode'", "'chunk'"]),
        ({"loss_cfg": {"chunk_size": 0}}, ["'loss_cfg.chunk_size' is 0", "at least 1"]),
        ({"loss_cfg": {"router_aux_loss_coef": "much"}}, ["'much'", "a number"]),
        ({"plugin": [3]}, ["'plugin[0]' is 3", "text"]),
        ({"freeze": "model.visual"}, ["'freeze' is 'model.visual'", "write it as an item, '- model.visual'"]),
        ({"patch": {"layerwise_disaggregated_training": True}}, ["'patch.layerwise_disaggregated_training' is true"]),
        ({"patch": {"adaptive_clip_grad_norm": True}}, ["--clip-grad"]),
        (
            {"freeze_vision_model": True, "image_encoder": {"vision_encoder": {"freeze": False}}},
            ["'image_encoder.vision_encoder.freeze' is false, 'freeze_vision_model' is true", "keep one"],
        ),
        (
            {
                "vision_encoder": {"attn_implementation": "eager"},
                "image_encoder": {"vision_encoder": {"attn_implementation": "sdpa"}},
            },
            ["different attention kernels"],
        ),
    ],
)
def test_mistakes(keys: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TransformersModelConfig.from_dict(with_keys(**keys), file="my/model.json")
    for part in ["my/model.json: ", *parts]:
        assert part in str(caught.value)


def test_all_faults_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        TransformersModelConfig.from_dict(
            {"modelid": "x", "text_decoder": {"freez": 1}, "patch": {"adaptive_clip_grad_norm": 1}}
        )
    assert len(str(caught.value).splitlines()) == 4
    with pytest.raises(ConfigError, match="expected an object"):
        TransformersModelConfig.from_dict([1])


def test_off_patches_are_not_refused(said: list[str]) -> None:
    TransformersModelConfig.from_dict(with_keys(patch={"muon_optimizer": False, "bridge_patch": True}, freeze=[]))
    assert any("patch.muon_optimizer" in line for line in said)


def test_a_family_registers_keys(said: list[str]) -> None:
    keys = {"text_decoder": {"router_bias": 3, "freeze": True}, "deep": {"thing": {"x": 1}}}
    with pytest.raises(ConfigError, match="unknown key"):
        TransformersModelConfig.from_dict(with_keys(**keys))
    register_model_keys("qwen3", ["text_decoder.router_bias", "deep.thing"])
    config = TransformersModelConfig.from_dict(with_keys(**keys))
    assert config.own_keys == {"text_decoder.router_bias": 3, "deep.thing": {"x": 1}} and config.freeze_text_decoder
    with pytest.raises(ConfigError, match=r"router_bia'.*'router_bias'"):
        TransformersModelConfig.from_dict(with_keys(text_decoder={"router_bia": 1}))
    with pytest.raises(ConfigError, match="unknown key"):  # only of that family
        TransformersModelConfig.from_dict(with_keys(**keys) | {"model_id": "qwen2_5_vl"})
    assert said == []


def test_a_plugin_allows_keys_of_its_own(said: list[str]) -> None:
    config = TransformersModelConfig.from_dict(with_keys(plugin="my.model", depth=3, text_decodr=1))
    assert config.plugin == ["my.model"] and config.own_keys == {"depth": 3, "text_decodr": 1}
    assert len(said) == 1 and "'text_decodr'" in said[0] and "'text_decoder'" in said[0]
    with pytest.raises(ConfigError, match="'train_from_scratch' is 'x'"):
        TransformersModelConfig.from_dict(with_keys(plugin="my.model", train_from_scratch="x"))


def test_a_model_of_ones_own_needs_no_hf_directory(said: list[str]) -> None:
    config = TransformersModelConfig.from_dict({"depth": 3, "text_decoder": {"num_layers": 2}}, own_model=True)
    assert config.init_from_hf_path is None and said == []
    assert config.own_keys == {"depth": 3, "text_decoder.num_layers": 2}
    warn_of_near_model_keys({"init_from_hf_pat": "x", "whatever": 1}, "m.json")
    assert len(said) == 1 and said[0].startswith("m.json") and "'init_from_hf_path'" in said[0]


@pytest.mark.parametrize(
    "flag, in_file, chosen",
    [
        (None, None, "per_token_loss"),
        (None, "default", "default"),
        ("calculate_square_loss", None, "square_loss"),
        ("calculate_per_sample_loss", "per_sample_loss", "per_sample_loss"),
    ],
)
def test_loss_type(flag: str | None, in_file: str | None, chosen: str) -> None:
    flags = LossArguments(**({flag: True} if flag else {}))
    assert choose_loss_type(flags, LossConfig(loss_type=in_file)) == chosen


def test_loss_type_conflict() -> None:
    with pytest.raises(ConfigError, match=r"--calculate-token-loss asks for token_loss.*'default'"):
        choose_loss_type(LossArguments(calculate_token_loss=True), LossConfig(loss_type="default"))


def test_the_mapping_is_left_as_it_was() -> None:
    before = copy.deepcopy(PUBLISHED)
    TransformersModelConfig.from_dict(PUBLISHED)
    assert before == PUBLISHED


@pytest.mark.parametrize("value", [0.001, "1e-3"])
def test_a_weight_of_the_balancing_loss_under_another_name_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"moe_aux_loss_coeff.*write that instead"):
        TransformersModelConfig.from_dict({"init_from_hf_path": "x", "text_decoder": {"moe_aux_loss_coeff": value}})
    TransformersModelConfig.from_dict({"init_from_hf_path": "x", "text_decoder": {"moe_aux_loss_coeff": 0.0}})
