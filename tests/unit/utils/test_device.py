"""Moving a batch, in this project's form and in the published one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.utils.device import OnHost, move_to_device


@dataclass
class Held:
    pixels: torch.Tensor


def batch() -> dict[str, object]:
    return {
        "ids": torch.arange(3),
        "pixels": [torch.ones(2), (torch.ones(2, dtype=torch.float64), "name")],
        "inner": {"held": Held(torch.ones(1)), "none": None},
    }


def dtypes(value: object) -> list[torch.dtype]:
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    if isinstance(value, Held):
        return dtypes(value.pixels)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [dtype for item in inner for dtype in dtypes(item)]


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16])
def test_the_published_form_changes_the_batch_in_place(dtype: str | torch.dtype) -> None:
    """`move_to_device(batch, get_args().params_dtype)`, whose result is not used."""
    moved = batch()
    move_to_device(moved, dtype)
    assert dtypes(moved) == [torch.int64, *[torch.bfloat16] * 3]
    assert moved["pixels"][1][1] == "name" and moved["inner"]["none"] is None  # type: ignore[index]


def test_a_device_moves_and_leaves_dtypes() -> None:
    moved = move_to_device(batch(), torch.device("meta"))
    assert dtypes(moved) == [torch.int64, torch.float32, torch.float64, torch.float32]
    assert moved["ids"].is_meta and moved["pixels"][0].is_meta and moved["inner"]["held"].pixels.is_meta
    assert dtypes(move_to_device(batch(), "cpu", "fp16")) == [torch.int64, *[torch.float16] * 3]


def test_a_copy_to_the_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous one would hand out memory that the device has not written yet; one to a device is pinned."""
    seen: list[tuple[str, bool]] = []

    class Moves(torch.Tensor):
        def to(self, device: torch.device, dtype: object = None, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
            seen.append((device.type, non_blocking))
            return self

        def pin_memory(self) -> torch.Tensor:  # type: ignore[override]
            seen.append(("pinned", True))
            return self

    class Meta(CPUAccelerator):
        is_host = False

        def holds(self, where: torch.Tensor | torch.device) -> bool:
            return isinstance(where, torch.device) and where.type == "meta"

    monkeypatch.setattr(accelerator, "current", Meta)
    for device in ("cpu", "meta"):
        move_to_device(torch.ones(1).as_subclass(Moves), device)
    assert seen == [("cpu", False), ("pinned", True), ("meta", True)]


def test_a_value_of_the_host_stays() -> None:
    grid = torch.ones(1)
    assert move_to_device({"grid": OnHost(grid)}, "meta")["grid"].value is grid


def test_mm_device_decides_where_a_batch_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """MM_DEVICE=cpu on a host with an accelerator, which torch sees (meta plays it)."""
    monkeypatch.setenv("MM_DEVICE", "cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    accelerator.current.cache_clear()
    try:
        moved = {"ids": torch.arange(3)}
        move_to_device(moved, "bf16")
        assert moved["ids"].device == torch.device("cpu")
    finally:
        accelerator.current.cache_clear()
