"""--load takes what one has, and says what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.checkpoint.manifest import sum_files, write_manifest
from mindspeed_mm.checkpoint.start import Start, find_start, refuse_damaged
from mindspeed_mm.utils.errors import CheckpointError


def checkpoint(folder: Path, iteration: int | None) -> Path:
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x" * 10)
    (folder / "__0_0.distcp").write_bytes(b"y" * 100)
    if iteration is not None:
        (folder / "state.json").write_text(json.dumps({"iteration": iteration}))
    write_manifest(folder, iteration or 0, sum_files(folder, [p.name for p in folder.iterdir()]))
    return folder


def run_folder(root: Path, *iterations: int) -> Path:
    for n in iterations:
        checkpoint(root / f"iter_{n:07d}", n)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iterations[-1]))
    return root


def test_what_load_may_be(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 2, 4)
    assert find_start(None) == find_start("") == Start()
    assert find_start(str(run)) == Start(run / "iter_0000004", resumes=True)
    assert find_start(str(run), step=2) == Start(run / "iter_0000002", resumes=True)
    assert find_start(str(run), finetune=True) == Start(run / "iter_0000004")
    assert find_start(str(run / "iter_0000002")) == Start(run / "iter_0000002", resumes=True)
    release = checkpoint(tmp_path / "converted" / "release", None)
    (tmp_path / "converted" / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert find_start(str(tmp_path / "converted")) == find_start(str(release)) == Start(release)
    foreign = checkpoint(tmp_path / "foreign" / "iter_0000007", None)
    assert find_start(str(foreign)) == Start(foreign)
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "model-00001-of-00002.safetensors").touch()
    assert find_start(str(hub)) == Start(hub)


def test_own_empty_folder_starts_anew(tmp_path: Path) -> None:
    """K09: published scripts give one folder as --load and --save."""
    assert find_start(str(tmp_path / "out"), save=str(tmp_path / "out")) == Start()
    (tmp_path / "out").mkdir()
    assert find_start(str(tmp_path / "out"), save=str(tmp_path / "out")) == Start()


def test_a_wrong_path_is_an_error(tmp_path: Path) -> None:
    """K09"""
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"does not exist.*checkpoints"):
        find_start(str(tmp_path / "checkpoint"))
    (tmp_path / "checkpoints" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"holds nothing to load.*it holds notes\.txt"):
        find_start(str(tmp_path / "checkpoints"))
    (tmp_path / "checkpoints" / "mp_rank_00").mkdir()
    with pytest.raises(CheckpointError, match="Megatron's torch format"):
        find_start(str(tmp_path / "checkpoints"))
    run = run_folder(tmp_path / "run", 2, 4)
    with pytest.raises(CheckpointError, match=r"iter_0000003.*iter_0000002"):
        find_start(str(run), step=3)
    with pytest.raises(CheckpointError, match=r"--ckpt-step 3.*holds no checkpoint"):
        find_start(str(tmp_path / "checkpoints"), step=3)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "state", "manifest"])
def test_damage_is_named_and_the_one_before_offered(tmp_path: Path, damage: str) -> None:
    run = run_folder(tmp_path / "run", 2, 4, 6)
    file = run / "iter_0000006" / {"state": "state.json", "manifest": "manifest.json"}.get(damage, "__0_0.distcp")
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:50])
    elif damage == "manifest":
        file.write_text("{")
    else:
        content = bytearray(file.read_bytes())
        content[3] ^= 1
        file.write_bytes(content)
    (run / "iter_0000004" / ".metadata").unlink()  # no whole one either, and not to be offered
    with pytest.raises(CheckpointError, match=rf"{file.name}.*--ckpt-step 2$"):
        refuse_damaged(run / "iter_0000006", 0, 1, lambda value: [value])
    refuse_damaged(run / "iter_0000002", 0, 1, lambda value: [value])
    if damage == "flipped":
        refuse_damaged(run / "iter_0000006", 0, 1, lambda value: [value], checksums=False)


def test_every_rank_hears_of_damage_that_another_found(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"'b' is missing.*no older one"):
        refuse_damaged(run / "iter_0000002", 0, 2, lambda value: [value, ["'b' is missing"]])
