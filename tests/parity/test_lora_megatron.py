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

from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import load_plain, rows_as_inputs, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset

ROWS = 8
STEPS = 3
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-6, 1e-5, 1e-5
TEXT_TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
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
    full: bool = False


CASES = {
    "1 process": Case(),
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


@functools.cache
def reference(
    kind: str, targets: tuple[str, ...], settings: tuple[tuple[str, Any], ...]
) -> tuple[Path, list[float], list[float], dict[str, torch.Tensor]]:
    """The directory of the adapters that training starts from; losses, norms, and the adapters at the end."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    hf_dir, data = model_and_data(kind)
    torch.manual_seed(11)
    # PEFT's own random B: with B zero, the first step has no gradient for A
    plain = [target.replace("{0}", "0") for target in targets]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=plain, init_lora_weights=False, **dict(settings))
    model = get_peft_model(load_plain(hf_dir), config)
    start = Path(tempfile.mkdtemp(dir=workspace()))
    model.save_pretrained(start)
    losses, norms, _ = train_reference(hf_dir, rows_as_inputs(hf_dir, data), STEPS, model=model)
    return start, losses, norms, get_peft_model_state_dict(model)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if c.full else []) for n, c in CASES.items()])
def test_equals_peft(name: str, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    case = CASES[name]
    start, losses, norms, adapters = reference(case.kind, case.targets, case.peft)
    hf_dir, data = model_and_data(case.kind)
    model_id = "qwen2_5_vl" if case.kind == "vl" else "qwen3"
    loss = {"loss_cfg": {"loss_type": "per_token_loss"}}
    files = write_run_files(tmp_path, hf_dir, data, model={"model_id": model_id, **loss})
    settings: dict[str, Any] = {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None}
    settings |= {"micro_batch_size": case.micro, "global_batch_size": ROWS, "train_iters": STEPS, "seq_length": 256}
    settings |= {"save": tmp_path / "run", "save_hf": True, "lora_target_modules": ",".join(case.targets)}
    flags = launch_flags(files, **settings, lora_r=4, lora_alpha=8, lora_load=start, **case.flags)
    megatron_pools[case.world].run(run_entry, flags, "pretrain_vlm.py", timeout=120)
    found_losses, found_norms = metrics_of(tmp_path / "run")
    assert found_losses == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert found_norms == pytest.approx(norms, rel=NORM_TOLERANCE)
    written = load_file(tmp_path / "run/hf/adapter_model.safetensors")
    assert written.keys() == adapters.keys()
    for key, value in adapters.items():
        torch.testing.assert_close(written[key], value, rtol=WEIGHT_TOLERANCE, atol=1e-7)
