"""Planning of tensor parallelism on models without values: what is split, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.adapters import inject_adapters
from mindspeed_mm.models.common.family import TEXT_TRAITS, FamilyTraits
from mindspeed_mm.models.common.tensor_layers import plan_sequence_regions, plan_tensor_layers
from mindspeed_mm.parallel.tensor_plan import TensorSplit
from mindspeed_mm.utils.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def build(kind: str, **changed: Any) -> Any:
    config_class = getattr(transformers, f"{kind}Config")
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**{**SIZES, **changed}))
    model.tie_weights()
    return model


def plan(model: nn.Module, size: int = 2, traits: FamilyTraits = TEXT_TRAITS, **keys: Any) -> TensorSplit:
    return plan_tensor_layers(model, traits, Fsdp2Config.from_dict(keys), Dims(tp=size))


def test_layers_of_a_dense_model() -> None:
    split = plan(build("Qwen3", head_dim=8, tie_word_embeddings=False))
    layer = "model.layers.1"
    assert {p for p in split.columns if p.startswith(layer)} == {
        *(f"{layer}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")),
        *(f"{layer}.mlp.{name}" for name in ("gate_proj", "up_proj")),
    }
    assert {p for p in split.rows if p.startswith(layer)} == {f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"}
    assert {p for p in split.head_norms if p.startswith(layer)} == {
        f"{layer}.self_attn.q_norm",
        f"{layer}.self_attn.k_norm",
    }
    assert split.gathered == {"lm_head"}
    assert not split.embeddings


def test_an_embedding_tied_to_the_head_is_split() -> None:
    assert set(plan(build("Qwen3", tie_word_embeddings=True)).embeddings) == {"model.embed_tokens"}


def test_layers_with_adapters_are_split_by_their_own_paths() -> None:
    model = build("Qwen3", head_dim=8, tie_word_embeddings=True)
    plain = plan(model)
    inject_adapters(model, LoraOptions(("q_proj", "down_proj", "lm_head")), {})
    split = plan(model)
    assert (split.paths, split.gathered, set(split.blocks)) == (plain.paths, plain.gathered, set(plain.blocks))
    assert all(isinstance(layer, nn.Linear) for layer in (*split.columns.values(), *split.rows.values()))
    layers = {f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")}
    assert split.adapted.keys() == {*layers, "lm_head"}
    named = {"tp_colwise": ["model.layers.{0}.self_attn.q_proj"], "tp_rowwise": []}
    assert set(plan(model, **named).columns) == {"model.layers.0.self_attn.q_proj"}


@pytest.mark.parametrize(
    ("targets", "more", "sentence"),
    [
        (("embed_tokens",), {}, "'model.embed_tokens' shares its weight with the output layer, so it is split by"),
        (("o_proj",), {"use_dora": True}, "--lora-use-dora: the magnitudes of 'model.layers.0.self_attn.o_proj' are"),
    ],
)
def test_adapters_that_are_refused(targets: tuple[str, ...], more: dict[str, Any], sentence: str) -> None:
    model = build("Qwen3", head_dim=8, tie_word_embeddings=True)
    inject_adapters(model, LoraOptions(targets, **more), {})
    with pytest.raises(ConfigError, match=sentence):
        plan(model)


def test_experts_and_routers_stay_whole_and_sinks_are_split() -> None:
    split = plan(build("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2))
    assert split.head_parameters == {f"model.layers.{i}.self_attn": ("sinks",) for i in range(2)}
    assert all("mlp" not in path for path in split.paths)
    split = plan(build("Qwen3Moe", **MOE, mlp_only_layers=[0]))
    assert {p.split(".")[-1] for p in split.paths if ".1.mlp" in p} == set()
    assert {p.split(".")[-1] for p in split.paths if ".0.mlp" in p} == {"gate_proj", "up_proj", "down_proj"}


def test_a_model_of_ones_own_names_its_layers() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in "ab")
            self.norm = nn.LayerNorm(8)
            self.out = nn.Linear(8, 6)

    keys = {"tp_colwise": ["blocks.{*}.up", "out"], "tp_rowwise": ["blocks.{*}.down"]}
    split = plan(Own(), traits=FamilyTraits(), **keys)
    assert set(split.columns) == {"blocks.0.up", "blocks.1.up", "out"} and set(split.rows) == {
        "blocks.0.down",
        "blocks.1.down",
    }
    assert split.gathered == {"out"}
    with pytest.raises(ConfigError, match=r"needs tp_colwise and tp_rowwise"):
        plan(Own(), traits=FamilyTraits())
    with pytest.raises(ConfigError, match=r"'norm' is a LayerNorm; expected linear layers"):
        plan(Own(), traits=FamilyTraits(), **{**keys, "tp_colwise": ["norm"]})
    with pytest.raises(ConfigError, match=r"tp_colwise: entry 'block\.{\*}\.up' matches nothing"):
        plan(Own(), traits=FamilyTraits(), **{**keys, "tp_colwise": ["block.{*}.up"]})
    with pytest.raises(ConfigError, match=r"both match 'blocks.0.up'"):
        plan(Own(), traits=FamilyTraits(), tp_colwise=["blocks.{*}.up"], tp_rowwise=["blocks.0.up"])
    with pytest.raises(ConfigError, match=r"tp_rowwise matches layers of 'blocks.0', but tp_colwise none"):
        plan(Own(), traits=FamilyTraits(), tp_rowwise=["blocks.{*}.down"])
    with pytest.raises(ConfigError, match=r"'out': 6 output features can't be split over 4"):
        plan(Own(), 4, FamilyTraits(), **keys)
    with pytest.raises(ConfigError, match=r"states no decoder layers"):
        plan_sequence_regions(Own(), FamilyTraits(), split)


@pytest.mark.parametrize(
    "changed, size, parts",
    [
        ({}, 4, ["2 key-value heads can't be split over 4", "valid --tensor-model-parallel-size here: 1, 2"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 2, ["3 attention heads can't be split"]),
        ({"intermediate_size": 49}, 2, ["'model.layers.0.mlp.gate_proj': 49 output features"]),
        ({"vocab_size": 97}, 2, ["'lm_head': 97 tokens of the vocabulary can't be split over 2"]),
    ],
)
def test_sizes_that_do_not_divide(changed: dict[str, Any], size: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan(build("Qwen3", **changed), size)
    assert all(part in str(error.value) for part in parts), error.value


def test_layers_that_can_not_be_split() -> None:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    deepseek = build("DeepseekV3", **latent, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1)
    with pytest.raises(ConfigError, match=r"kv_a_proj_with_mqa' .*multi-head latent attention|multi-head latent"):
        plan(deepseek)
    linear = build("Qwen3Next", **MOE, head_dim=8, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match=r"linear attention is not split by tensor parallelism"):
        plan(linear)
    with pytest.raises(ConfigError, match=r"qkv_proj' of Phi3ForCausalLM: its output consists of several projections"):
        plan(build("Phi3"))
    with pytest.raises(ConfigError, match=r"'model.layers.0.self_attn.q_norm' is a norm over the 32 features of all"):
        plan(build("Olmo2"))


def test_layers_that_a_pattern_forgets() -> None:
    model = build("Qwen3", tie_word_embeddings=False)
    attention = {"tp_colwise": [f"model.layers.{{*}}.self_attn.{name}" for name in ("q_proj", "k_proj")]}
    attention["tp_rowwise"] = ["model.layers.{*}.self_attn.o_proj"]
    with pytest.raises(ConfigError, match=r"'model.layers.0.self_attn.v_proj' is beside layers that are split"):
        plan(model, **attention)
    attention["tp_colwise"].append("model.layers.{*}.self_attn.v_proj")
    split = plan(model, **attention)
    assert {path.split(".")[-1] for path in split.paths} == set(ATTENTION)
    assert len(split.head_norms) == 4  # whoever names the layers needn't know of the norms


def test_a_split_layer_can_not_be_ignored() -> None:
    with pytest.raises(ConfigError, match=r"'model.layers.0' contains 'model.layers.0.self_attn.q_proj'"):
        plan(build("Qwen3"), ignored_modules=["model.layers.0"])


def test_what_works_on_cut_rows() -> None:
    model = build("Qwen3Moe", **MOE, mlp_only_layers=[0])
    regions = plan_sequence_regions(model, TEXT_TRAITS, plan(model))
    assert regions is not None
    assert set(regions.split) == {"model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.0.mlp"}
    assert set(regions.whole) == {"model.layers.1.mlp"}
    assert len(regions.norms) == 4
