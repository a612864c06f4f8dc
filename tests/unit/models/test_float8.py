"""Which linear layers multiply in float8, and the sentences where they can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.cuda import CUDAAccelerator
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.float8 import convert_to_float8, float8_layers, refuse_own_float8
from mindspeed_mm.utils.errors import ConfigError
from tests.support.predictors import cases


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "mlp_only_layers": [0], "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "moe_intermediate_size": 16}
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, vocab_size=64))


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 48}
        return WanTransformer3DModel(**{**cases()["wan-t2v"][1].config, **sizes})


def config(**keys: Any) -> Fsdp2Config:
    return Fsdp2Config.from_dict({"float8_recipe": "tensorwise", "param_dtype": "bf16", **keys})


def test_layers_of_blocks_with_fitting_sizes() -> None:
    """Neither head, nor router, nor experts, nor the MLP of 40 columns."""
    found = float8_layers(qwen3_moe(), config(), Dims())
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert found == {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in projections}


def test_layers_of_named_modules() -> None:
    assert float8_layers(qwen3_moe(), config(float8_modules=["lm_head"]), Dims()) == {"lm_head"}
    found = float8_layers(qwen3_moe(), config(float8_modules=["model.layers.{1}.self_attn.q_proj"]), Dims())
    assert found == {"model.layers.1.self_attn.q_proj"}


def test_layers_of_a_generation_model() -> None:
    found = float8_layers(wan(), config(), Dims())
    assert "blocks.1.ffn.net.2" in found and all(path.startswith("blocks.") for path in found)
    assert not float8_layers(wan(), Fsdp2Config(), Dims())


@pytest.mark.parametrize(
    ("keys", "dims", "lora", "words"),
    [
        ({"param_dtype": None}, Dims(), None, ("param_dtype is fp32", "write param_dtype: bf16")),
        ({}, Dims(tp=2), None, ("--tensor-model-parallel-size is 2", "set it to 1")),
        ({}, Dims(), LoraOptions(("q_proj",)), ("adapters", "--lora-quantize")),
        (
            {"float8_modules": ["model.layers.{*}.mlp"]},
            Dims(),
            None,
            ("none of the 3 linear layers", "multiples of 16"),
        ),
        ({"float8_modules": ["model.layer"]}, Dims(), None, ("float8_modules", "did you mean", "layers")),
    ],
)
def test_what_it_does_not_go_with(keys: Any, dims: Dims, lora: Any, words: tuple[str, ...]) -> None:
    with build_context(BuildContext(lora=lora)), pytest.raises(ConfigError) as error:
        float8_layers(qwen3_moe(), config(**keys), dims)
    for word in words:
        assert word in str(error.value)


def test_devices_without_it_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, why in (((8, 9), None), ((9, 0), None), ((8, 0), "compute capability 8.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A")
        found = CUDAAccelerator().why_no_float8()
        assert found is None if why is None else why in (found or "")
    with pytest.raises(ConfigError) as error:
        convert_to_float8(qwen3_moe(), config(), Dims())
    assert accelerator.current().name in str(error.value) and "float8_emulate: true" in str(error.value)


def test_a_model_that_shards_itself_is_refused() -> None:
    with (
        build_context(BuildContext(fsdp2=config())),
        pytest.raises(ConfigError, match="Own has a fully_shard"),
    ):
        refuse_own_float8("Own")
    refuse_own_float8("Own")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"float8_emulate": True}, "without 'float8_recipe'"),
        ({"float8_recipe": "rowwise", "float8_all_gather": True}, "'float8_all_gather' needs one scale a weight"),
        ({"float8_recipe": "mxfp8"}, "tensorwise"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Fsdp2Config.from_dict(keys)
