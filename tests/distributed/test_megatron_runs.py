"""Runs of the Megatron backend: they equal the other backend's, go on in any layout, and bring weights through."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset
from tests.support.tiny_families import assert_same, tiny_family_dir, weights_in
from tests.support.workers import RankPool

TRAINED = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
FSDP2 = {"use_torch_fsdp2": True}
# name → (ranks, flags)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, TP2),
    "PP2": (2, PP2),
    "DP2": (2, OVERLAP),
    "1 process": (1, {}),
    "PP2 VPP2": (2, {**PP2, "virtual_pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "TP2 PP2": (4, {"tensor_model_parallel_size": 2, **PP2}),
    "FSDP2": (2, FSDP2),
}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="megatron-runs-"))


@functools.cache
def files_of(kind: str) -> dict[str, Path]:
    folder = workspace() / kind.replace(" ", "_")
    is_text = kind == "qwen3"
    hf_dir = (tiny_qwen3_dir if is_text else tiny_qwen2_5_vl_dir)(folder / "hf", seed=4, tie=is_text, deep=True)
    data = write_mixed_dataset(folder / "data", rows=20, seed=2, images=not is_text)
    held_out = write_mixed_dataset(folder / "held_out", rows=8, seed=3, images=not is_text)
    rows = {"dataset_param.basic_parameters.val_dataset": str(held_out)}
    wrap = {"sub_modules_to_wrap": WRAP_TEXT if is_text else WRAP}
    return write_run_files(folder / "files", hf_dir, data, model={} if is_text else TRAINED, data=rows, fsdp2=wrap)


class Pools:
    """The workers of both backends."""

    def __init__(self, megatron: dict[int, RankPool], fsdp2: RankPool) -> None:
        self._megatron, self._fsdp2 = megatron, fsdp2

    def train(self, kind: str, layout: str, run: Path, **flags: Any) -> tuple[list[float], list[float]]:
        """Losses and norms of a run's steps; rows are shuffled, and an epoch ends in between."""
        ranks, layout_flags = LAYOUTS[layout]
        files = files_of(kind)
        chosen = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
        if layout == "FSDP2":
            chosen["fsdp2_config_path"] = files["fsdp2.yaml"]
        settings = {**chosen, "micro_batch_size": 1, "global_batch_size": 8, "save": run, **layout_flags, **flags}
        pool = self._fsdp2 if layout == "FSDP2" else self._megatron[ranks]
        pool.run(run_entry, launch_flags(files, **settings), "pretrain_vlm.py", timeout=180)
        return metrics_of(run)


@pytest.fixture
def pools(megatron_pools: dict[int, RankPool], ranks2: RankPool) -> Pools:
    return Pools(megatron_pools, ranks2)


@pytest.mark.parametrize(("kind", "layout"), [("qwen2_5_vl", "TP2"), ("qwen3", "PP2 VPP2")])
def test_both_backends_train_alike(kind: str, layout: str, pools: Pools, tmp_path: Path) -> None:
    losses, norms = pools.train(kind, layout, tmp_path / "megatron", train_iters=20, no_save_optim=True)
    expected_losses, expected_norms = pools.train(kind, "FSDP2", tmp_path / "fsdp2", train_iters=20)
    assert len(losses) == len(expected_losses) == 20
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert norms[:3] == pytest.approx(expected_norms[:3], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("qwen2_5_vl", "TP2", ("TP2", "PP2", "DP2", "1 process", "FSDP2")),
        ("qwen3", "PP2 VPP2", ("DP2", "TP2 PP2", "FSDP2")),
        ("qwen2_5_vl", "FSDP2", ("PP2", "DP2")),
    ],
)
def test_a_checkpoint_goes_on_in_any_layout(
    kind: str, first: str, then: tuple[str, ...], pools: Pools, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    losses, norms = pools.train(kind, first, whole, train_iters=6, save_interval=3)
    for layout in then:
        run = tmp_path / layout.replace(" ", "_")
        found = pools.train(kind, layout, run, train_iters=6, load=whole, ckpt_step=3)
        if layout == first:
            assert found == (losses[3:], norms[3:])
        assert found[0] == pytest.approx(losses[3:], rel=1e-6), layout
        assert found[1] == pytest.approx(norms[3:], rel=1e-5), layout


def test_evaluation_is_the_same_in_every_layout(pools: Pools, tmp_path: Path) -> None:
    """Forward only, between steps, and the steps after it go on undisturbed."""
    settings = {"train_iters": 4, "eval_interval": 2, "eval_iters": 2, "no_save_optim": True}
    found = {}
    for layout in ("FSDP2", "TP2", "PP2 VPP2", "DP2"):
        run = tmp_path / layout.replace(" ", "_")
        losses, _ = pools.train("qwen3", layout, run, **settings)
        evaluations = [r["eval_loss"] for r in read_metrics(run / "metrics.jsonl") if "eval_loss" in r]
        assert len(losses) == 4 and len(evaluations) == 2
        found[layout] = losses + evaluations
    for layout, figures in found.items():
        assert figures == pytest.approx(found["FSDP2"], rel=1e-6), layout


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_vl tied"])
def test_weights_come_through_bit_equal(family: str, megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """From a directory in bfloat16 and several files, over two stages of two ranks, into a directory: lr is 0."""
    hf_dir = tiny_qwen2_5_vl_dir(tmp_path / "hf", weights=False)
    for name in ("config.json", "generation_config.json"):
        (hf_dir / name).unlink()
    tiny_family_dir(hf_dir, family, dtype=torch.bfloat16, max_shard_size=100_000)
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=2, images=False)
    files = write_run_files(tmp_path / "files", hf_dir, data, model=TRAINED)
    settings = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
    words = launch_flags(
        files,
        **settings,
        **layout,
        micro_batch_size=1,
        global_batch_size=4,
        train_iters=1,
        lr="0",
        save=tmp_path / "run",
        save_hf=True,
    )
    megatron_pools[4].run(run_entry, words, "pretrain_vlm.py", timeout=120)
    assert_same(weights_in(tmp_path / "run" / "hf"), weights_in(hf_dir))
