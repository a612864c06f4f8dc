"""`mm-convert info` and `verify`: what a folder holds, and what of it is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm.tools.convert import main
from mindspeed_mm.tools.inspect_weights import size_words
from tests.support.canary import Canary
from tests.support.tiny_families import tiny_family_dir


def inspected(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Status and what was printed, on both streams."""
    capsys.readouterr()
    status = main([str(word) for word in words])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf` (several shards) and `dcp`, converted from it."""
    folder = tmp_path_factory.mktemp("made")
    hf_dir = tiny_family_dir(folder / "hf", "qwen3_moe", dtype=torch.bfloat16, max_shard_size=90_000)
    assert main(["GenericDCPConverter", "hf_to_dcp", "--hf_dir", str(hf_dir), "--dcp_dir", str(folder / "dcp")]) == 0
    return folder


@pytest.fixture
def release(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "dcp", tmp_path / "dcp") / "release"


@pytest.fixture
def hf_dir(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "hf", tmp_path / "hf")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def remove(file: Path) -> None:
    file.unlink()


# --- verify --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [flip, cut, remove])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_verify_finds_damage_to_a_checkpoint(
    release: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], name: str
) -> None:
    assert inspected(capsys, "verify", release)[0] == 0
    damage(release / name)
    for given in (release, release.parent):
        status, printed = inspected(capsys, "verify", given)
        assert status == 1
        assert f"problem: '{release / name}'" in printed and f"{release}: 1 problems" in printed


@pytest.mark.parametrize("damage", [cut, remove])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_verify_finds_damage_without_a_manifest(
    release: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], name: str
) -> None:
    (release / "manifest.json").unlink()
    status, printed = inspected(capsys, "verify", release)
    assert status == 0 and "whole (no manifest.json: files are there and long enough)" in printed
    damage(release / name)
    status, printed = inspected(capsys, "verify", release)
    assert status == 1 and str(release) in printed


def test_verify_looks_at_every_checkpoint_of_a_run(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for iteration in (2, 4, 6):
        shutil.copytree(release, run / f"iter_{iteration:07d}")
    (run / "latest_checkpointed_iteration.txt").write_text("6")
    assert inspected(capsys, "verify", run)[0] == 0
    flip(run / "iter_0000004" / "__0_0.distcp")
    status, printed = inspected(capsys, "verify", run)
    assert status == 1
    assert "iter_0000002: whole" in printed and "iter_0000004: 1 problems" in printed
    assert "iter_0000006: whole" in printed
    (run / "iter_0000002" / ".metadata").unlink()  # runs pass over such a folder, for them it is none
    status, printed = inspected(capsys, "verify", run)
    assert status == 1 and f"'{run / 'iter_0000002' / '.metadata'}' is missing" in printed
    shutil.rmtree(run / "iter_0000006")
    status, printed = inspected(capsys, "verify", run)
    assert status == 1 and "iter_0000006' is missing or not whole" in printed
    (run / "iter_0000005").mkdir()
    status, printed = inspected(capsys, "verify", run)
    assert status == 1 and "iter_0000005' is neither a torch_dcp checkpoint" in printed


@pytest.mark.parametrize("damage", [cut, remove])
def test_verify_finds_damage_to_a_hf_directory(
    hf_dir: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    status, printed = inspected(capsys, "verify", hf_dir)
    assert status == 0 and "whole (headers and index agree, 45 tensors" in printed
    file = sorted(hf_dir.glob("*.safetensors"))[1]
    damage(file)
    status, printed = inspected(capsys, "verify", hf_dir)
    assert status == 1 and "problem: " in printed and file.name in printed


def test_verify_finds_a_weight_that_the_index_names_and_no_file_holds(
    hf_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hf_dir / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    status, printed = inspected(capsys, "verify", hf_dir)
    assert status == 1 and "model.extra.weight" in printed


def test_verify_says_that_a_bin_file_can_not_be_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": torch.ones(1), "canary": Canary(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    status, printed = inspected(capsys, "verify", tmp_path)
    assert status == 1 and "pytorch_model.bin' holds more than tensors" in printed
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["verify", "info"])
def test_nothing_to_look_at_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, printed = inspected(capsys, command, tmp_path / "nowhere")
    assert status == 1 and f"{tmp_path / 'nowhere'} does not exist" in printed
    (tmp_path / "notes.txt").touch()
    status, printed = inspected(capsys, command, tmp_path)
    assert status == 1 and "notes.txt" in printed


# --- info ----------------------------------------------------------------------------------------------------------


def test_info_of_a_hf_directory(hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = inspected(capsys, "info", hf_dir)
    assert status == 0
    assert f"{hf_dir}: HF directory, Qwen3MoeForCausalLM" in printed
    assert "weights: 45 tensors, 95,104 values, 190.2 kB" in printed
    assert "model.layers.{}.mlp.experts.{}.down_proj.weight  [64, 24] bfloat16  x 8" in printed
    assert "lm_head.weight  [256, 64] bfloat16\n" in printed
    status, printed = inspected(capsys, "info", hf_dir, "--all", "true")
    assert "model.layers.1.mlp.experts.3.down_proj.weight  [64, 24] bfloat16\n" in printed


def test_info_of_a_checkpoint_and_of_a_run(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = inspected(capsys, "info", release)
    assert status == 0
    assert f"{release}: torch_dcp checkpoint" in printed and "weights only (no state.json)" in printed
    assert "model.model.layers.{}.mlp.experts.gate_up_proj  [4, 48, 64] bfloat16  x 2" in printed
    run = tmp_path / "run"
    for iteration in (2, 4):
        folder = shutil.copytree(release, run / f"iter_{iteration:07d}")
        (folder / "state.json").write_text(json.dumps({"iteration": iteration, "consumed_samples": iteration * 8}))
    (run / "latest_checkpointed_iteration.txt").write_text("4\n")
    status, printed = inspected(capsys, "info", run)
    assert status == 0
    assert f"{run}: run folder, latest: 4" in printed and "iter_0000002  " in printed
    assert f"{run / 'iter_0000004'}: torch_dcp checkpoint" in printed and "consumed_samples: 32" in printed
    (run / "best.json").write_text(json.dumps({"iteration": 2, "metric": "loss", "value": 1.25}))
    lines = inspected(capsys, "info", run)[1].splitlines()
    assert [line.split()[0] for line in lines if line.endswith("best: loss 1.25")] == ["iter_0000002"]
    (run / "best.json").write_text("{")
    status, printed = inspected(capsys, "info", run)
    assert status == 0 and "best.json' can't be read" in printed
    for tracker in (None, "9", "nonsense"):
        (run / "latest_checkpointed_iteration.txt").unlink(missing_ok=True)
        if tracker is not None:
            (run / "latest_checkpointed_iteration.txt").write_text(tracker)
        status, printed = inspected(capsys, "info", run)
        assert status == 0 and "iter_0000002  " in printed and "iter_0000004  " in printed


def test_info_never_reads_pickled_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"weight": torch.ones(3)}, "rng": Canary(tmp_path / "ran"), "optimizer.m": torch.ones(2)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    status, printed = inspected(capsys, "info", tmp_path / "dcp")
    assert status == 0
    assert "weights: 1 tensors, 3 values, 12 B" in printed and "optimizer: 1 tensors" in printed
    assert "1 entries that are no tensors (pickles, never read): rng" in printed
    assert not (tmp_path / "ran").exists()


def test_info_of_a_file_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x": torch.ones(2), "scalar": torch.tensor(1)}, tmp_path / "model.safetensors")
    status, printed = inspected(capsys, "info", tmp_path)
    assert status == 0 and "no architecture in config.json" in printed and "scalar  [] int64" in printed


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (15_300_000, "15.3 MB"), (2.5e12, "2.5 TB")]
)
def test_sizes_in_words(count: float, words: str) -> None:
    assert size_words(count) == words
