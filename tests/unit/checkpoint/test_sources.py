"""`open_weights` finds the weights of a directory; what is missing, damaged or unsafe is named and not read."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.lazy import LazyTensor, whole
from mindspeed_mm.checkpoint.sources import has_weight_files, open_weights
from mindspeed_mm.utils.errors import CheckpointError
from tests.support.canary import Canary

A = {"a.weight": torch.arange(12.0).view(3, 4), "a.bias": torch.arange(3).bfloat16()}
B = {"b.weight": torch.arange(6).view(2, 3), "b.scale": torch.tensor(2.5)}


def values(tensors: dict[str, LazyTensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.node.read(whole(tensor.shape)) for name, tensor in tensors.items()}


def assert_holds(directory: Path, expected: dict[str, torch.Tensor], **options: Any) -> None:
    found = values(open_weights(directory, **options).tensors())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def sharded(directory: Path, **places: str) -> Path:
    """Two shards with an index; `places` adds names to it (or replaces them), with the file that it gives them."""
    directory.mkdir(exist_ok=True)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file(A, directory / first)
    save_file(B, directory / second)
    weight_map = dict.fromkeys(A, first) | dict.fromkeys(B, second) | places
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


# --- safetensors ---------------------------------------------------------------------------------------------------


def test_one_file_several_with_an_index_and_loose_ones_are_read(tmp_path: Path) -> None:
    assert_holds(sharded(tmp_path / "index"), A | B)
    (tmp_path / "index" / "model.safetensors.index.json").unlink()
    assert_holds(tmp_path / "index", A | B)
    save_file(A, tmp_path / "model.safetensors")
    assert_holds(tmp_path, A)
    assert has_weight_files(tmp_path)


def test_a_shard_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a.weight": torch.zeros(3, 4), "stale": torch.ones(1)}, tmp_path / "model-00003-of-00003.safetensors")
    assert_holds(tmp_path, A | B)


def test_an_index_chooses_between_files_that_hold_the_same_name(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({**B, "a.weight": torch.zeros(3, 4)}, tmp_path / "model-00002-of-00002.safetensors")
    assert_holds(tmp_path, A | B)


def test_the_same_weight_in_two_loose_files_is_refused(tmp_path: Path) -> None:
    save_file(A, tmp_path / "one.safetensors")
    save_file({**B, "a.bias": torch.zeros(3)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'a\.bias' is in two files \(two\.safetensors is one"):
        open_weights(tmp_path)


def test_an_index_that_names_a_missing_file_says_which(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    said = r"index\.json' names model-00002-of-00002\.safetensors \(1 of 2 files are missing\)"
    with pytest.raises(CheckpointError, match=said):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", ".", "", "sub/../../x.safetensors"]
)
def test_an_index_is_not_followed_out_of_its_directory(tmp_path: Path, place: str) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    directory = sharded(tmp_path / "hf", x=place)
    with pytest.raises(CheckpointError, match="outside its directory; refused"):
        open_weights(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "\xff"])
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"index\.json' can't be read.*weight_map"):
        open_weights(tmp_path)


@pytest.mark.parametrize("kind", ["cut", "cut in header", "empty", "text"])
def test_a_damaged_file_is_named_with_its_size(tmp_path: Path, kind: str) -> None:
    file = sharded(tmp_path) / "model-00001-of-00002.safetensors"
    whole_file = file.read_bytes()
    cut = {"cut": whole_file[:-3], "cut in header": whole_file[:40], "empty": b"", "text": b"<html>not found</html>"}
    file.write_bytes(cut[kind])
    with pytest.raises(CheckpointError, match=rf"{file.name}' \({len(cut[kind])} bytes\) is damaged"):
        open_weights(tmp_path)


def test_no_damage_to_a_header_is_more_than_an_error(tmp_path: Path) -> None:
    save_file(A | B, tmp_path / "model.safetensors")
    intact = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    draw = random.Random(0)
    for _ in range(300):
        content = bytearray(intact)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(header)] = draw.randrange(256)
        (tmp_path / "model.safetensors").write_bytes(content)
        try:
            values(open_weights(tmp_path).tensors())
        except CheckpointError as error:
            assert "safetensors" in str(error) or str(tmp_path) in str(error)


def test_regions_of_each_dtype_are_read(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    made = {str(d): torch.arange(24).view(4, 6).to(d) for d in dtypes} | {"none": torch.empty(0, 3)}
    save_file(made, tmp_path / "model.safetensors")
    tensors = open_weights(tmp_path).tensors()
    for name, expected in made.items():
        assert tensors[name].dtype == expected.dtype
        rows = min(2, expected.shape[0])
        part = tensors[name].node.read(((0, rows), (1, 2)))
        assert torch.equal(part.view(torch.uint8), expected[:rows, 1:3].contiguous().view(torch.uint8)), name


def test_a_dtype_that_torch_has_not_is_named(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match=r"'x' has dtype F4.*can't be read|model\.safetensors' .* is damaged"):
        open_weights(tmp_path).tensors()


# --- .bin files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_bin_file_of_tensors_is_read_without_a_flag(tmp_path: Path, zipped: bool) -> None:
    torch.save(A | B, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert has_weight_files(tmp_path)
    assert_holds(tmp_path, A | B)


def test_several_bin_files_with_an_index_are_read(tmp_path: Path) -> None:
    torch.save(A, tmp_path / "pytorch_model-1.bin")
    torch.save({"state_dict": B}, tmp_path / "pytorch_model-2.bin")
    places = dict.fromkeys(A, "pytorch_model-1.bin") | dict.fromkeys(B, "pytorch_model-2.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    assert has_weight_files(tmp_path)
    assert_holds(tmp_path, A | B)


def test_safetensors_are_preferred_to_bin_files(tmp_path: Path) -> None:
    torch.save({"canary": Canary(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    save_file(A, tmp_path / "model.safetensors")
    assert_holds(tmp_path, A)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_malicious_bin_file_is_refused_and_its_code_does_not_run(tmp_path: Path) -> None:
    torch.save({**A, "canary": Canary(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin' holds more than tensors.*--allow-unsafe-pickle"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin'"):
        open_weights(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_bin_file_is_unpickled_if_that_is_allowed(tmp_path: Path, said: list[str]) -> None:
    torch.save({**A, "canary": Canary(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    assert_holds(tmp_path, A, allow_pickle=True)
    assert (tmp_path / "ran").exists()
    assert "without restriction (--allow-unsafe-pickle)" in said[0]


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("kind", ["cut", "cut legacy", "empty", "Git LFS pointer", "a list", "a class that is gone"])
def test_a_bin_file_that_holds_no_weights_is_named(tmp_path: Path, kind: str, allowed: bool) -> None:
    """It is not said that a flag would help, but where it does."""
    file = tmp_path / "pytorch_model.bin"
    torch.save([torch.ones(1)] if kind == "a list" else A, file, _use_new_zipfile_serialization=kind != "cut legacy")
    intact = file.read_bytes()
    if kind == "cut":
        file.write_bytes(intact[:300])
    elif kind == "cut legacy":
        file.write_bytes(intact[:-5])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "Git LFS pointer":
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    elif kind == "a class that is gone":
        file.write_bytes(b"\x80\x02cno_such_module\nThing\n.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin'") as caught:
        open_weights(tmp_path, allow_pickle=allowed)
    assert ("--allow-unsafe-pickle" in str(caught.value)) == (kind == "a class that is gone" and not allowed)


# --- nothing -------------------------------------------------------------------------------------------------------


def test_a_directory_without_weights_is_described(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no weights; expected \*\.safetensors.*it holds nothing"):
        open_weights(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"it holds model\.gguf"):
        open_weights(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_weights(tmp_path / "nowhere")
    assert not has_weight_files(tmp_path)


def test_what_was_written_is_what_safetensors_itself_reads(tmp_path: Path) -> None:
    save_file(A | B, tmp_path / "model.safetensors")
    assert_holds(tmp_path, load_file(tmp_path / "model.safetensors"))


# --- diffusers' names ----------------------------------------------------------------------------------------------


def test_files_under_diffusers_names_are_read(tmp_path: Path) -> None:
    first, second = (f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file(A, tmp_path / first)
    save_file(B, tmp_path / second)
    save_file({"stale": torch.ones(1)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    places = dict.fromkeys(A, first) | dict.fromkeys(B, second)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert has_weight_files(tmp_path)
    assert_holds(tmp_path, A | B)
    save_file(A, tmp_path / "diffusion_pytorch_model.safetensors")
    assert_holds(tmp_path, A)


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "model"])
def test_a_variant_is_read_only_where_there_is_nothing_else(tmp_path: Path, said: list[str], stem: str) -> None:
    save_file(A, tmp_path / f"{stem}.fp16-00001-of-00002.safetensors")
    save_file(B, tmp_path / f"{stem}.fp16-00002-of-00002.safetensors")
    assert has_weight_files(tmp_path)
    assert_holds(tmp_path, A | B)
    assert "in the variant 'fp16' only" in said[-1]
    save_file(A, tmp_path / f"{stem}.non_ema.safetensors")
    with pytest.raises(CheckpointError, match="in the variants fp16, non_ema and none without"):
        open_weights(tmp_path)
    number = len(said)
    torch.save(B, tmp_path / "diffusion_pytorch_model.bin")
    assert_holds(tmp_path, B)
    assert len(said) == number


def test_a_variant_may_be_a_bin_file(tmp_path: Path, said: list[str]) -> None:
    torch.save(A, tmp_path / "diffusion_pytorch_model.fp16.bin")
    assert has_weight_files(tmp_path)
    assert_holds(tmp_path, A)
    assert "fp16" in said[-1]
