"""Text-only steps before images: the idle tower rests, and no step of it is counted, as in a plain AdamW loop."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import WRAP, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.workers import RankPool

TEXT_STEPS, STEPS, ROWS = 3, 6, 2
LR = 3e-3
# Adam divides the moments by what the count of steps says: a tower that counts three idle steps moves half as far at
# first, and six steps end with a loss that is off by 1.5e-5 and a norm that is off by 1.3e-4; roundings are below 3e-7
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-6, 1e-5
TRAINED = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
# name → (backend, ranks, flags)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "FSDP2": ("fsdp2", 2, {}),
    "Megatron": ("ptd", 1, {}),
    "Megatron, distributed optimizer": ("ptd", 2, {"use_distributed_optimizer": True}),
    "Megatron, two stages": ("ptd", 2, {"pipeline_model_parallel_size": 2, "variable_seq_lengths": True}),
}


@functools.cache
def model_and_data() -> tuple[Path, Path]:
    """Rows in the order in which they are trained: those without images first."""
    folder = Path(tempfile.mkdtemp(prefix="idle-towers-"))
    data = write_mixed_dataset(folder / "data", rows=3 * ROWS * STEPS, seed=7)
    rows = json.loads(data.read_text())
    text = [row for row in rows if not row["images"]][: TEXT_STEPS * ROWS]
    images = [row for row in rows if row["images"]][: (STEPS - TEXT_STEPS) * ROWS]
    data.write_text(json.dumps([*text, *images]))
    return tiny_qwen2_5_vl_dir(folder / "hf", seed=3, deep=True), data


@functools.cache
def reference() -> tuple[list[float], list[float]]:
    hf_dir, data = model_and_data()
    inputs = rows_as_inputs(hf_dir, data)
    losses, norms, _ = train_reference(
        hf_dir, inputs, STEPS, rows_of=lambda step: [ROWS * step + i for i in range(ROWS)], lr=LR
    )
    return losses, norms


def train(layout: str, pools: dict[int, Any], folder: Path, **flags: Any) -> None:
    backend, ranks, own = LAYOUTS[layout]
    hf_dir, data = model_and_data()
    model = {"model_id": "qwen2_5_vl", "loss_cfg": {"loss_type": "per_token_loss"}, **TRAINED}
    fsdp2 = {"sub_modules_to_wrap": WRAP}
    files = write_run_files(
        folder / layout, hf_dir, data, model=model, data={"dataloader_param.shuffle": False}, fsdp2=fsdp2
    )
    settings = {"micro_batch_size": 1, "global_batch_size": ROWS, "train_iters": STEPS, "lr": LR}
    script = "pretrain_transformers.py"
    if backend == "ptd":
        settings |= {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
        script = "pretrain_vlm.py"
    pools[ranks].run(run_entry, launch_flags(files, **{**settings, **own, **flags}), script, timeout=120)


def pools_of(layout: str, ranks2: RankPool, megatron_pools: dict[int, RankPool]) -> dict[int, RankPool]:
    return {2: ranks2} if LAYOUTS[layout][0] == "fsdp2" else megatron_pools


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_steps_before_images_equal_a_plain_loop(
    layout: str, ranks2: RankPool, megatron_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    train(layout, pools_of(layout, ranks2, megatron_pools), tmp_path, save=tmp_path / "run", no_save_optim=True)
    assert_equals_reference(tmp_path / "run")


@pytest.mark.parametrize(
    ("first", "then"),
    [("FSDP2", "Megatron, distributed optimizer"), ("Megatron, distributed optimizer", "FSDP2")],
    ids=["FSDP2 to Megatron", "Megatron to FSDP2"],
)
def test_the_counts_survive_a_checkpoint_and_a_change_of_backend(
    first: str, then: str, ranks2: RankPool, megatron_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Stopped after the first step with images: the tower has taken one step, the rest four."""
    run = tmp_path / "run"
    train(first, pools_of(first, ranks2, megatron_pools), tmp_path, save=run, exit_interval=TEXT_STEPS + 1)
    train(then, pools_of(then, ranks2, megatron_pools), tmp_path, save=run, load=run)
    assert_equals_reference(run)


def assert_equals_reference(run: Path) -> None:
    losses, norms = metrics_of(run)
    expected_losses, expected_norms = reference()
    assert len(losses) == STEPS
    assert norms == pytest.approx(expected_norms, rel=NORM_TOLERANCE)
    assert losses == pytest.approx(expected_losses, rel=LOSS_TOLERANCE)
