"""Runs of the Megatron backend: they equal the other backend's, go on in any layout, and bring weights through."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen2_dir, tiny_qwen3_dir, write_mixed_dataset
from tests.support.tiny_families import assert_same, weights_in
from tests.support.workers import RankError, RankPool

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


def modules_of_megatron() -> list[str]:
    return [name for name in sys.modules if name.startswith("megatron.core")]


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="megatron-runs-"))


@functools.cache
def files_of(kind: str) -> dict[str, Path]:
    folder = workspace() / kind.replace(" ", "_")
    is_text = kind in ("qwen2", "qwen3")
    make = {"qwen2": tiny_qwen2_dir, "qwen3": tiny_qwen3_dir, "qwen2_5_vl": tiny_qwen2_5_vl_dir}[kind]
    hf_dir = make(folder / "hf", seed=4, tie=is_text, deep=True)
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
        micro = 2 if "tensor_model_parallel_size" in layout_flags else 1  # its collectives are slow on few cores
        settings = {**chosen, "micro_batch_size": micro, "global_batch_size": 8, "save": run}
        settings |= {"eval_iters": 0, **layout_flags, **flags}
        pool = self._fsdp2 if layout == "FSDP2" else self._megatron[ranks]
        pool.run(run_entry, launch_flags(files, **settings), "pretrain_vlm.py", timeout=180)
        return metrics_of(run)


@pytest.fixture
def pools(megatron_pools: dict[int, RankPool], ranks2: RankPool) -> Pools:
    return Pools(megatron_pools, ranks2)


# names are transformers' on both backends
SCALED = {"weight_decay_exclude_modules": "embed_tokens", "lr_scale_modules": "down_proj", "lr_mult": 0.5}


@pytest.mark.parametrize(
    ("kind", "layout", "steps", "flags"),
    [
        ("qwen2_5_vl", "TP2", 6, {}),
        ("qwen3", "PP2 VPP2", 20, SCALED),
        pytest.param("qwen2_5_vl", "TP2", 20, {}, marks=pytest.mark.full),
        pytest.param("qwen2", "TP2", 20, {}, marks=pytest.mark.full),
        pytest.param("qwen2", "PP2 VPP2", 20, SCALED, marks=pytest.mark.full),
    ],
)
def test_both_backends_train_alike(
    kind: str, layout: str, steps: int, flags: dict[str, Any], pools: Pools, ranks2: RankPool, tmp_path: Path
) -> None:
    settings = {"train_iters": steps, "no_save_optim": True, "micro_batch_size": 4, **flags}
    losses, norms = pools.train(kind, layout, tmp_path / "megatron", **settings)
    expected_losses, expected_norms = pools.train(kind, "FSDP2", tmp_path / "fsdp2", **settings)
    assert ranks2.run(modules_of_megatron) == [[], []]  # what the other backend never imports
    assert len(losses) == len(expected_losses) == steps
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert norms[:3] == pytest.approx(expected_norms[:3], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        pytest.param(
            "qwen2_5_vl", "TP2", ("TP2", "PP2", "DP2", "1 process", "FSDP2"), id="vl TP2", marks=pytest.mark.full
        ),
        ("qwen3", "PP2 VPP2", ("DP2", "TP2 PP2", "FSDP2")),
        pytest.param("qwen2", "TP2", ("PP2 VPP2", "TP2 PP2", "FSDP2"), marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "FSDP2", ("PP2", "DP2"), id="vl FSDP2", marks=pytest.mark.full),
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
    for layout in ("FSDP2", "PP2 VPP2", "DP2"):
        run = tmp_path / layout.replace(" ", "_")
        losses, _ = pools.train("qwen3", layout, run, **settings)
        evaluations = [r["eval_loss"] for r in read_metrics(run / "metrics.jsonl") if "eval_loss" in r]
        assert len(losses) == 4 and len(evaluations) == 2
        found[layout] = losses + evaluations
    for layout, figures in found.items():
        assert figures == pytest.approx(found["FSDP2"], rel=1e-6), layout


def test_a_part_of_a_parameter_can_not_be_treated_apart(pools: Pools, tmp_path: Path) -> None:
    """Queries, keys and values are one parameter on the Megatron backend."""
    said = r"--lr-scale-modules k_proj: model.layers.0.self_attn.q_proj.weight, .* are one parameter"
    with pytest.raises(RankError, match=said):
        pools.train("qwen3", "1 process", tmp_path, train_iters=1, lr_scale_modules="k_proj", lr_mult=0.5)


@pytest.mark.full
def test_sgd_steps_alike(pools: Pools, tmp_path: Path) -> None:
    settings = {"train_iters": 4, "optimizer": "sgd", "sgd_momentum": 0.9, "lr": "0.1"}
    losses, norms = pools.train("qwen3", "TP2", tmp_path / "megatron", **settings)
    expected_losses, expected_norms = pools.train("qwen3", "FSDP2", tmp_path / "fsdp2", **settings)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    with pytest.raises(RankError, match="--optimizer sgd: Megatron's distributed optimizer steps Adam only"):
        pools.train("qwen3", "DP2", tmp_path / "refused", **settings)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        pytest.param("PP2", {"bf16": True}, id="bf16 PP2", marks=pytest.mark.full),
        pytest.param("DP2", {"bf16": True}, id="bf16 DP2"),
        pytest.param("DP2", {"fp16": True}, id="fp16 DP2"),
    ],
)
def test_half_precision(layout: str, flags: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    """Close to float32; and resumed bit for bit, from the copies in float32 and not from rounded parameters."""
    expected, _ = pools.train("qwen3", "1 process", tmp_path / "fp32", train_iters=4, no_save_optim=True)
    scale = {"initial_loss_scale": 2.0**20, "hysteresis": 1} if "fp16" in flags else {}
    settings = {"train_iters": 4, "save_interval": 2, **flags, **scale}
    losses, norms = pools.train("qwen3", layout, tmp_path / "whole", **settings)
    if scale:
        scales = [r["loss_scale"] for r in read_metrics(tmp_path / "whole" / "metrics.jsonl")]
        assert scales[0] == 2.0**20 and scales[1] == 2.0**19  # the first step overflows and is skipped
    else:
        assert losses == pytest.approx(expected, rel=1e-3)
    assert losses != pytest.approx(expected, rel=1e-6)
    found = pools.train("qwen3", layout, tmp_path / "again", load=tmp_path / "whole", ckpt_step=2, **settings)
    assert found == (losses[2:], norms[2:])


def gradient_dtypes(flag: str, dtype: torch.dtype) -> set[tuple[torch.dtype, torch.dtype]]:
    """Of each parameter, and of the sum of its gradients."""
    from tests.support.tiny_steps import Chunk, TinySteps

    run = TinySteps("ptd", lambda: Chunk().to(dtype), **{flag: True})
    return {(p.dtype, p.main_grad.dtype) for chunk in run.backend.model for p in chunk.parameters()}


@pytest.mark.parametrize("flag, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_are_summed_in_fp32(megatron_pools: dict[int, RankPool], flag: str, dtype: torch.dtype) -> None:
    """With --accumulate-allreduce-grads-in-fp32 and without, as on the other backend."""
    assert megatron_pools[1].run(gradient_dtypes, flag, dtype)[0] == {(dtype, torch.float32)}


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", "qwen2_5_vl tied", pytest.param("qwen2", marks=pytest.mark.full), "qwen2 tied"],
)
def test_weights_come_through_bit_equal(family: str, megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """From a directory in bfloat16 and several files, over two stages of two ranks, into a directory: lr is 0."""
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

    is_text = family.startswith("qwen2 ") or family == "qwen2"
    hf_dir = (tiny_qwen2_dir if is_text else tiny_qwen2_5_vl_dir)(tmp_path / "hf", tie="tied" in family)
    model_class = Qwen2ForCausalLM if is_text else Qwen2_5_VLForConditionalGeneration
    model = model_class.from_pretrained(hf_dir, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    (hf_dir / "model.safetensors").unlink()
    model.save_pretrained(hf_dir, max_shard_size=100_000)
    assert len(list(hf_dir.glob("*.safetensors"))) > 1
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=2, images=False)
    # from where model.json says, or from where --load says
    random = {"train_from_scratch": True} if "tied" in family else {}
    files = write_run_files(tmp_path / "files", hf_dir, data, model={**({} if is_text else TRAINED), **random})
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
        load=hf_dir if random else None,
        save=tmp_path / "run",
        save_hf=True,
    )
    megatron_pools[4].run(run_entry, words, "pretrain_vlm.py", timeout=120)
    assert_same(weights_in(tmp_path / "run" / "hf"), weights_in(hf_dir))


@pytest.mark.parametrize("layout", ["DP2", "PP2", "TP2"])
def test_a_tower_without_input_is_left_alone(
    layout: str, megatron_pools: dict[int, RankPool], qwen2_5_vl_dir: Path, tmp_path: Path
) -> None:
    """Rows without images: its gradients are zero, and weight decay must not touch it either."""
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=2, images=False)
    files = write_run_files(tmp_path / "files", qwen2_5_vl_dir, data, model=TRAINED)
    settings = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    settings |= {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 2, "no_save_optim": True}
    words = launch_flags(files, **settings, **LAYOUTS[layout][1], save=tmp_path / "run", save_hf=True)
    megatron_pools[2].run(run_entry, words, "pretrain_vlm.py", timeout=120)
    before, after = weights_in(qwen2_5_vl_dir), weights_in(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == ("visual." in name), name
