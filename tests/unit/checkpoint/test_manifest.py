"""What a manifest says about files that are damaged, missing, or none of its business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint import manifest
from mindspeed_mm.checkpoint.manifest import (
    MANIFEST,
    has_manifest,
    manifest_problems,
    read_manifest,
    sum_files,
    write_manifest,
)
from mindspeed_mm.utils.errors import CheckpointError

SIZES = {"__0_0.distcp": 70_000, "__1_0.distcp": 50_000, ".metadata": 300, "state.json": 20, "empty": 0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of several blocks, one block and none, and its manifest."""
    monkeypatch.setattr(manifest, "_BLOCK", 1 << 14)
    for seed, (name, size) in enumerate(SIZES.items()):
        (tmp_path / name).write_bytes(bytes((i * 7 + seed) % 251 for i in range(size)))
    assert not has_manifest(tmp_path)
    write_manifest(tmp_path, 6, sum_files(tmp_path, SIZES))
    assert has_manifest(tmp_path)
    return tmp_path


def changed(folder: Path, change: Any) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_whole_checkpoint_has_no_problems(folder: Path) -> None:
    read: list[int] = []
    assert manifest_problems(folder, progress=read.append) == []
    assert sum(read) == sum(SIZES.values()) and max(read) == 1 << 14
    content = json.loads((folder / MANIFEST).read_text())
    assert content["iteration"] == 6
    assert {name: entry["bytes"] for name, entry in content["files"].items()} == SIZES


def test_the_checksum_is_xxh3_128(tmp_path: Path) -> None:
    """The empty input's sum, from the algorithm's specification."""
    (tmp_path / "empty").write_bytes(b"")
    assert sum_files(tmp_path, ["empty"])["empty"].checksum == "99aa06d3014798d86001c324468d497f"


def test_a_flipped_bit_is_found(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[33_000] ^= 1
    path.write_bytes(content)
    (problem,) = manifest_problems(folder)
    assert str(path) in problem and "its content has changed" in problem
    entry = json.loads((folder / MANIFEST).read_text())["files"]["__1_0.distcp"]
    assert f"expected {entry['xxh3_128']}" in problem
    assert manifest_problems(folder, checksums=False) == []  # sizes alone can't tell


@pytest.mark.parametrize("checksums", [True, False])
def test_a_cut_and_a_missing_file_are_found(folder: Path, checksums: bool) -> None:
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-1])
    (folder / "state.json").unlink()
    assert sorted(manifest_problems(folder, checksums=checksums)) == [
        f"'{folder / '__0_0.distcp'}' holds 69999 bytes; expected 70000",
        f"'{folder / 'state.json'}' is missing; expected a file of 20 bytes",
    ]


def test_a_folder_in_place_of_a_file_is_a_problem(folder: Path) -> None:
    (folder / "empty").unlink()
    (folder / "empty").mkdir()
    (problem,) = manifest_problems(folder)
    assert str(folder / "empty") in problem


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", ".", "", "a/b", "a\\b", "C:x", "x\0"])
def test_a_name_that_leaves_the_folder_is_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "secret").write_text("")
    entry = {"bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
    changed(folder, lambda content: content["files"].update({name: entry}))
    monkeypatch.setattr(manifest, "sum_file", lambda *a: pytest.fail("a file was opened"))
    (problem,) = manifest_problems(folder)
    assert f"names the file {name!r}" in problem and "refused" in problem


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.pop("files"), "has no 'files'"),
        (lambda c: c.update(files=[]), "has no 'files'"),
        (lambda c: c.update(format=2), "has format 2; expected 1"),
        (lambda c: c["files"]["empty"].pop("bytes"), "lacks 'bytes' or 'xxh3_128' of 'empty'"),
        (lambda c: c["files"]["empty"].update(xxh3_128=None), "lacks 'bytes' or 'xxh3_128' of 'empty'"),
        (lambda c: c["files"].update(empty=3), "lacks 'bytes' or 'xxh3_128' of 'empty'"),
        (lambda c: c["files"]["empty"].update(bytes=True), "lacks 'bytes' or 'xxh3_128' of 'empty'"),
    ],
)
def test_a_manifest_that_lacks_something_is_a_problem(folder: Path, change: Any, words: str) -> None:
    changed(folder, change)
    (problem,) = manifest_problems(folder)
    assert str(folder / MANIFEST) in problem and words in problem
    with pytest.raises(CheckpointError):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_torn_manifest_is_a_problem(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    (problem,) = manifest_problems(folder, rank=1, size=2)
    assert str(folder / MANIFEST) in problem


def test_ranks_share_the_reading(folder: Path) -> None:
    read = [0, 0]
    for rank in (0, 1):

        def count(size: int, rank: int = rank) -> None:
            read[rank] += size

        assert manifest_problems(folder, rank, 2, progress=count) == []
    assert sum(read) == sum(SIZES.values())
    assert min(read) >= 50_000
    (folder / "__0_0.distcp").unlink()
    (folder / "__1_0.distcp").unlink()
    found = [manifest_problems(folder, rank, 2) for rank in (0, 1)]
    assert [len(problems) for problems in found] == [1, 1]
