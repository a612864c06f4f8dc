"""SoRAModel: paths of fsdp2.yaml, where its parts come from, and what an export holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.models.generation.sora_model import SoRAModel, block_paths, generation_rule
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import forget_notices, logger
from tests.support.predictors import cases
from tests.support.tiny_wan import model_json, write_encoders

CASES = cases()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    forget_notices()
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record.getMessage()))
    return lines


def tiny(label: str = "wan-t2v") -> SoRAModel:
    name, case = CASES[label]
    return SoRAModel(case.model_json(name))


def overrides(model: SoRAModel, monkeypatch: pytest.MonkeyPatch, file: Path | None) -> dict[str, Any]:
    """What the predictor is told when the model is sharded as a file says."""
    monkeypatch.setattr(model.predictor, "fully_shard", lambda **kwargs: True, raising=False)
    assert model.fully_shard(None, str(file) if file else None)
    return dict(model.predictor.fsdp2_overrides)


def fsdp2_file(folder: Path, **keys: Any) -> Path:
    file = folder / "fsdp2.yaml"
    file.write_text(yaml.safe_dump(keys))
    return file


def test_published_paths_are_those_of_the_predictor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    wrap = ["predictor.blocks.{*}", "predictor.head"]
    file = fsdp2_file(tmp_path, sub_modules_to_wrap=wrap, ignored_modules=["ae", "text_encoder"], sharding_size="auto")
    found = overrides(tiny(), monkeypatch, file)
    assert found["sub_modules_to_wrap"] == ["blocks.0", "blocks.1", "proj_out"]
    assert found["ignored_modules"] == [] and found["recompute_modules"] is None
    assert any("'predictor.head' of an older layout is 'predictor.proj_out'" in line for line in said)


def test_published_paths_of_hunyuanvideo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ["predictor.double_blocks.{*}"]
    keys = ("sub_modules_to_wrap", "recompute_modules", "activation_offload_modules", "chunk_mbs_modules")
    file = fsdp2_file(tmp_path, **dict.fromkeys(keys, blocks))
    found = overrides(tiny("hunyuanvideo15-t2v"), monkeypatch, file)
    for key in keys:
        assert found[key] == ["transformer_blocks.0", "transformer_blocks.1"], key


def test_paths_outside_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    file = fsdp2_file(tmp_path, sub_modules_to_wrap=["text_encoder.block.{*}", "predictor.blocks.{*}"])
    assert overrides(tiny(), monkeypatch, file)["sub_modules_to_wrap"] == ["blocks.0", "blocks.1"]
    assert any("the text_encoder is frozen and stays whole" in line for line in said)
    file = fsdp2_file(tmp_path, sub_modules_to_wrap=["predicter.blocks.{*}"])
    with pytest.raises(ConfigError, match=r"'predicter\.blocks.*did you mean 'predictor\.blocks\.\{\*\}'"):
        overrides(tiny(), monkeypatch, file)


def test_all_paths_that_match_nothing_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {
        "sub_modules_to_wrap": ["predictor.blokcs.{*}", "blocks.{*}", "predictor.proj_out"],
        "recompute_modules": ["predictor.headless"],
        "ignored_modules": ["vae"],
    }
    file = fsdp2_file(tmp_path, **lists)
    with pytest.raises(ConfigError) as caught:
        overrides(tiny(), monkeypatch, file)
    lines = str(caught.value).splitlines()
    for key, entry in (("sub_modules_to_wrap", lists["sub_modules_to_wrap"][0]), ("ignored_modules", "vae")):
        assert any(line.startswith(f"{file}: {key}: entry '{entry}' matches nothing") for line in lines)
    assert len(lines) == 4 and sum("did you mean 'predictor.blocks.{*}'?" in line for line in lines) == 2


def test_without_a_file_the_predictor_is_sharded(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    found = overrides(tiny(), monkeypatch, None)
    assert found["sharding_size"] == "auto" and found["sub_modules_to_wrap"] == ["blocks.{*}"]
    assert any("no --fsdp2-config-path" in line for line in said)


@pytest.mark.parametrize("label", sorted(CASES))
def test_the_blocks_of_every_family_are_found(label: str) -> None:
    predictor = tiny(label).predictor
    lists = [name for name, child in predictor.named_children() if isinstance(child, nn.ModuleList) and "block" in name]
    assert lists and {f"{name}.{{*}}" for name in lists} <= set(block_paths(predictor))


def test_only_the_predictor_is_a_module() -> None:
    model = tiny()
    assert [name for name, _ in model.named_children()] == ["predictor"]
    assert model.sharded_module is model.predictor


def test_the_rule_comes_from_the_autoencoder(tmp_path: Path) -> None:
    config = SoRAModelConfig.from_dict(model_json(write_encoders(tmp_path)))
    rule = generation_rule(config, seed=3)
    assert (rule.temporal_stride, rule.spatial_multiple, rule.seed) == (4, 16, 3)
    pixel = SoRAModelConfig.from_dict({**model_json(tmp_path), "ae": {"model_id": "pixel"}})
    assert (generation_rule(pixel, 3).temporal_stride, generation_rule(pixel, 3).spatial_multiple) == (1, 2)


def test_an_export_is_a_whole_pipeline_where_all_parts_are_named(tmp_path: Path, said: list[str]) -> None:
    encoders = write_encoders(tmp_path)
    layout = SoRAModel(model_json(encoders)).export_layout()
    assert layout is not None
    index = layout.model_index
    assert (index["_class_name"], index["transformer"]) == ("WanPipeline", ["diffusers", "WanTransformer3DModel"])
    assert index["vae"] == ["diffusers", "AutoencoderKLWan"]
    assert index["text_encoder"] == ["transformers", "UMT5EncoderModel"]
    assert layout.others["vae"] == encoders / "vae" and layout.others["tokenizer"] == encoders / "tokenizer"
    assert index["transformer_2"] == [None, None] and index["boundary_ratio"] is None
    assert index["expand_timesteps"] is False
    assert json.loads((layout.others["scheduler"] / "scheduler_config.json").read_text())["shift"] == 5.0
    features = {**model_json(encoders), "load_video_features": True, "ae": None}
    assert SoRAModel(features).export_layout() is None
    assert any("exports hold the trained transformer only" in line and "vae" in line for line in said)


def test_an_image_to_video_export_names_its_encoder(tmp_path: Path) -> None:
    layout = SoRAModel(model_json(write_encoders(tmp_path), task="i2v")).export_layout()
    assert layout is not None
    assert layout.model_index["_class_name"] == "WanImageToVideoPipeline"
    assert layout.model_index["image_encoder"] == ["transformers", "CLIPVisionModel"]
    assert layout.model_index["image_processor"][0] == "transformers"


def test_structure_keys_that_nobody_reads_are_said(tmp_path: Path, said: list[str]) -> None:
    published = {"hidden_size": 48, "num_heads": 2, "num_layers": 1, "ffn_dim": 32, "text_len": 512}
    content = {"load_video_features": True, "load_text_features": True}
    model = SoRAModel({**content, "predictor": {"model_id": "wandit", **published}})
    assert model.predictor.config["attention_head_dim"] == 24
    assert [line for line in said if "predictor.text_len: WanTransformer3DModel fixes it" in line]
    (tmp_path / "config.json").write_text(
        json.dumps({**CASES["wan-t2v"][1].config, "_class_name": "WanTransformer3DModel"})
    )
    said.clear()
    directory = {"from_pretrained": str(tmp_path), "train_from_scratch": True}
    model = SoRAModel({**content, "predictor": {"model_id": "wandit", **published, **directory}})
    assert model.predictor.config["num_layers"] == 2
    assert [line for line in said if "predictor.num_layers" in line and "comes from" in line]


@pytest.mark.parametrize(
    "predictor, words",
    [
        ({"model_id": "wann"}, ["'wann'", "did you mean 'wan'"]),
        ({}, ["'predictor.model_id' is missing", "hunyuanvideo15dit"]),
        ({"model_id": "wan", "config": {"num_layer": 2}}, ["'predictor.config.num_layer'", "'num_layers'"]),
        ({"model_id": "flux", "hidden_size": 64}, ["hidden_size", "flux has no published structure keys"]),
    ],
)
def test_what_the_predictor_is_must_be_said(predictor: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SoRAModel({"load_video_features": True, "load_text_features": True, "predictor": predictor})
    for word in words:
        assert word in str(caught.value)
