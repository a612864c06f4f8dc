"""--recompute-granularity full in runs without an fsdp2.yaml: language and generation, through the entry scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.tiny_diffusers import diffusers_config
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

ROWS, BLOCKS = 4, 2
FLAGS = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def language_files(folder: Path, qwen3_dir: Path) -> dict[str, Path]:
    return write_run_files(folder, qwen3_dir, write_mixed_dataset(folder / "data", rows=ROWS, images=False))


def generation_files(folder: Path, qwen3_dir: Path) -> dict[str, Path]:
    model = model_json(write_encoders(folder / "encoders"))
    model["predictor"]["config"] = diffusers_config("wan")
    data = data_json(write_clips(folder / "clips", rows=ROWS, frames=5))
    files = {name: folder / name for name in ("model.json", "data.json", "tools.json", "fsdp2.yaml")}
    for name, content in (("model.json", model), ("data.json", data), ("tools.json", {})):
        files[name].write_text(json.dumps(content))
    return files


def block_runs(words: list[str], script: str, module: str, name: str) -> int:
    """How often a run calls the feed-forward net, of which every block has one."""
    part = getattr(__import__(module, fromlist=[name]), name)
    forward, runs = part.forward, 0

    def counted(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal runs
        runs += 1
        return forward(self, *args, **kwargs)

    part.forward = counted
    try:
        run_entry(words, script)
    finally:
        part.forward = forward
    return runs


@pytest.mark.parametrize(
    "script, write, module, name",
    [
        ("pretrain_transformers.py", language_files, "transformers.models.qwen3.modeling_qwen3", "Qwen3MLP"),
        ("pretrain_sora.py", generation_files, "diffusers.models.attention", "FeedForward"),
    ],
    ids=["language", "generation"],
)
def test_the_first_blocks_run_again_in_backward_and_the_numbers_are_the_same(
    ranks2: RankPool, tmp_path: Path, qwen3_dir: Path, script: str, write: Callable[..., dict[str, Path]], module: str,
    name: str,
) -> None:  # fmt: skip
    files = write(tmp_path, qwen3_dir)
    sizes = {"micro_batch_size": 1, "global_batch_size": ROWS, "train_iters": 1, "no_save_optim": True}
    runs, metrics = {}, {}
    for asked, flags in (("plain", {}), ("recomputed", FLAGS)):
        words = launch_flags(files, fsdp2_config_path=None, save=tmp_path / asked, **sizes, **flags)
        runs[asked] = ranks2.run(block_runs, words, script, module, name, timeout=120)
        metrics[asked] = metrics_of(tmp_path / asked)
    micro_batches = ROWS // 2
    assert runs == {"plain": [micro_batches * BLOCKS] * 2, "recomputed": [micro_batches * (BLOCKS + 1)] * 2}
    assert metrics["plain"] == metrics["recomputed"]
