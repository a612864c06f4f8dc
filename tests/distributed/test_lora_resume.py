"""Checkpoints of adapters: what they hold, and resuming on other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.lora_case import LoraCase, Targets
from tests.support.parallel_case import ParallelCase
from tests.support.parallel_models import LAYOUTS, MODELS
from tests.support.tiny import tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankError, RankPool

TARGETS = "q_proj,down_proj"


def flags_of(folder: Path, hf_dir: Path, data: Path, iters: int, fsdp2: dict[str, Any], **more: Any) -> list[str]:
    files = write_run_files(folder, hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT, **fsdp2})
    settings: dict[str, Any] = {
        "lora_target_modules": TARGETS,
        "lora_modules_to_save": "lm_head",
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "train_iters": iters,
        "lr_decay_style": "constant",
    }
    return launch_flags(files, **{**settings, **more})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_on_another_layout(dtype: str, ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3, tie=False)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)
    more = {"bf16": True} if dtype == "bf16" else {}

    def run(pool: RankPool, name: str, iters: int, **fsdp2: Any) -> list[float]:
        save = tmp_path / name
        words = flags_of(tmp_path / f"{name}{iters}", hf_dir, data, iters, fsdp2, save=save, load=save, **more)
        pool.run(run_entry, words, timeout=120)
        return metrics_of(save)[0]

    unbroken = run(ranks2, "unbroken", 4)
    run(ranks2, "broken", 2)
    stored = FileSystemReader(tmp_path / "broken/iter_0000002").read_metadata().state_dict_metadata
    kinds = {name.split(".")[0] for name in stored}
    assert kinds == {"model", "optimizer"}
    assert all(".lora_" in name or "lm_head" in name for name in stored)
    assert "model.model.layers.0.self_attn.q_proj.lora_A.weight" in stored
    resumed = run(ranks4, "broken", 4, sharding_size=2)
    assert resumed == pytest.approx(unbroken, rel=1e-6 if dtype == "fp32" else 2e-3)
    assert resumed[3] < resumed[0]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lora_r": 4}, "--lora-r is 4 and was 8"),
        ({"lora_target_modules": "q_proj"}, "other layers have adapters than before; --lora-target-modules must name"),
        (
            {"lora_target_modules": None, "lora_modules_to_save": None},
            "holds adapters only .LoRA., and this run has no --lora-target-modules",
        ),
    ],
)
def test_other_adapters_are_refused(changed: dict[str, Any], sentence: str, ranks2: RankPool, tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3, tie=False)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)
    save = tmp_path / "run"
    ranks2.run(run_entry, flags_of(tmp_path / "a", hf_dir, data, 1, {}, save=save), timeout=120)
    words = flags_of(tmp_path / "b", hf_dir, data, 2, {}, save=save, load=save, **changed)
    with pytest.raises(RankError, match=sentence):
        ranks2.run(run_entry, words, timeout=120)


def test_the_base_is_found_again(ranks2: RankPool, tmp_path: Path) -> None:
    """A run whose base came from --load resumes on that base, not on model.json's; one that is gone is asked for."""
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3, tie=False)
    other = tiny_qwen3_dir(tmp_path / "other", seed=4, tie=False)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)

    def run(name: str, iters: int, load: Path, **more: Any) -> list[float]:
        words = flags_of(tmp_path / f"{name}{iters}", hf_dir, data, iters, {}, save=tmp_path / name, load=load, **more)
        ranks2.run(run_entry, words, timeout=120)
        return metrics_of(tmp_path / name)[0]

    unbroken = run("unbroken", 3, other)
    run("broken", 2, other)
    assert run("broken", 3, tmp_path / "broken") == pytest.approx(unbroken, rel=1e-6)
    moved = other.rename(tmp_path / "moved")
    with pytest.raises(RankError, match="which is not there; give its folder as"):
        run("broken", 4, tmp_path / "broken")
    assert run("broken", 4, tmp_path / "broken", load_base_model=moved)[:3] == pytest.approx(unbroken, rel=1e-6)
    with pytest.raises(RankError, match="holds a base model too, and no adapters; keep one of them"):
        run("twice", 1, moved, load_base_model=hf_dir)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("EP2", ["TP2"]),
        pytest.param("TP2 SP", ["EP2 x FSDP2", "1 process"], marks=pytest.mark.full),
        pytest.param("EP2 x FSDP2", ["FSDP2", "TP2, EP2", "CP2 ring"], marks=pytest.mark.full),
    ],
)
def test_adapters_of_experts_go_on_in_other_layouts(
    first: str, then: list[str], ranks1: RankPool, ranks2: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    """The losses of a run that is saved after two steps, and goes on elsewhere, are those of one process's run."""
    pools = {1: ranks1, 2: ranks2, 4: ranks4}
    targets = Targets(("q_proj", "o_proj"), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
    case = LoraCase(ParallelCase("qwen3_moe", MODELS["qwen3_moe"], tmp_path / "case", pools), targets, tmp_path)
    adamw = {"optimizer": None, "sgd_momentum": None, "lr": "1e-2", "no_save_optim": None, "eval_interval": None}

    def run(layout: str, name: str, **flags: Any) -> list[float]:
        settings = {**case.flags, **adamw, "train_iters": 4, "log_row_ids": None, "save": tmp_path / name, **flags}
        words = case.case.words(LAYOUTS[layout], "padded", tmp_path / f"{name}-files", **settings)
        pools[LAYOUTS[layout].world].run(run_entry, words, timeout=120)
        return metrics_of(tmp_path / name)[0]

    unbroken = run("1 process", "unbroken")
    assert run(first, "saved", exit_interval=2) == pytest.approx(unbroken[:2], rel=1e-5)
    for layout in then:
        load = {"load": tmp_path / "saved", "lora_load": None}
        assert run(layout, layout, **load) == pytest.approx(unbroken[2:], rel=1e-5), layout
