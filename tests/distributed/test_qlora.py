"""QLoRA: what is resident, and resuming on another layout."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.backends.fsdp2 import FSDP2Backend
from mindspeed_mm.models.common.quantized import NF4Linear
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankError, RankPool


def flags_of(folder: Path, hf_dir: Path, data: Path, fsdp2: dict[str, Any], **more: Any) -> list[str]:
    files = write_run_files(folder, hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT, **fsdp2})
    settings: dict[str, Any] = {
        "lora_target_modules": "all-linear",
        "lora_quantize": "nf4",
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "train_iters": 2,
    }
    return launch_flags(files, **{**settings, **more})


def train_and_measure(words: list[str]) -> tuple[int, int, int]:
    """Bytes of all live tensors after training, of the packed weights, and the number of weights that are packed."""
    kept: list[nn.Module] = []
    build = FSDP2Backend.build_model

    def build_and_keep(*args: Any, **kwargs: Any) -> nn.Module:
        kept.append(build(*args, **kwargs))
        return kept[0]

    FSDP2Backend.build_model = build_and_keep  # type: ignore[method-assign]
    try:
        run_entry(words)
    finally:
        FSDP2Backend.build_model = build  # type: ignore[method-assign]
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not t.is_meta]
    tensors = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    layers = [m for m in kept[0].modules() if isinstance(m, NF4Linear)]
    packed = [m.weight_nf4._local_tensor for m in layers]
    assert all(t.dtype == torch.uint8 for t in packed)
    weights = sum(len(t) * m.in_features for t, m in zip(packed, layers, strict=True))
    return sum(storages.values()), sum(t.nbytes for t in packed), weights


def test_resident_bytes(ranks2: RankPool, tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3, tie=False)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)
    measured = []
    for name, more in (("plain", {"lora_quantize": None}), ("nf4", {})):
        words = flags_of(tmp_path / name, hf_dir, data, {}, save=tmp_path / f"run_{name}", **more)
        measured.append(ranks2.run(train_and_measure, words, timeout=120))
    for (whole, nothing, _), (alive, packed, weights) in zip(*measured, strict=True):
        print(f"{weights} weights: {packed / weights:.4f} bytes each; {whole} bytes alive without, {alive} with NF4")
        assert nothing == 0 and weights > 20_000
        assert packed <= 0.6 * weights
        assert alive <= whole - (4 - 0.6) * weights


def test_resume_on_another_layout(ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3, tie=False)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)

    def run(pool: RankPool, name: str, iters: int, fsdp2: dict[str, Any] | None = None, **more: Any) -> list[float]:
        folder, save = tmp_path / f"{name}{iters}", tmp_path / name
        words = flags_of(folder, hf_dir, data, fsdp2 or {}, train_iters=iters, save=save, load=save, **more)
        pool.run(run_entry, words, timeout=120)
        return metrics_of(save)[0]

    unbroken = run(ranks2, "unbroken", 4)
    run(ranks2, "broken", 2)
    with pytest.raises(RankError, match="were trained with --lora-quantize nf4; add it, or add --finetune"):
        run(ranks2, "broken", 4, lora_quantize=None)
    assert run(ranks4, "broken", 4, {"sharding_size": 2}) == pytest.approx(unbroken, rel=1e-6)


def test_random_weights_are_refused(ranks2: RankPool, tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", weights=False)
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=5, images=False)
    words = flags_of(tmp_path / "files", hf_dir, data, {}, save=tmp_path / "run")
    (tmp_path / "files/model.json").write_text(
        json.dumps({"init_from_hf_path": str(hf_dir), "train_from_scratch": True})
    )
    with pytest.raises(
        RankError, match="--lora-quantize nf4: Qwen3ForCausalLM starts from random weights; there is no"
    ):
        ranks2.run(run_entry, words, timeout=120)
