"""`--load` takes a run on any layout, a checkpoint folder or a HF directory, and means the same weights by each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.tools.convert import main as convert
from tests.support.launch import WRAP, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.workers import RankError, RankPool


def flags_of(
    folder: Path, hf_dir: Path, run: Path, fsdp2: dict[str, Any] | None = None, rows: int = 12, **flags: Any
) -> list[str]:
    data = folder / "data" / "data.json"
    if not data.exists():
        write_mixed_dataset(folder / "data", rows=rows, seed=1)
    files = write_run_files(folder / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP, **(fsdp2 or {})})
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1, "save": run, **flags}
    return launch_flags(files, **settings)


@pytest.fixture(scope="module")
def other_hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights other than those of `qwen2_5_vl_dir`, for the same structure."""
    return tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("other"), seed=5)


def first_loss(pool: RankPool, folder: Path, hf_dir: Path, **flags: Any) -> float:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    pool.run(run_entry, flags_of(folder, hf_dir, run, **flags), timeout=120)
    return metrics_of(run)[0][0]


def test_every_form_of_the_same_weights_gives_the_same_loss(
    ranks2: RankPool, qwen2_5_vl_dir: Path, other_hf_dir: Path, tmp_path: Path
) -> None:
    expected = first_loss(ranks2, tmp_path, other_hf_dir)
    assert first_loss(ranks2, tmp_path, qwen2_5_vl_dir) != expected
    dcp, half = tmp_path / "dcp", tmp_path / "half"
    words = ["GenericDCPConverter", "hf_to_dcp", "--hf_dir", str(other_hf_dir), "--dcp_dir"]
    assert convert([*words, str(dcp)]) == 0
    assert convert([*words, str(half), "--dcp_prefix", ""]) == 0
    start = tmp_path / "start"
    still = {"lr": 0.0, "weight_decay": 0.0, "save": start}
    ranks2.run(run_entry, flags_of(tmp_path, other_hf_dir, start, **still), timeout=120)
    forms: dict[str, Any] = {
        "HF directory": {"load": other_hf_dir},
        "converted": {"load": dcp},
        "its release folder": {"load": dcp / "release"},
        "without a prefix": {"load": half},
        "a run to fine-tune from": {"load": start, "finetune": True},
        "its checkpoint folder": {"load": start / "iter_0000001", "finetune": True},
    }
    for name, flags in forms.items():
        assert first_loss(ranks2, tmp_path, qwen2_5_vl_dir, **flags) == expected, name
    on_meta = {"load": dcp, "init_model_with_meta_device": True}
    assert first_loss(ranks2, tmp_path, qwen2_5_vl_dir, **on_meta) == expected


def test_downcast_rounds_the_weights_that_a_run_starts_from(
    ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path
) -> None:
    rounded = shutil.copytree(qwen2_5_vl_dir, tmp_path / "rounded")
    weights = load_file(rounded / "model.safetensors")
    save_file({k: v.bfloat16().float() for k, v in weights.items()}, rounded / "model.safetensors", {"format": "pt"})
    expected = first_loss(ranks2, tmp_path, rounded)
    assert first_loss(ranks2, tmp_path, qwen2_5_vl_dir, downcast_to_bf16=True) == expected
    assert first_loss(ranks2, tmp_path, qwen2_5_vl_dir) != expected
    assert first_loss(ranks2, tmp_path, qwen2_5_vl_dir, load=qwen2_5_vl_dir, downcast_to_bf16=True) == expected


def test_missing_weights_are_refused_or_drawn(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    """K03: strict on any missing key. Without strictness what is missing is drawn, and does not depend on ranks."""
    partial = shutil.copytree(qwen2_5_vl_dir, tmp_path / "partial")
    weights = load_file(partial / "model.safetensors")
    del weights["lm_head.weight"]
    weights["stranger.weight"] = torch.ones(2)
    save_file(weights, partial / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankError):
        first_loss(ranks2, tmp_path, partial)
    two = first_loss(ranks2, tmp_path, partial, no_strict_load=True)
    assert two == two and 4 < two < 8
    assert first_loss(ranks2, tmp_path, partial, no_strict_load=True, seed=43) != two


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "replicated": (2, {"sharding_size": 1}),
    "ZeRO-2": (2, {"reshard_after_forward": False}),
    "4 ranks": (4, {}),
    "HSDP": (4, {"sharding_size": 2}),
}
MOVES = [
    ("2 ranks", "1 rank"),
    ("1 rank", "2 ranks"),
    ("HSDP", "2 ranks"),
    ("4 ranks", "HSDP"),
    ("ZeRO-2", "4 ranks"),
    ("replicated", "ZeRO-2"),
]


BY_NAME = {("HSDP", "2 ranks"), ("ZeRO-2", "4 ranks")}  # four ranks take long on two cores: one move of them will do


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*m, id=" to ".join(m), marks=[pytest.mark.full] if m in BY_NAME else []) for m in MOVES],
)
def test_a_run_goes_on_with_another_layout(
    request: pytest.FixtureRequest, qwen2_5_vl_dir: Path, tmp_path: Path, before: str, after: str
) -> None:
    """K05: weights, optimizer, schedule and place in the data, in the middle of an epoch and over its end."""
    shape = {"train_iters": 5, "lr_decay_style": "cosine", "min_lr": "1e-4", "save_interval": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def launch(layout: str, run: Path, **flags: Any) -> None:
        ranks, fsdp2 = LAYOUTS[layout]
        pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
        pool.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, run, fsdp2, **shape, **flags), timeout=120)

    launch(before, whole)
    launch(before, parts, exit_interval=2)
    launch(after, parts, load=parts)
    assert metrics_of(parts)[0] == pytest.approx(metrics_of(whole)[0], rel=1e-6)
    assert metrics_of(parts)[1] == pytest.approx(metrics_of(whole)[1], rel=1e-5)


def test_a_resume_late_in_the_epochs_goes_on_there(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    """K07: 4 rows, 3 epochs, resumed at sample 6, in the middle of the second epoch; with other batches then."""
    shape = {"rows": 4, "global_batch_size": 2, "train_iters": 6}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, whole, **shape), timeout=120)
    ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, parts, **shape, exit_interval=3), timeout=120)
    assert json.loads((parts / "iter_0000003/state.json").read_text())["consumed_samples"] == 6
    ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, parts, **shape, load=parts), timeout=120)
    assert metrics_of(parts) == metrics_of(whole)
    longer = {**shape, "train_iters": 8}
    ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, parts, **longer, load=parts), timeout=120)
    assert len(metrics_of(parts)[0]) == 8


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(
    ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path, damage: str
) -> None:
    shape = {"train_iters": 3, "save_interval": 1}
    run = tmp_path / "run"
    ranks2.run(run_entry, flags_of(tmp_path, qwen2_5_vl_dir, run, **shape), timeout=120)
    whole = metrics_of(run)
    file = max((run / "iter_0000003").glob("*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[:-100])
    else:
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    resumed = flags_of(tmp_path, qwen2_5_vl_dir, run, **{**shape, "train_iters": 4}, load=run)
    with pytest.raises(RankError, match=rf"(?s)'[^']*{file.name}'.*'[^']*iter_0000002', is whole: add --ckpt-step 2"):
        ranks2.run(run_entry, resumed, timeout=120)
    ranks2.run(run_entry, [*resumed, "--ckpt-step", "2"], timeout=120)
    again = metrics_of(run)
    assert [again[0][i] for i in (0, 1, 2, 3)] == [*whole[0], again[0][2]]  # iteration 3 was done again, alike
    assert len(again[0]) == 5
