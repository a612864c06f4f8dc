"""Regions of a torch_dcp folder are those of its tensors, however many pieces hold them; what is unsafe is not read."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mindspeed_mm.checkpoint.dcp_reader import DcpReader, ReadRequest, read_metadata
from mindspeed_mm.checkpoint.dcp_writer import write_dcp
from mindspeed_mm.checkpoint.lazy import Leaf, Region, whole
from mindspeed_mm.utils.errors import CheckpointError
from tests.support.canary import Canary

TENSORS = {
    "matrix": torch.arange(35.0).view(7, 5),
    "cube": torch.arange(60).view(3, 4, 5),
    "half": torch.arange(12).view(4, 3).bfloat16() / 3,
    "scalar": torch.tensor(2.5),
    "step": torch.tensor(7, dtype=torch.int32),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """One piece for each tensor."""

    def reader(name: str, region: Region) -> torch.Tensor:
        return tensors[name]

    write_dcp(folder, {n: Leaf(n, t.shape, t.dtype, reader) for n, t in tensors.items()})
    return folder


def regions(shape: torch.Size, count: int = 12) -> list[Region]:
    draw = random.Random(0)
    found = [whole(shape)]
    for _ in range(count):
        starts = [draw.randrange(size + 1) for size in shape]
        found.append(tuple((start, draw.randint(0, size - start)) for start, size in zip(starts, shape)))
    return found


def assert_regions_are_slices(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    reader = DcpReader(folder)
    assert set(reader.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert reader.shape(name) == tuple(tensor.shape)
        assert reader.dtype(name) == tensor.dtype
        for region in regions(tensor.shape):
            part = tensor[tuple(slice(s, s + n) for s, n in region)]
            out = torch.full(part.shape, 99, dtype=tensor.dtype)
            reader.read_into([ReadRequest(name, region, out)])
            assert torch.equal(out, part), (name, region)


def test_regions_of_whole_tensors_are_slices(tmp_path: Path) -> None:
    assert_regions_are_slices(write(tmp_path, TENSORS), TENSORS)


def test_torch_reads_what_write_dcp_wrote(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_values_are_converted_to_the_dtype_of_who_asks(tmp_path: Path) -> None:
    reader = DcpReader(write(tmp_path, TENSORS))
    out = torch.empty(4, 3)
    reader.read_into([ReadRequest("half", whole((4, 3)), out)])
    assert torch.equal(out, TENSORS["half"].float())
    transposed = torch.empty(5, 7).t()
    reader.read_into([ReadRequest("matrix", whole((7, 5)), transposed)])
    assert torch.equal(transposed, TENSORS["matrix"])


def test_several_parts_are_read_in_one_go(tmp_path: Path) -> None:
    """Of different tensors, of one tensor, and twice the same start with another length."""
    reader = DcpReader(write(tmp_path, TENSORS))
    wanted = [
        ("matrix", ((0, 2), (0, 5))),
        ("matrix", ((0, 4), (0, 5))),
        ("matrix", ((3, 2), (1, 2))),
        ("cube", ((1, 1), (0, 4), (2, 2))),
        ("scalar", ()),
    ]
    made = [torch.full([n for _, n in region], -1, dtype=TENSORS[name].dtype) for name, region in wanted]
    reader.read_into(ReadRequest(name, region, out) for (name, region), out in zip(wanted, made))
    for (name, region), out in zip(wanted, made):
        assert torch.equal(out, TENSORS[name][tuple(slice(s, s + n) for s, n in region)]), (name, region)


# --- damaged and malicious folders ---------------------------------------------------------------------------------


def change_metadata(folder: Path, change: Callable[[Metadata], Any]) -> Path:
    metadata = read_metadata(folder)
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
    return folder


def test_metadata_with_code_of_its_own_is_refused_and_does_not_run(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    change_metadata(tmp_path, lambda m: setattr(m, "planner_data", Canary(tmp_path / "ran")))
    with pytest.raises(
        CheckpointError, match=r"\.metadata' is refused or damaged: it holds posix\.mkdir, which has no"
    ):
        DcpReader(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Canary(tmp_path / "ran"), protocol=0))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        DcpReader(tmp_path)
    assert not (tmp_path / "ran").exists()


class _OfAnotherPython(pickle._Pickler):
    """Pickles as Python 3.11.0 to 3.11.3 does, or as 3.13 names paths."""

    dispatch = dict(pickle._Pickler.dispatch)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_written_by_another_python_is_read(tmp_path: Path, protocol: int) -> None:
    write(tmp_path, TENSORS)
    metadata = replace(read_metadata(tmp_path), planner_data=[Path("a/b")])
    with open(tmp_path / ".metadata", "wb") as file:
        _OfAnotherPython(file, protocol).dump(metadata)
    content = (tmp_path / ".metadata").read_bytes()
    assert b"getattr" in content
    if protocol == 2:  # names are lines of text there
        (tmp_path / ".metadata").write_bytes(content.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert_regions_are_slices(tmp_path, TENSORS)
    assert read_metadata(tmp_path) == metadata


@pytest.mark.parametrize("of", ["torch\nSize", "torch.distributed.checkpoint.metadata\nMetadata"])
def test_getattr_finds_members_of_enumerations_only(tmp_path: Path, of: str) -> None:
    (tmp_path / ".metadata").write_bytes(f"cbuiltins\ngetattr\n(c{of}\nV__class__\ntR.".encode())
    with pytest.raises(CheckpointError, match=r"it asks for '__class__' of <class .*no place in checkpoint metadata"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "torch.load", "torch.serialization.os", "pathlib.Path", "torch.Size.__new__"]
)
def test_no_name_but_those_of_metadata_is_looked_up(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(CheckpointError, match="which has no place in checkpoint metadata"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", pickle.dumps([1]), pickle.dumps({"state_dict": 1})])
def test_metadata_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata' (is refused or damaged|holds (list|dict); expected)"):
        DcpReader(tmp_path)


@pytest.mark.parametrize("part", ["size", "dtype", "chunks", "offsets", "place", "places", "entries"])
def test_metadata_with_parts_of_another_kind_is_refused(tmp_path: Path, part: str) -> None:
    """A few bytes changed can make a pickle of other attributes or values, and of what looks like metadata still."""

    def spoil(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["matrix"]
        if part == "size":
            entry.size = 3
        elif part == "dtype":
            entry.properties.dtype = "float32"
        elif part == "chunks":
            entry.chunks = None
        elif part == "offsets":
            object.__delattr__(entry.chunks[0], "offsets")
        elif part == "place":
            metadata.storage_data[next(iter(metadata.storage_data))] = "__0_0.distcp"
        elif part == "places":
            metadata.storage_data = None
        else:
            metadata.state_dict_metadata = [entry]  # type: ignore[assignment]

    change_metadata(write(tmp_path, TENSORS), spoil)
    with pytest.raises(CheckpointError, match=r"\.metadata' is damaged: its entries don't describe tensors"):
        DcpReader(tmp_path)


def test_torn_metadata_is_refused(tmp_path: Path) -> None:
    content = (write(tmp_path, TENSORS) / ".metadata").read_bytes()
    for length in range(0, len(content) - 1, 37):
        (tmp_path / ".metadata").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata' is refused or damaged"):
            DcpReader(tmp_path)


def test_a_folder_without_metadata_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.metadata: it is no torch_dcp checkpoint, or was not finished"):
        DcpReader(tmp_path)


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "a/../../secret", "", 3])
def test_metadata_does_not_lead_out_of_the_folder(tmp_path: Path, place: Any) -> None:
    folder = write(tmp_path / "checkpoint", TENSORS)
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())

    def lead_away(metadata: Metadata) -> None:
        index = next(iter(metadata.storage_data))
        metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path=place)

    change_metadata(folder, lead_away)
    with pytest.raises(CheckpointError, match=r"outside its folder; refused|is damaged"):
        DcpReader(folder).read_into(ReadRequest(n, whole(t.shape), torch.empty_like(t)) for n, t in TENSORS.items())


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    reader = DcpReader(folder)
    assert all(isinstance(reader.dtype(n), torch.dtype) and isinstance(reader.shape(n), tuple) for n in reader.tensors)
    found = {n: torch.full_like(t, 99) for n, t in TENSORS.items()}
    reader.read_into(ReadRequest(n, whole(t.shape), t) for n, t in found.items())
    return found


def test_a_part_that_no_piece_holds_is_an_error(tmp_path: Path) -> None:
    """Else it would keep what was in memory before."""

    def forget_piece(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["matrix"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size([6, 5]))

    change_metadata(write(tmp_path, TENSORS), forget_piece)
    with pytest.raises(CheckpointError, match="matrix"):
        read_all(tmp_path)


@pytest.mark.parametrize("kind", ["cut", "missing", "another file", "no place", "other shape"])
def test_files_that_do_not_hold_what_metadata_says_are_an_error(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path, TENSORS) / "__0_0.distcp"
    if kind == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "missing":
        file.unlink()
    elif kind == "another file":
        torch.save({"canary": Canary(tmp_path / "ran")}, file)
    elif kind == "no place":
        change_metadata(tmp_path, lambda m: m.storage_data.clear())
    else:
        other = write(tmp_path / "other", {**TENSORS, "matrix": torch.ones(5, 7)})
        (other / ".metadata").replace(tmp_path / ".metadata")
    with pytest.raises(CheckpointError, match=rf"checkpoint '{tmp_path}' can't be read"):
        read_all(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_damage_is_more_than_an_error(tmp_path: Path) -> None:
    """Any bytes changed: the values, other values or a CheckpointError, never another error, and no code runs."""
    write(tmp_path, TENSORS)
    files = [tmp_path / ".metadata", tmp_path / "__0_0.distcp"]
    intact = {file: file.read_bytes() for file in files}
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        file = draw.choice(files)
        content = bytearray(intact[file])
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        file.write_bytes(content)
        try:
            read_all(tmp_path)
        except CheckpointError:
            refused += 1
        file.write_bytes(intact[file])
    assert refused > 50
    assert all(torch.equal(t, TENSORS[n]) for n, t in read_all(tmp_path).items())
