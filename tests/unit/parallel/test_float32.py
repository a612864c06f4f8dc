"""What stays in float32: found by the rules of transformers and of diffusers, and inputs of blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.parallel.float32 import cast_hidden_states, find_kept, leave_whole
from mindspeed_mm.parallel.fsdp2 import ShardPlan
from mindspeed_mm.parallel.meshes import ParameterMeshes
from tests.support.predictors import cases


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        self.gates = nn.ModuleList([nn.Linear(3, 3)])
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden_states: torch.Tensor, angles: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(hidden=hidden_states.dtype, angles=angles.dtype)


def test_modules_are_found_whole_and_other_parameters_by_themselves() -> None:
    model = nn.Sequential(Block(), Block())
    kept = find_kept(model, lambda name: "gates" in name or "table" in name)
    assert list(kept.units) == ["0.gates.0", "1.gates.0"]  # a list of modules is never called
    assert list(kept.loose) == ["0.table", "1.table"]
    assert leave_whole(kept, torch.device("cpu")) == {model[0].table, model[1].table}
    assert find_kept(model, lambda name: False) == ({}, {})


def test_all_of_a_model_is_no_unit() -> None:
    kept = find_kept(nn.Linear(2, 2), lambda name: True)
    assert list(kept.units) == [] and sorted(kept.loose) == ["bias", "weight"]


def test_transformers_says_what_it_keeps() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

    with torch.device("meta"):
        text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**text, first_k_dense_replace=1, n_routed_experts=8))
        oss = GptOssForCausalLM(GptOssConfig(**text, num_local_experts=2))
    for dtype in (torch.bfloat16, torch.float16):
        whole = nn.ModuleDict({"inside": deepseek})  # of a model that isn't transformers' own
        for model, path in ((deepseek, ""), (whole, "inside.")):
            kept = find_kept(model, as_trainable(model).keeps_in_float32(dtype))
            assert list(kept.units) == [f"{path}model.layers.1.mlp.gate"] and not kept.loose
    assert not find_kept(oss, as_trainable(oss).keeps_in_float32(torch.bfloat16)).units
    norms = find_kept(oss, as_trainable(oss).keeps_in_float32(torch.float16))
    assert len(norms.units) == 5 and not norms.loose
    whole = norms.only_matrices_in_units()
    assert not whole.units and sorted(whole.loose) == sorted(f"{path}.weight" for path in norms.units)


def test_diffusers_says_what_it_keeps() -> None:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(**cases()["wan-t2v"][1].config)
    kept = find_kept(model, as_trainable(model).keeps_in_float32(torch.bfloat16))
    blocks = range(len(model.blocks))
    assert sorted(kept.units) == [*(f"blocks.{i}.norm2" for i in blocks), "condition_embedder.time_embedder"]
    tables = [*(f"blocks.{i}.scale_shift_table" for i in blocks), "scale_shift_table"]
    assert sorted(kept.loose) == tables
    whole = kept.only_matrices_in_units()
    norms = [f"blocks.{i}.norm2.{name}" for i in blocks for name in ("weight", "bias")]
    assert list(whole.units) == ["condition_embedder.time_embedder"] and sorted(whole.loose) == sorted(tables + norms)


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy()])
def test_modules_without_a_matrix_are_units_in_host_memory_only(policy: OffloadPolicy) -> None:
    """There parameters that aren't sharded would be cast."""
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3))
    plan = ShardPlan(ParameterMeshes(SimpleNamespace()), MixedPrecisionPolicy(), policy, True)  # type: ignore[arg-type]
    plan.keep_in_float32(find_kept(model, lambda name: True), torch.device("cpu"))
    in_host_memory = isinstance(policy, CPUOffloadPolicy)
    assert list(plan.float32_units) == (["0", "1"] if in_host_memory else ["1"])
    assert plan.ignored_params == (set() if in_host_memory else set(model[0].parameters()))


def test_a_block_casts_its_hidden_states_alone() -> None:
    block, wide = Block(), torch.zeros(1, 3)
    cast_hidden_states(block, torch.bfloat16)
    for found in (block(wide, wide), block(wide, angles=wide), block(hidden_states=wide, angles=wide)):
        assert (found.hidden, found.angles) == (torch.bfloat16, torch.float32)
    assert block(torch.zeros(1, dtype=torch.long), wide).hidden == torch.long
