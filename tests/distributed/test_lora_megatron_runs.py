"""Runs with adapters on the Megatron backend: they go on in any layout of either backend, and hold adapters only."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_dir, write_mixed_dataset
from tests.support.workers import RankError, RankPool

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
FSDP2: dict[str, Any] = {}
LORA = {"lora_target_modules": "q_proj,down_proj", "lora_modules_to_save": "lm_head"}


@functools.cache
def files() -> dict[str, Path]:
    folder = Path(tempfile.mkdtemp(prefix="lora-megatron-runs-"))
    hf_dir = tiny_qwen2_dir(folder / "hf", seed=3, tie=False, deep=True)
    data = write_mixed_dataset(folder / "data", rows=12, seed=5, images=False)
    return write_run_files(folder, hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})


def words_of(layout: dict[str, Any], save: Path, iters: int, **flags: Any) -> list[str]:
    settings: dict[str, Any] = {"seq_length": 256, "micro_batch_size": 2, "global_batch_size": 4, "train_iters": iters}
    if layout is not FSDP2:
        settings |= {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None}
    settings |= {"save": save, "load": save, **LORA, **layout, **flags}
    return launch_flags(files(), **settings)


class Pools:
    """The workers of both backends."""

    def __init__(self, megatron: RankPool, fsdp2: RankPool) -> None:
        self._megatron, self._fsdp2 = megatron, fsdp2

    def train(self, layout: dict[str, Any], save: Path, iters: int, **flags: Any) -> list[float]:
        """The losses of a run's steps, those before it was resumed included."""
        pool = self._fsdp2 if layout is FSDP2 else self._megatron
        pool.run(run_entry, words_of(layout, save, iters, **flags), "pretrain_vlm.py", timeout=120)
        return metrics_of(save)[0]


@pytest.fixture
def pools(megatron_pools: dict[int, RankPool], ranks2: RankPool) -> Pools:
    return Pools(megatron_pools[2], ranks2)


def test_both_backends_start_from_the_same_adapters_and_resume_each_other(pools: Pools, tmp_path: Path) -> None:
    unbroken = pools.train(FSDP2, tmp_path / "unbroken", 4)
    assert pools.train(TP2, tmp_path / "run", 1) == pytest.approx(unbroken[:1], rel=1e-6)
    stored = FileSystemReader(tmp_path / "run/iter_0000001").read_metadata().state_dict_metadata
    expected = FileSystemReader(tmp_path / "unbroken/iter_0000004").read_metadata().state_dict_metadata
    assert stored.keys() == expected.keys()
    assert all(".lora_" in name or "lm_head" in name for name in stored)
    pools.train(FSDP2, tmp_path / "run", 2)
    pools.train(PP2, tmp_path / "run", 3)
    assert pools.train(TP2, tmp_path / "run", 4) == pytest.approx(unbroken, rel=1e-5)
    assert unbroken[3] < unbroken[0]


@pytest.mark.full
def test_base_of_another_run(pools: Pools, tmp_path: Path) -> None:
    no_lora = dict.fromkeys(LORA)
    pools.train(FSDP2, tmp_path / "base", 2, **no_lora, save_interval=2)
    flags = {"load_base_model": tmp_path / "base/iter_0000002"}
    expected = pools.train(FSDP2, tmp_path / "fsdp2", 4, **flags)
    pools.train(TP2, tmp_path / "megatron", 2, **flags)
    assert pools.train(PP2, tmp_path / "megatron", 4) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [{"lora_init": "gaussian"}, {"lora_init": "random"}, {"lora_use_dora": True}, {"mm_model": "scratch"}],
    ids=["gaussian", "random", "DoRA", "from scratch"],
)
def test_first_values(flags: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    if "mm_model" in flags:
        described = {
            **json.loads(files()["model.json"].read_text()),
            "train_from_scratch": True,
            "ignore_weights": True,
        }
        flags = {"mm_model": tmp_path / "model.json"}
        flags["mm_model"].write_text(json.dumps(described))
    expected = pools.train(FSDP2, tmp_path / "fsdp2", 3, **flags)
    assert pools.train(TP2, tmp_path / "megatron", 3, **flags) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [TP2, pytest.param(PP2, marks=pytest.mark.full)], ids=["TP2 SP", "PP2 distributed optimizer"]
)
def test_bf16_resumes(layout: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    flags = {"bf16": True, "lora_dropout": 0.2}
    unbroken = pools.train(layout, tmp_path / "unbroken", 4, **flags)
    pools.train(layout, tmp_path / "run", 2, **flags)
    assert pools.train(layout, tmp_path / "run", 4, **flags) == unbroken  # the masks included


def sizes(words: list[str]) -> dict[str, Any]:
    """What a rank holds of a run: dtypes of frozen weights, and elements trained, in buffers and in the optimizer."""
    from mindspeed_mm.backends.ptd import PTDBackend
    from mindspeed_mm.checkpoint.megatron.optimizer import main_parameters

    found: dict[str, Any] = {}
    build = PTDBackend.build_optimizer

    def look(self: PTDBackend, model: Any, run: Any) -> Any:
        optimizer = build(self, model, run)
        named = dict(model[0].named_parameters())
        found["frozen"] = {p.dtype for p in named.values() if not p.requires_grad}
        found["trained"] = sum(p.numel() for p in named.values() if p.requires_grad)
        found["buffers"] = sum(b.numel_unpadded for b in model[0].buffers)
        found["optimizer"] = sum(main.main.numel() for main in main_parameters(optimizer).values())
        return optimizer

    with mock.patch.object(PTDBackend, "build_optimizer", look):
        run_entry(words, "pretrain_vlm.py")
    return found


def test_only_adapters_are_in_buffers_and_optimizer(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    words = words_of({"tensor_model_parallel_size": 2}, tmp_path / "run", 1, bf16=True, lora_modules_to_save=None)
    for found in megatron_pools[2].run(sizes, words, timeout=120):
        assert found["frozen"] == {torch.bfloat16}
        assert found["trained"] == found["buffers"] == found["optimizer"] > 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"lora_r": 4}, "--lora-r is 4 and was 8"),
        ({"lora_target_modules": "linear_qkv"}, "other layers have adapters than before"),
        ({"lora_modules_to_save": "q_norm"}, "no module of Qwen2ForCausalLM has this name"),
        ({"lora_target_modules": "q_proj,lm_head", "lora_modules_to_save": None}, "lm_head is the output layer"),
        ({"lora_target_modules": "embed_tokens"}, "model.embed_tokens is a Embedding, which gets no adapter"),
        ({"lora_target_modules": "o_proj", "lora_modules_to_save": "q_proj"}, "q_proj.weight would be trained whole"),
        ({"lora_target_modules": None, "lora_modules_to_save": None}, "has no --lora-target-modules"),
    ],
)
def test_what_does_not_fit_is_refused(flags: dict[str, Any], sentence: str, pools: Pools, tmp_path: Path) -> None:
    if "was" in sentence or "before" in sentence or "has no" in sentence:
        pools.train(TP2, tmp_path / "run", 1)
    with pytest.raises(RankError, match=sentence):
        pools.train(TP2, tmp_path / "run", 2, **flags)


def build_own_model() -> None:
    from tests.support.tiny_steps import TinySteps

    TinySteps("ptd", lora_target_modules=["linear_qkv"])


def test_a_model_of_ones_own_is_refused(megatron_pools: dict[int, RankPool]) -> None:
    with pytest.raises(RankError, match="which model_provider returned, inserts no adapters"):
        megatron_pools[2].run(build_own_model, timeout=120)
