"""The average of the weights is diffusers', leaves skipped steps out, and changes places with the weights exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.optimizer import ema as ema_module
from mindspeed_mm.optimizer.ema import Ema

YES, NO = torch.tensor(True), torch.tensor(False)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)
    model[0].weight.requires_grad_(False)
    return model


@torch.no_grad()
def move(model: nn.Module) -> None:
    for param in model.parameters():
        if param.requires_grad:
            param.add_(torch.randn_like(param))


def values(ema: Ema) -> list[torch.Tensor]:
    return [t.clone() for t in ema.tensors().values()]


@pytest.mark.parametrize("max_decay", [0.9999, 0.6, 0.0])
@pytest.mark.parametrize("chunk", [2**26, 8], ids=["at once", "in chunks"])
def test_averages_are_those_of_diffusers(monkeypatch: pytest.MonkeyPatch, max_decay: float, chunk: int) -> None:
    monkeypatch.setattr(ema_module, "_CHUNK", chunk)
    model = model_of()
    trained = [p for p in model.parameters() if p.requires_grad]
    ema, reference = Ema(model, max_decay), EMAModel(trained, decay=max_decay)
    assert list(ema.tensors()) == [f"ema.{n}" for n, p in model.named_parameters() if p.requires_grad]
    for step in range(60):
        move(model)
        if step % 7 == 3:
            ema.update(NO)  # skipped: diffusers' is not told
            continue
        ema.update(YES)
        reference.step(trained)
        assert ema.state_dict() == {"steps": reference.optimization_step, "max_decay": max_decay}
        for ours, theirs in zip(values(ema), reference.shadow_params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_averages_change_places(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    ema = Ema(model, 0.9)
    for _ in range(5):
        move(model)
        ema.update(YES)
    assert all(v.dtype == torch.float32 for v in values(ema))
    trained = [p.detach().clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    averages = values(ema)
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        found = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, averages, strict=True))
        assert not torch.equal(found[0], trained[1])
        raise RuntimeError("inside")
    assert all(torch.equal(a, b) for a, b in zip(trained, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(averages, values(ema), strict=True))
    assert places == [p.data_ptr() for p in model.parameters()]


def test_it_begins_anew_and_goes_on() -> None:
    model = model_of()
    one, other = Ema(model, 0.99), Ema(model, 0.99)
    for _ in range(3):
        move(model)
        one.update(YES)
    kept, state = values(one), one.state_dict()
    for target, value in zip(other.tensors().values(), kept, strict=True):
        target.copy_(value)
    other.load_state_dict(state)
    move(model)
    one.update(YES)
    other.update(YES)
    assert all(torch.equal(a, b) for a, b in zip(values(one), values(other), strict=True))
    one.restart()
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(values(one), trained, strict=True))
    assert one.state_dict()["steps"] == 0


class Operations(TorchDispatchMode):
    """Names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_never_waits_for_the_device() -> None:
    ema = Ema(model_of(), 0.99)
    with Operations() as seen:
        ema.update(YES)
    assert len(seen.names) > 5
    assert not [name for name in seen.names if "_local_scalar_dense" in name]
    with Operations() as seen:
        ema.state_dict()
    assert [name for name in seen.names if "_local_scalar_dense" in name]
