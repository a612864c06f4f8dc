"""Which experts are split over ranks, and what refuses to be; on models without storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.adapters import inject_adapters
from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.sharding_outline import ShardingOutline
from mindspeed_mm.parallel.experts import find_experts
from mindspeed_mm.utils.errors import ConfigError

SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 8}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1]}
PATHS = tuple(f"model.layers.{layer}.mlp.experts" for layer in (0, 2, 3))


def model(**fields: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**{**SIZES, **EXPERTS, "num_attention_heads": 2, "num_key_value_heads": 2, **fields})
    with torch.device("meta"):
        return adapt_class(Qwen3MoeForCausalLM)._from_config(config)


def outline(planned: Any, dims: Dims | None = None, world_size: int = 2, **fsdp2: Any) -> ShardingOutline:
    planned.fsdp2_overrides = {"expert_parallel_size": 2, **fsdp2}
    with build_context(BuildContext(dims=dims)):
        return planned.plan_sharding(world_size)


def test_experts_of_all_layers_or_of_those_that_are_named() -> None:
    assert tuple(find_experts(model())) == PATHS
    assert outline(model()).experts == PATHS
    assert outline(model(), moe_modules=["model.layers.{2-3}.mlp.experts"]).experts == PATHS[1:]
    assert outline(model(), moe_modules=["model.layers.{0,3}"]).experts == (PATHS[0], PATHS[2])
    assert outline(model(), expert_parallel_size=1).experts == ()


def with_adapters(*parameters: str, **fields: Any) -> Any:
    planned = model(**fields)
    inject_adapters(planned, LoraOptions((), parameters, r=3), {})
    return planned


def test_experts_with_adapters_are_planned_by_their_own_paths() -> None:
    both = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    assert outline(with_adapters(*both)).experts == PATHS
    assert outline(with_adapters(*both), moe_modules=["model.layers.{2-3}.mlp.experts"]).experts == PATHS[1:]
    # the rank may be odd, but not the width that A is sharded along
    assert outline(with_adapters(*both), world_size=4).experts == PATHS
    sentence = r"dim 2 of 'model.layers.0.mlp.experts.lora_A.weight' \[6, 3, 9\]: 9 can't be sharded evenly by 2"
    with pytest.raises(ConfigError, match=sentence):
        outline(with_adapters("mlp.experts.down_proj", moe_intermediate_size=9), world_size=4)


def test_sizes_of_a_run_count_rather_than_those_of_the_file() -> None:
    assert outline(model(), Dims(dp=4, ep=1), 4).experts == ()
    assert outline(model(), Dims(dp=3, ep=3), 3, expert_parallel_size=1).dims.ep == 3


@pytest.mark.parametrize(
    ("fields", "world_size", "fsdp2", "parts"),
    [
        ({}, 4, {"expert_parallel_size": 4}, [f"'{PATHS[0]}': 6 experts can't be shared by 4", "1, 2"]),
        ({}, 3, {}, ["expert_parallel_size is 2, which does not divide the 3 processes; valid here: 1, 3"]),
        (
            {"moe_intermediate_size": 8, "hidden_size": 18},
            8,
            {},
            ["dim 1 of 'model.layers.0.mlp.experts.down_proj' [6, 18, 8]: 18 can't", "by 4", "ep_fsdp_size", "of 1, 2"],
        ),
        ({}, 8, {"ep_fsdp_size": 3}, ["ep_fsdp_size is 3, which does not divide 4", "valid here: 1, 2, 4"]),
        (
            {},
            2,
            {"moe_modules": ["model.layers.{0-1}.mlp"]},
            ["moe_modules names 'model.layers.1.mlp', which is a Qwen3MoeMLP without experts", PATHS[0]],
        ),
        (
            {},
            2,
            {"moe_modules": ["model.layers.{0}.mlp.expert"]},
            ["has no 'expert'", "did you mean 'model.layers.{0}.mlp.experts'?"],
        ),
        (
            {},
            2,
            {"ignored_modules": ["model.layers.{2}"]},
            ["ignored_modules keeps 'model.layers.2' whole", f"splits '{PATHS[1]}'"],
        ),
        ({}, 2, {"ignored_modules": [f"{PATHS[0]}.act_fn"]}, [f"splits '{PATHS[0]}'"]),
        (
            {"mlp_only_layers": [0, 1, 2, 3]},
            2,
            {},
            ["expert_parallel_size is 2, but Qwen3MoeForCausalLM has no experts", "write 1"],
        ),
    ],
)
def test_what_does_not_fit(fields: Any, world_size: int, fsdp2: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        outline(model(**fields), world_size=world_size, **fsdp2)
    for part in parts:
        assert part in str(error.value)


def test_a_transformers_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.parallel.experts.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"expert_parallel_size is 2, but transformers [0-9.]+ can't split"):
        outline(model(), world_size=2, expert_parallel_size=2)


def test_a_parameter_of_all_experts_can_not_be_split() -> None:
    planned = model()
    planned.model.layers[2].mlp.experts.norm = torch.nn.RMSNorm(24, device="meta")
    with pytest.raises(ConfigError, match=r"'model.layers.2.mlp.experts.norm.weight' \[24\] is shared by all experts"):
        outline(planned)
