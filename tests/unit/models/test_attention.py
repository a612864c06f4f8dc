"""Attention that model.json asks for: taken where the device can run it, else PyTorch's own, with a notice."""

from __future__ import annotations

import pytest
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.models.transformers.attention import set_attention
from mindspeed_mm.utils import log


class OtherDevice(CPUAccelerator):
    """A device with a flash attention of its own."""

    attention_packages = {"flash_attention_2": None, "flash_attention_3": "a_package_that_nobody_has"}


@pytest.mark.parametrize(
    ("device", "wanted", "expected", "why"),
    [
        (CPUAccelerator, "eager", "eager", None),
        (CPUAccelerator, "flash_attention_2", "sdpa", "it does not run on cpu"),
        (OtherDevice, "flash_attention_2", "flash_attention_2", None),
        (OtherDevice, "flash_attention_3", "sdpa", "a_package_that_nobody_has is not installed"),
    ],
)
def test_attention_follows_the_device(
    device: type[CPUAccelerator], wanted: str, expected: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    monkeypatch.setattr(accelerator, "current", device)
    hf_config = Qwen3Config()
    described = TransformersModelConfig.from_dict({"init_from_hf_path": "hf", "attn_implementation": wanted})
    set_attention(hf_config, described, Qwen3ForCausalLM)
    assert hf_config._attn_implementation == expected
    expected_notices = [f"model.json: attn_implementation {wanted} can't run here ({why}); sdpa is used"]
    assert said == ([] if why is None else expected_notices)


@pytest.mark.parametrize("wanted", ["sdpa", "flash_attention_2", "eager"])
def test_a_model_without_sdpa_takes_eager(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    monkeypatch.setattr(accelerator, "current", CPUAccelerator)
    hf_config = GptOssConfig()
    described = TransformersModelConfig.from_dict({"init_from_hf_path": "hf", "attn_implementation": wanted})
    set_attention(hf_config, described, GptOssForCausalLM)
    assert hf_config._attn_implementation == "eager"
    assert [text.rsplit("; ")[-1] for text in said] == ([] if wanted == "eager" else ["eager is used"])
