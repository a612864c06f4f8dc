"""QLoRA of generation models: a base model in NF4 trains as one whose weights are restored from NF4 beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.test_generation_layouts import ROWS, SEED, STEPS, Case, files_of
from tests.parity.test_qlora import restored
from tests.support.launch import launch_flags, metrics_of, run_entry
from tests.support.tiny_diffusers import diffusers_config


@pytest.mark.full
def test_equals_training_on_restored_weights(pools: dict[int, Any], tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wide = {**diffusers_config("wan"), "num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 96}
        model = WanTransformer3DModel(**wide)
    model.save_pretrained(tmp_path / "whole")
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features >= 64]
    assert len(linear) >= 10
    for layer in linear:
        layer.weight.data = restored(layer.weight.data)
    model.save_pretrained(tmp_path / "restored")

    def train(name: str, world: int, base: str, **more: Any) -> tuple[list[float], list[float]]:
        files = files_of(Case(world, 4), tmp_path / name)
        described = json.loads(files["model.json"].read_text())
        described["predictor"] = {"from_pretrained": str(tmp_path / base)}
        files["model.json"].write_text(json.dumps(described))
        settings = {"micro_batch_size": 4, "global_batch_size": ROWS, "train_iters": STEPS, "seed": SEED}
        settings |= {"lora_target_modules": "proj_q,proj_v,ffn.2", "save": tmp_path / f"{name}_run"}
        words = launch_flags(files, **{**settings, **more})
        pools[world].run(run_entry, words, "pretrain_sora.py", timeout=120)
        return metrics_of(tmp_path / f"{name}_run")

    losses, norms = train("reference", 1, "restored")
    found_losses, found_norms = train("nf4", 2, "whole", lora_quantize="nf4")
    whole_losses, _ = train("whole_weights", 1, "whole")
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    assert whole_losses != pytest.approx(losses, rel=1e-5)
