"""A run with fused kernels, of a stand-in for a device's: its layers are sharded and trained as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.plain_kernels import PlainKernels
from tests.support.tiny import tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankPool

FUSED = {"use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_fused_rotary_pos_emb": True}


def run_with_kernels(words: list[str], script: str = "pretrain_transformers.py") -> dict[str, int]:
    from mindspeed_mm.accelerator.cpu import CPUAccelerator

    kernels = PlainKernels()
    with mock.patch.object(CPUAccelerator, "fused_kernels", lambda self: kernels):
        run_entry(words, script)
    return dict(kernels.calls)


@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"lora_r": 4, "lora_target_modules": "all-linear"}, marks=pytest.mark.full)],
    ids=["trained whole", "adapters"],
)
def test_losses_are_those_of_transformers_layers(flags: dict[str, Any], ranks2: RankPool, tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)
    recompute = {"recompute_modules": WRAP_TEXT, "use_reentrant": False}
    files = write_run_files(tmp_path / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT, **recompute})
    common = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 3, **flags}
    ranks2.run(run_entry, launch_flags(files, save=tmp_path / "plain", **common), timeout=120)
    words = launch_flags(files, save=tmp_path / "fused", **common, **FUSED)
    for calls in ranks2.run(run_with_kernels, words, timeout=120):
        assert calls.keys() == {"norm", "gate", "rotary"} and calls["gate"] == calls["rotary"] > 0
    for found, expected in zip(metrics_of(tmp_path / "fused"), metrics_of(tmp_path / "plain"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_norms_of_megatron_s_layers(ranks: int, megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)
    files = write_run_files(tmp_path / "files", hf_dir, data)
    left_out = dict.fromkeys(("use_torch_fsdp2", "fsdp2_config_path", "ckpt_format"))
    common = {**left_out, "micro_batch_size": 4, "global_batch_size": 4, "train_iters": 3, "seq_length": 256}
    common |= {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1}
    script = "pretrain_vlm.py"
    pool = megatron_pools[ranks]
    pool.run(run_entry, launch_flags(files, save=tmp_path / "plain", **common), script, timeout=120)
    words = launch_flags(files, save=tmp_path / "fused", **common, use_fused_rmsnorm=True)
    for calls in pool.run(run_with_kernels, words, script, timeout=120):
        assert calls.keys() == {"norm"}
    for found, expected in zip(metrics_of(tmp_path / "fused"), metrics_of(tmp_path / "plain"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
