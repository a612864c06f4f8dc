"""Inputs of recomputed modules in host memory: what is copied when, what stays alive, and that no number changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.parallel.offload import apply_offload
from mindspeed_mm.parallel.recompute import apply_recompute
from tests.support.fake_accelerator import fake_accelerator
from tests.support.live_bytes import live_bytes_of_a_device

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
        assert shapes == [(8,)] * LAYERS * offload
        assert [ref() is not None for ref in model.inputs] == alive
        loss.backward()
    assert shapes == [(8,)] * (2 * LAYERS - 1)  # the last one has not left yet when backward begins
    assert not any(ref() is not None for ref in model.inputs)


class Part(nn.Module):
    """Saves its input, a product of three parts, a mask, an integer index, a transposed view, some rows of a tensor,
    and its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.product, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width).repeat(64, 1))

    def forward(self, x: torch.Tensor, table: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        q, k, v = self.product(x * self.scale).chunk(3, dim=-1)
        scores = (q @ k.mT).tanh()
        kept = torch.where(scores > 0, scores, 0.5 * scores)
        values = kept @ v
        mixed = values.gather(0, x.detach().argsort(dim=0)) + values[8:24].sin().mean()
        return (x + self.back(mixed.mT.contiguous().mT) * table * condition).exp().sin()


class Parts(nn.Module):
    def __init__(self, count: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.condition = nn.Linear(width, width)
        self.parts = nn.ModuleList([Part(width) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table, condition = torch.linspace(0.1, 1, 8).repeat(64, 1), self.condition(torch.ones(64, 8))
        for part in self.parts:
            x = part(x, table, condition)
        return x


def parts(offload: bool) -> Parts:
    model = Parts()
    if offload:
        apply_offload({f"parts.{i}": part for i, part in enumerate(model.parts)})
    return model


def gradients(model: nn.Module, *losses: torch.Tensor) -> list[torch.Tensor]:
    found = [loss.detach() for loss in losses] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def one_before_the_other(model: Parts) -> list[torch.Tensor]:
    """A second micro-batch runs forward before the first one runs backward, as in a pipeline."""
    first = model(torch.linspace(-1, 1, 512).view(64, 8)).sum()
    second = model(torch.linspace(-2, 1, 512).view(64, 8)).square().sum()
    first.backward()
    third = model(torch.linspace(-3, 1, 512).view(64, 8)).sum()
    second.backward()
    third.backward()
    return gradients(model, first, second, third)


def last_before_first(model: Parts) -> list[torch.Tensor]:
    losses = [model(torch.linspace(-scale, 1, 512).view(64, 8)).sum() for scale in (1, 2)]
    for loss in reversed(losses):
        loss.backward()
    return gradients(model, *losses)


def twice(model: Parts) -> list[torch.Tensor]:
    loss = model(torch.linspace(-1, 1, 512).view(64, 8)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model, loss)


def only_a_part(model: Parts) -> list[torch.Tensor]:
    """Backward from the middle of the model, then through all of it."""
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    table, condition = torch.ones(64, 8), torch.ones(64, 8)
    middle = model.parts[1](model.parts[0](x, table, condition), table, condition)
    end = model.parts[3](model.parts[2](middle, table, condition), table, condition)
    (found,) = torch.autograd.grad(middle.sum(), model.parts[1].back.weight, retain_graph=True)
    end.sum().backward()
    assert x.grad is not None
    return [found, x.grad, *gradients(model, middle)]


def after_an_evaluation(model: Parts) -> list[torch.Tensor]:
    loss = model(torch.ones(64, 8)).sum()
    with torch.no_grad():
        model(torch.zeros(64, 8))
    model.eval()
    model(torch.zeros(64, 8)).sum().backward()
    model.train()
    loss.backward()
    return gradients(model, loss)


def of_gradients(model: Parts) -> list[torch.Tensor]:
    """Gradients of a gradient."""
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return gradients(model, slope)


@pytest.mark.parametrize(
    "train", [one_before_the_other, last_before_first, twice, only_a_part, after_an_evaluation, of_gradients]
)
@pytest.mark.parametrize("beside", [False, True], ids=["on the host", "beside a device"])
def test_no_bit_changes_without_recompute(train: Any, beside: bool) -> None:
    expected = train(parts(False))
    if beside:
        with fake_accelerator():
            found = train(parts(True))
    else:
        found = train(parts(True))
    assert len(found) > 4 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_leaves_the_device_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each memory once, the product's three parts in one copy; no weight, buffer or table."""
    shapes = copied(monkeypatch)
    model = parts(True)
    model.condition.requires_grad_(False)
    loss = model(torch.ones(64, 8)).sum()
    square, wide, product = (64 * 64,), (64 * 8,), (64 * 24,)
    rows = (16 * 8,)  # those that are read of the input of gather
    # scores, mask and kept; the scaled input, index and input of gather, mixed, exponential
    own = {square: 3, wide: 5, product: 1, rows: 1}
    for shape, number in own.items():
        assert shapes.count(shape) == 4 * number, shape
    assert set(shapes) == own.keys()
    loss.backward()
    assert len(shapes) == (4 + 3) * sum(own.values())  # the last part's are still there when backward begins


class InPlace(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if not self.late:
            y.add_(1)
        out = y.square()
        if self.late:
            y.add_(1)
        return out


def test_what_is_changed_in_place_before_or_after_it_is_saved() -> None:
    x = torch.linspace(0, 1, 64).requires_grad_()
    for late in (False, True):
        modules = {str(i): InPlace(late) for i in range(3)}
        apply_offload(modules)
        y = x
        for module in modules.values():
            y = module(y)
        if late:
            with pytest.raises(RuntimeError, match=r"64 elements .* modified by an inplace operation"):
                y.sum().backward()
        else:
            (found,) = torch.autograd.grad(y.sum(), x)
            z = x
            for _ in range(3):
                z = (z * 2 + 1).square()
            assert torch.equal(found, torch.autograd.grad(z.sum(), x)[0])


def test_a_graph_that_is_kept_holds_nothing_on_the_device() -> None:
    model = parts(True)
    with live_bytes_of_a_device() as live:
        loss = model(torch.ones(64, 8)).sum()
        forward, gradients = live.alive, sum(p.nbytes for p in model.parameters())
        loss.backward(retain_graph=True)
        assert live.alive <= forward + gradients
        loss.backward()
