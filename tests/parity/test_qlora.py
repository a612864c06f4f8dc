"""QLoRA under FSDP2 against a peft + transformers loop over the weights restored from NF4: losses, norms, adapters."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mindspeed_mm.models.common.quantized import NF4
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import load_plain, rows_as_inputs, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankPool

ROWS, STEPS, TOLERANCE = 8, 3, 1e-5
TARGETS = ("q_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """A layout."""

    world: int = 1
    micro: int = 2
    fsdp2: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    kind: str = "text"
    peft: tuple[tuple[str, Any], ...] = ()


full = pytest.mark.full
CASES = {
    "1 process": (Case(), ()),
    "2 processes": (Case(2), ()),
    "2 processes, meta init": (Case(2, flags={"init_model_with_meta_device": True}), full),
    "2 processes, recompute": (Case(2, fsdp2={"recompute_modules": WRAP_TEXT, "use_reentrant": False}), full),
    "2 processes, reentrant recompute": (Case(2, fsdp2={"recompute_modules": WRAP_TEXT, "use_reentrant": True}), full),
    "2 processes, DoRA": (Case(2, flags={"lora_use_dora": True}, peft=(("use_dora", True),)), full),
    "2 processes, vision-language": (Case(2, kind="vl"), full),
    "2 processes, context parallel": (Case(2, flags={"context_parallel_size": 2}), full),
    "4 processes, HSDP": (Case(4, 1, {"sharding_size": 2}), full),
    # 3 ranks divide no layer's rows evenly
    "3 processes": (Case(3, 1, flags={"global_batch_size": 6}), full),
}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="qlora-"))


@functools.cache
def model_and_data(kind: str, rows: int) -> tuple[Path, Path]:
    folder = workspace() / f"{kind}{rows}"
    make = {"text": functools.partial(tiny_qwen3_dir, tie=False), "vl": tiny_qwen2_5_vl_dir}[kind]
    hf_dir = make(folder / "hf", seed=3)
    return hf_dir, write_mixed_dataset(folder / "data", rows=rows, seed=5, images=kind != "text")


def restored(weight: torch.Tensor) -> torch.Tensor:
    """A weight after NF4: the nearest of 16 values in each block of 64 of a row."""
    values = torch.tensor(NF4)
    blocks = []
    for block in weight.split(64, dim=1):
        scale = block.abs().amax(dim=1, keepdim=True)
        blocks.append(values[(block[:, :, None] / scale[:, :, None] - values).abs().argmin(dim=2)] * scale)
    return torch.cat(blocks, dim=1)


@functools.cache
def reference(
    kind: str, rows: int, settings: tuple[tuple[str, Any], ...]
) -> tuple[Path, list[float], list[float], dict[str, torch.Tensor]]:
    """The directory of the adapters that training starts from; losses, norms, and the adapters at the end."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    hf_dir, data = model_and_data(kind, rows)
    plain = load_plain(hf_dir)
    changed = 0
    for module in plain.modules():
        if isinstance(module, nn.Linear) and module is not plain.lm_head and module.in_features >= 64:
            module.weight.data = restored(module.weight.data)
            changed += 1
    assert changed >= 14
    torch.manual_seed(11)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), init_lora_weights=False, **dict(settings))
    model = get_peft_model(plain, config)
    start = Path(tempfile.mkdtemp(dir=workspace()))
    model.save_pretrained(start)
    losses, norms, _ = train_reference(hf_dir, rows_as_inputs(hf_dir, data), STEPS, model=model)
    return start, losses, norms, get_peft_model_state_dict(model)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (_, marks) in CASES.items()])
def test_equals_peft(name: str, pools: dict[int, Any], tmp_path: Path) -> None:
    case = CASES[name][0]
    rows = case.flags.get("global_batch_size", ROWS)
    start, losses, norms, adapters = reference(case.kind, rows, case.peft)
    hf_dir, data = model_and_data(case.kind, rows)
    before = digest(hf_dir)
    units = WRAP_TEXT if case.kind == "text" else WRAP
    files = write_run_files(tmp_path, hf_dir, data, fsdp2={"sub_modules_to_wrap": units, **case.fsdp2})
    settings = {
        "micro_batch_size": case.micro,
        "global_batch_size": ROWS,
        "train_iters": STEPS,
        "save": tmp_path / "run",
        "save_hf": True,
        "lora_target_modules": ",".join(TARGETS),
        "lora_quantize": "nf4",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_load": start,
    }
    pool = pools.get(case.world) or RankPool(case.world)
    try:
        pool.run(run_entry, launch_flags(files, **{**settings, **case.flags}), timeout=120)
    finally:
        if case.world not in pools:
            pool.close()
    found_losses, found_norms = metrics_of(tmp_path / "run")
    assert found_losses == pytest.approx(losses, rel=TOLERANCE)
    assert found_norms == pytest.approx(norms, rel=TOLERANCE)
    written = load_file(tmp_path / "run/hf/adapter_model.safetensors")
    assert written.keys() == adapters.keys()
    for key, value in adapters.items():
        # of the whole tensor: Adam's step of an element whose gradient cancels is as uncertain as that gradient
        assert (written[key] - value).norm() <= TOLERANCE * value.norm(), key
    assert digest(hf_dir) == before
