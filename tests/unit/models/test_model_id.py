"""model_id, config.json's model_type and its architectures: what contradicts, or is missing, is a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError

OMNI = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
FAMILIES = ModelHub.families()


def build(hf_dir: Path, **keys: Any) -> Any:
    """A model's structure, as a run has it built."""
    with build_context(BuildContext(load_weights=False, defer_weights=True, in_run=True)):
        return TransformersModel({"init_from_hf_path": str(hf_dir), **keys})


def with_config(hf_dir: Path, folder: Path, **changes: Any) -> Path:
    """A directory with another config.json; a key whose value is None is left out."""
    shutil.copytree(hf_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((hf_dir / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return folder


@pytest.mark.parametrize("model_id", FAMILIES)
def test_a_family_is_built_of_its_own_directories_only(model_id: str) -> None:
    """Every model_id against the model_type of every family."""
    for other in FAMILIES:
        config = CONFIG_MAPPING[other]()
        if OMNI.get(model_id, model_id) == OMNI.get(other, other):
            assert ModelHub.get(model_id, config) is ModelHub.find(model_id)
        elif (model_id, OMNI.get(other, other)) == ("qwen2_5_vl", "qwen2_5_omni_thinker"):
            assert ModelHub.get(model_id, config) is ModelHub.find(other)
        else:
            with pytest.raises(ConfigError) as refused:
                ModelHub.get(model_id, config)
            for words in (
                f"'model_id' is '{model_id}'",
                f"'{other}'",
                f'write "model_id": "{other}"',
                "leave model_id out",
            ):
                assert words in str(refused.value)


def test_the_published_name_of_an_omni_model_is_set_right(tmp_path: Path, said: list[str]) -> None:
    config = CONFIG_MAPPING["qwen2_5_omni"]()
    assert ModelHub.get("qwen2_5_vl", config, where="omni/model.json") is ModelHub.find("qwen2_5_omni")
    (line,) = [line for line in said if "model_id" in line]
    assert "omni/model.json: 'model_id' is 'qwen2_5_vl'" in line and '"model_id": "qwen2_5_omni"' in line
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_omni"}')
    for name in ("qwen2_5vl", "qwen2_5_vl"):  # and so are the rows'
        adapter = find_adapter(SimpleNamespace(model_id=name, init_from_hf_path=str(tmp_path)))
        assert type(adapter).__module__.endswith("qwen2_5_omni.data")


def test_both_backends_name_both(qwen3_dir: Path) -> None:
    with pytest.raises(ConfigError) as fsdp2:
        build(qwen3_dir, model_id="qwen2_5_vl")
    with pytest.raises(ConfigError) as megatron:
        VLMModelConfig.from_dict({"init_from_hf_path": str(qwen3_dir), "model_id": "qwen2_5_vl"}).hf_config()
    assert str(fsdp2.value) == str(megatron.value)
    assert f"{qwen3_dir}/config.json is 'qwen3'" in str(fsdp2.value)


def test_a_class_of_ones_own_takes_what_it_derives_from(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(ModelHub.find("qwen3")):  # type: ignore[misc]
        pass

    monkeypatch.setitem(ModelHub.MODEL_MAPPINGS, "own", Own)
    assert isinstance(build(qwen3_dir, model_id="own").model, Own)
    with pytest.raises(ConfigError, match=r"'model_id' is 'own', but the model_type of .* is 'llama'"):
        ModelHub.get("own", CONFIG_MAPPING["llama"]())


BROKEN = {
    "no model_type": ({"model_type": None}, ["config.json has no 'model_type'", "Qwen3ForCausalLM"]),
    "unknown model_type": ({"model_type": "qwen33"}, ["'model_type' is 'qwen33'", "did you mean 'qwen3'"]),
    "a number": ({"model_type": 5}, ["'model_type' is 5"]),
    "a value of a wrong type": ({"hidden_size": "x"}, ["config.json can't be read by transformers", "hidden_size"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_is_a_sentence_on_both_backends(name: str, qwen3_dir: Path, tmp_path: Path) -> None:
    changes, words = BROKEN[name]
    broken = with_config(qwen3_dir, tmp_path / "hf", **changes)
    for make in (build, lambda hf: VLMModelConfig.from_dict({"init_from_hf_path": str(hf)}).hf_config()):
        with pytest.raises(ConfigError) as refused:
            make(broken)
        for word in words:
            assert word in str(refused.value)


@pytest.mark.parametrize("text", ["{bad", "[1]", "", "\ufeff{"])
def test_a_config_that_is_no_object_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(tmp_path)


def test_architectures_are_needed_where_no_family_says_the_class(qwen3_dir: Path, tmp_path: Path) -> None:
    build(with_config(qwen3_dir, tmp_path / "known", architectures=None))
    olmo = {"model_type": "olmo2", "layer_types": None}
    for changes, words in (
        ({"architectures": None}, ["names no 'architectures'", 'it is ["Olmo2ForCausalLM"]']),
        ({"architectures": ["Olmo2ForCasualLM"]}, ["['Olmo2ForCasualLM'] are not in", 'it is ["Olmo2ForCausalLM"]']),
        ({"architectures": ["Olmo2Model"]}, ["no output layer over the vocabulary", "Olmo2ForCausalLM"]),
    ):
        hf_dir = with_config(qwen3_dir, tmp_path / str(len(words[0])), **olmo, **changes)
        with pytest.raises(ConfigError) as refused:
            build(hf_dir)
        for word in words:
            assert word in str(refused.value)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("kimi_k3", "KimiK3ForConditionalGeneration"),
        ("mimo_v25", "MiMoV2OmniForCausalLM"),
        ("step3_vl", "StepVLForConditionalGeneration"),
        ("qwen3_tts", "Qwen3TTSForConditionalGeneration"),
        ("moss_tts_delay", "MossTTSDelayModel"),
        ("cosyvoice3_lm", "CosyVoice3LM"),
        ("funasr", "FunASRNano"),
    ],
)
def test_models_of_published_launches_without_a_class_name_it(
    name: str, missing: str, qwen3_dir: Path, tmp_path: Path
) -> None:
    """Asked for by model_id, or by the model_type of a directory."""
    with pytest.raises(ConfigError, match=rf"^model\.json: 'model_id' is \"?'?{name}[^\n]*{missing}[^\n]*$"):
        build(qwen3_dir, model_id=name)
    with pytest.raises(ConfigError, match=rf"config\.json: 'model_type' is \"?'?{name}[^\n]*{missing}[^\n]*$"):
        build(with_config(qwen3_dir, tmp_path / "hf", model_type=name))
