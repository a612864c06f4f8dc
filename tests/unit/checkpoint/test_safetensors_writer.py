"""Files written tensor by tensor are what the safetensors library reads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.safetensors_writer import SafetensorsWriter, tensor_bytes

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
TENSORS = {
    **{f"x.{dtype}": torch.arange(15).view(5, 3).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    "odd": torch.arange(3, dtype=torch.uint8),
    "Größe/名": torch.ones(1),
    'quote"\\': torch.zeros(2, dtype=torch.bool),
}


def announced(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("seed", range(4))
def test_the_library_reads_what_was_written_in_any_order(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "model.safetensors"
    order = random.Random(seed).sample(list(TENSORS), len(TENSORS))
    with SafetensorsWriter(file, announced(TENSORS)) as writer:
        for name in order:
            writer.write(name, TENSORS[name])
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "x.safetensors", {}):
        pass
    assert load_file(tmp_path / "x.safetensors") == {}


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """So that a mapped file can be used as it is."""
    file = tmp_path / "x.safetensors"
    with SafetensorsWriter(file, announced(TENSORS)) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    for tensor in load_file(file).values():
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_values_are_converted_and_made_contiguous(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4)
    with SafetensorsWriter(tmp_path / "x.safetensors", {"x": ((4, 3), torch.bfloat16)}) as writer:
        writer.write("x", torch.nn.Parameter(value).t())
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], value.t().bfloat16())


def test_a_tensor_that_was_never_written_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with (
        pytest.raises(ValueError, match=r"x\.safetensors': b was never written"),
        SafetensorsWriter(file, announced({"a": torch.ones(2), "b": torch.ones(2)})) as writer,
    ):
        writer.write("a", torch.ones(2))


def test_another_size_than_announced_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="'a': 12 bytes instead of the 8 announced"),
        SafetensorsWriter(tmp_path / "x.safetensors", announced({"a": torch.ones(2)})) as writer,
    ):
        writer.write("a", torch.ones(3))


def test_writing_twice_or_what_was_not_announced_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with (
            pytest.raises(KeyError, match=name),
            SafetensorsWriter(tmp_path / "x.safetensors", announced({"a": torch.ones(2)})) as writer,
        ):
            writer.write("a", torch.ones(2))
            writer.write(name, torch.ones(2))


def test_an_error_in_between_leaves_a_file_that_can_not_be_taken_for_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with (
        pytest.raises(RuntimeError, match="in between"),
        SafetensorsWriter(file, announced({"a": torch.ones(2), "b": torch.ones(2)})) as writer,
    ):
        writer.write("a", torch.ones(2))
        raise RuntimeError("in between")
    with pytest.raises(SafetensorError):
        load_file(file)


def test_tensor_bytes() -> None:
    assert tensor_bytes((3, 4), torch.bfloat16) == 24
    assert tensor_bytes((), torch.float32) == 4
    assert tensor_bytes((0, 4), torch.float32) == 0
