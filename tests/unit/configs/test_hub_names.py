"""A name on the hub where a directory is meant: the sentence says how to fetch it, at every door; nothing downloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.start import find_start
from mindspeed_mm.configs.hf_directory import describe_missing_model, hub_advice
from mindspeed_mm.configs.model_config import check_local_path
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.sora_checks import check_generation_model
from mindspeed_mm.configs.sora_config import AeConfig, SoRAModelConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.data.adapter import check_model_path
from mindspeed_mm.models.generation.ae.autoencoder import open_autoencoder
from mindspeed_mm.models.transformers_model import load_hf_config
from mindspeed_mm.tasks.generation.options import parse_flags
from mindspeed_mm.tools.converters.places import Given, structure
from mindspeed_mm.utils.errors import MMError

HUB = "Qwen/Qwen2.5-VL-3B-Instruct"


def generation(**parts: Any) -> None:
    content = {"predictor": {"model_id": "wan", "config": {}, "train_from_scratch": True}, **parts}
    raise_all(check_generation_model(SoRAModelConfig.from_dict(content)))


DOORS: dict[str, Callable[[], Any]] = {
    "init_from_hf_path": lambda: raise_all(check_local_path("model.json", "init_from_hf_path", HUB)),
    "the model": lambda: load_hf_config(HUB),
    "the model on Megatron": lambda: VLMModelConfig.from_dict({"init_from_hf_path": HUB}).hf_config(),
    "the processor and data check": lambda: check_model_path(HUB),
    "--load": lambda: find_start(HUB),
    "weights and mm-convert": lambda: open_weights(HUB),
    "mm-convert's structure": lambda: structure(Given("--hf_dir", HUB)),
    "predictor": lambda: generation(predictor={"model_id": "wan", "from_pretrained": HUB}),
    "the whole pipeline": lambda: generation(init_from_diffusers=HUB),
    "ae": lambda: generation(ae={"from_pretrained": HUB}),
    "ae, opened": lambda: open_autoencoder(AeConfig(from_pretrained=HUB), "model.json"),
    "inference_sora.py": lambda: parse_flags(["--load", HUB]),
    "text_encoder": lambda: generation(text_encoder={"from_pretrained": HUB}),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_door_says_how_to_fetch_it(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MMError) as refused:
        DOORS[door]()
    assert f"`hf download {HUB} --local-dir ckpt/Qwen2.5-VL-3B-Instruct`" in str(refused.value)


def test_what_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for path in ("ckpt/Qwen3-8B", "./Qwen/Qwen3-8B", "/Qwen/Qwen3", "Qwen3-8B", "a/b/c", "mine/Qwen3-8B", ""):
        assert hub_advice(path) == "", path
    (tmp_path / "mine/Qwen3-4B").mkdir()
    assert "did you mean 'mine/Qwen3-4B'" in describe_missing_model("mine/Qwen3-8B")
