"""LoRA on the Megatron backend against a peft + transformers loop: losses, gradient norms and trained adapters, fp32.

The suite runs a case of each kind, and `-m full` the whole table.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.gradients import run_for_megatron_gradients, worst_difference
from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import load_plain, rows_as_inputs, train_plainly, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset

ROWS = 8
STEPS = 3
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = GRADIENT_TOLERANCE = WEIGHT_TOLERANCE = 1e-5
TEXT_TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}


@dataclass(frozen=True)
class Case:
    """A layout, and what has adapters."""

    world: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    micro: int = 2
    kind: str = "text"
    targets: tuple[str, ...] = TEXT_TARGETS
    peft: tuple[tuple[str, Any], ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    full: bool = False


VL_TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj", "attn.qkv", "attn.proj", "merger.mlp.0")
WHOLE_TOWER = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
VL = {"kind": "vl", "targets": VL_TARGETS, "model": WHOLE_TOWER}
CASES = {
    "1 process": Case(),
    "TP2": Case(2, TP2),
    "TP2 SP": Case(2, {**TP2, **SP}),
    "PP2, accumulation": Case(2, PP2, micro=1),
    "recompute": Case(1, RECOMPUTE),
    "DP2 distributed optimizer": Case(2, DISTRIBUTED),
    "PP2 VPP2": Case(2, {**PP2, "virtual_pipeline_model_parallel_size": 2}, full=True),
    "TP2 SP PP2, recompute": Case(4, {**TP2, **SP, **PP2, **RECOMPUTE}),
    "TP2 DP2 distributed optimizer": Case(4, {**TP2, **DISTRIBUTED}, full=True),
    "rsLoRA": Case(1, {"lora_use_rslora": True}, peft=(("use_rslora", True),), full=True),
    "TP2, DoRA": Case(2, {**TP2, "lora_use_dora": True}, peft=(("use_dora", True),)),
    "TP2 SP, DoRA": Case(2, {**TP2, **SP, "lora_use_dora": True}, peft=(("use_dora", True),), full=True),
    "TP2, all layers by Megatron's names": Case(
        2, {**TP2, "lora_target_modules": "linear_qkv,linear_proj,linear_fc1,linear_fc2"}, targets=ALL_TARGETS
    ),
    "PP2, head trained whole": Case(
        2, {**PP2, "lora_modules_to_save": "lm_head"}, peft=(("modules_to_save", ("lm_head",)),), full=True
    ),
    "TP2 SP, embedding trained whole": Case(
        2, {**TP2, **SP, "lora_modules_to_save": "embed_tokens"}, peft=(("modules_to_save", ("embed_tokens",)),)
    ),
    "one layer": Case(2, TP2, targets=("model.layers.{0}.self_attn.k_proj",), full=True),
    "vision-language": Case(**VL),
    "vision-language, TP2 SP, recompute": Case(2, {**TP2, **SP, **RECOMPUTE}, **VL),
    "vision-language, PP2": Case(2, PP2, **VL, full=True),
    "vision-language, DoRA": Case(1, {"lora_use_dora": True}, peft=(("use_dora", True),), **VL, full=True),
}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="lora-megatron-"))


@functools.cache
def model_and_data(kind: str) -> tuple[Path, Path]:
    folder = workspace() / kind
    make = tiny_qwen2_5_vl_dir if kind == "vl" else tiny_qwen3_dir
    hf_dir = make(folder / "hf", seed=3, tie=False, deep=True)
    return hf_dir, write_mixed_dataset(folder / "data", rows=ROWS, seed=5, images=kind == "vl")


@dataclass(frozen=True)
class Reference:
    """What a peft + transformers loop has seen.

    Attributes:
        start: directory of the adapters that training starts from.
        losses, norms: of the steps.
        gradients: of the first step, clipped, by names in files.
        adapters: after the last step, by names in files.
    """

    start: Path
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]


@functools.cache
def reference(kind: str, targets: tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> Reference:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    hf_dir, data = model_and_data(kind)
    torch.manual_seed(11)
    # PEFT's own random B: with B zero, the first step has no gradient for A
    plain = [target.replace("{0}", "0") for target in targets]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=plain, init_lora_weights=False, **dict(settings))
    model = get_peft_model(load_plain(hf_dir), config)
    start = Path(tempfile.mkdtemp(dir=workspace()))
    model.save_pretrained(start)
    inputs = rows_as_inputs(hf_dir, data)
    first = train_plainly(hf_dir, inputs, 1, lr=0, clip=1.0, model=model)
    losses, norms, _ = train_reference(hf_dir, inputs, STEPS, model=model)
    return Reference(start, losses, norms, in_files(first.gradients), in_files(get_peft_model_state_dict(model)))


def in_files(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without PEFT's prefix and the name of its adapter."""
    short = {name.removeprefix("base_model.model."): value for name, value in tensors.items()}
    for part in (".default", ".modules_to_save", ".base_layer"):
        short = {name.replace(part, ""): value for name, value in short.items()}
    return {name.replace("magnitude_vector.weight", "magnitude_vector"): value for name, value in short.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if c.full else []) for n, c in CASES.items()]
)
def test_equals_peft(name: str, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    case = CASES[name]
    expected = reference(case.kind, case.targets, case.peft)
    hf_dir, data = model_and_data(case.kind)
    model_id = "qwen2_5_vl" if case.kind == "vl" else "qwen3"
    loss = {"loss_cfg": {"loss_type": "per_token_loss"}}
    files = write_run_files(tmp_path, hf_dir, data, model={"model_id": model_id, **loss, **case.model})
    settings: dict[str, Any] = {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None}
    settings |= {"micro_batch_size": case.micro, "global_batch_size": ROWS, "train_iters": STEPS, "seq_length": 256}
    settings |= {"save": tmp_path / "run", "save_hf": True, "lora_target_modules": ",".join(case.targets)}
    settings |= {"lora_r": 4, "lora_alpha": 8, "lora_load": expected.start, **case.flags}
    flags = launch_flags(files, **settings)
    pool = megatron_pools[case.world]
    if "use_distributed_optimizer" in case.flags:
        pool.run(run_entry, flags, "pretrain_vlm.py", timeout=120)
    else:
        gradients = pool.run(run_for_megatron_gradients, flags, "pretrain_vlm.py", timeout=120)[0][0]
        worst = worst_difference(gradients, expected.gradients)
        assert worst[0] < GRADIENT_TOLERANCE, worst
    losses, norms = metrics_of(tmp_path / "run")
    assert losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
    written = in_files(load_file(tmp_path / "run/hf/adapter_model.safetensors"))
    worst = worst_difference(written, expected.adapters)
    assert worst[0] < WEIGHT_TOLERANCE, worst
