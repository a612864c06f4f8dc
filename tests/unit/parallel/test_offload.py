"""Inputs of recomputed modules in host memory: what is copied when, what stays alive, and that no number changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.parallel.offload import apply_offload, require_recompute
from mindspeed_mm.parallel.recompute import apply_recompute
from mindspeed_mm.utils.errors import ConfigError
from tests.support.fake_accelerator import fake_accelerator

LAYERS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.3)
        self.log: list[str] = []

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.log.append("run")
        return x + self.dropout(self.linear(x).sin() * table), None


class Model(nn.Module):
    """Blocks that share a table.

    Attributes:
        inputs: the input of each block, as long as something holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.inputs: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.ones(4)
        for block in self.layers:
            x = x * 1.0
            self.inputs.append(weakref.ref(x))
            x, _ = block(x, table)
        return x


def prepared(offload: bool, use_reentrant: bool) -> Model:
    model = Model()
    blocks = {f"layers.{i}": block for i, block in enumerate(model.layers)}
    apply_recompute(blocks, use_reentrant)
    if offload:
        apply_offload(blocks)
    return model


def step(model: Model) -> list[torch.Tensor]:
    """Loss and gradients of two micro-batches, the first with a forward pass of evaluation before it."""
    torch.manual_seed(1)
    with torch.no_grad():
        model(torch.ones(2, 4))
    losses = []
    for factor in (1.0, 2.0):
        losses.append(model(torch.full((2, 4), factor, requires_grad=True)).square().sum())
        losses[-1].backward()
    return [*losses, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("beside", [False, True], ids=["on the host", "beside a device"])
def test_no_bit_changes(use_reentrant: bool, beside: bool) -> None:
    expected = step(prepared(False, use_reentrant))
    if beside:
        with fake_accelerator():
            found = step(prepared(True, use_reentrant))
    else:
        found = step(prepared(True, use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_copy_of_each_input_and_one_back_a_module_before_it_is_needed(use_reentrant: bool) -> None:
    kept = ["run", "pin", "copy"] if use_reentrant else ["pin", "copy", "run"]
    forward = [*kept, *(entry for _ in range(LAYERS - 1) for entry in _after_copied(kept))]
    with fake_accelerator() as fake:
        model = prepared(True, use_reentrant)
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert fake.log == []
        for block in model.layers:
            block.log = fake.log
        loss = model(torch.ones(2, 4, requires_grad=True)).square().sum()
        assert fake.log == forward
        fake.log.clear()
        loss.backward()
    assert fake.log == [*["copied", "copy", "run"] * (LAYERS - 1), "copied", "run"]


def _after_copied(kept: list[str]) -> list[str]:
    """What a module does that waits for the copy of the one before it."""
    return [part for entry in kept for part in (["copied", entry] if entry == "pin" else [entry])]


def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is copied from now on."""
    shapes: list[tuple[int, ...]] = []
    original = type(accelerator.current()).copy_beside

    def copy_beside(self: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        shapes.append(tuple(source.shape))
        return original(self, target, source)

    monkeypatch.setattr(type(accelerator.current()), "copy_beside", copy_beside)
    return shapes


def test_only_the_hidden_states_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = copied(monkeypatch)
    for offload, alive in ((False, [True] * LAYERS), (True, [False] * (LAYERS - 1) + [True])):
        model = prepared(offload, use_reentrant=False)
        loss = model(torch.ones(2, 4, requires_grad=True)).square().sum()
        assert shapes == [(2, 4)] * LAYERS * offload
        assert [ref() is not None for ref in model.inputs] == alive
        loss.backward()
    assert shapes == [(2, 4)] * (2 * LAYERS - 1)  # the last one has not left yet when backward begins
    assert not any(ref() is not None for ref in model.inputs)


def test_what_is_not_recomputed_is_refused() -> None:
    require_recompute(["layers.0"], ["layers.0", "layers.1"], "f: activation_offload_modules")
    with pytest.raises(ConfigError, match=r"f: activation_offload_modules: 'layers.2' and 1 others is not recomputed"):
        require_recompute(["layers.0", "layers.2", "layers.3"], ["layers.0"], "f: activation_offload_modules")
