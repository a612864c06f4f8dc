"""Adapters under Muon, averaged weights, and float16 with a loss scale."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launch import run_entry
from tests.support.lora_case import LoraCase, Targets
from tests.support.parallel_case import ParallelCase
from tests.support.parallel_models import BALANCE, LAYOUTS, MODELS
from tests.support.workers import RankPool

BOTH = Targets(("q_proj", "lm_head"), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))


@pytest.fixture(scope="module")
def case(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool) -> LoraCase:
    pools, folder = {1: ranks1, 2: ranks2, 4: ranks4}, Path(tempfile.mkdtemp(prefix="lora-"))
    return LoraCase(ParallelCase("qwen3_moe", MODELS["qwen3_moe"], folder / "case", pools), BOTH, folder)


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="lora-optimizers-"))


@functools.cache
def by_muon(case: LoraCase, layout: str) -> Any:
    """A run by Muon."""
    flags = {"optimizer": "muon", "lr": "1e-2", "weight_decay": 0.0, "clip_grad": 0.0}
    return case.run(LAYOUTS[layout], "padded", workspace() / layout, **flags)


@pytest.mark.parametrize(
    "layout", ["EP2", *(pytest.param(name, marks=pytest.mark.full) for name in ("FSDP2", "TP2", "EP2 x FSDP2"))]
)
def test_muon_in_every_layout(layout: str, case: LoraCase) -> None:
    """A and B are orthogonalised whole, each expert's for itself, wherever their parts are."""
    found, alone = by_muon(case, layout), by_muon(case, "1 process")
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    assert found.norms == pytest.approx(alone.norms, rel=1e-4)
    assert alone.losses[-1] < alone.losses[0]


@pytest.mark.full
def test_the_average_is_that_of_the_adapters(case: LoraCase, ranks2: RankPool, tmp_path: Path) -> None:
    """After two steps: a1 = w1, a2 = a1 + (1 - min(0.9, 2 / 11)) (w2 - a1); it is a PEFT directory of its own."""
    flags = {"save_hf": True, "ema_decay": 0.9, "train_iters": 2, "eval_interval": None}

    def adapters(steps: int, name: str) -> dict[str, torch.Tensor]:
        folder = tmp_path / str(steps)
        if not folder.exists():
            words = case.case.words(LAYOUTS["FSDP2"], "padded", folder, **{**case.flags, **flags, "train_iters": steps})
            ranks2.run(run_entry, words, timeout=120)
        return load_file(folder / f"run/{name}/adapter_model.safetensors")

    first, second, average = adapters(1, "hf"), adapters(2, "hf"), adapters(2, "hf_ema")
    assert average.keys() == second.keys()
    for name, value in average.items():
        torch.testing.assert_close(value, first[name] + (1 - 2 / 11) * (second[name] - first[name]))


@pytest.mark.full
@pytest.mark.parametrize("compute_mode", ["default", "chunk"])
@pytest.mark.parametrize("layout", ["1 process", "EP2", "TP2"])
def test_float16_with_a_loss_scale(layout: str, compute_mode: str, case: LoraCase, tmp_path: Path) -> None:
    """Losses and gradients of the float32 run, but for float16's rounding."""
    loss = {"loss_cfg": {"router_aux_loss_coef": BALANCE, "compute_mode": compute_mode, "chunk_size": 3}}
    half = case.run(LAYOUTS[layout], "padded", tmp_path / "half", model=loss, fp16=True, loss_scale=256.0, lr=1e-3)
    full = case.run(LAYOUTS["1 process"], "padded", tmp_path / "full", model=loss, lr=1e-3)
    assert half.losses == pytest.approx(full.losses, rel=2e-3)
    assert half.norms == pytest.approx(full.norms, rel=2e-2)
    assert half.gradients.keys() == full.gradients.keys()
