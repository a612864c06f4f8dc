"""A step that only the device knows whether to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_mm import accelerator
from mindspeed_mm.optimizer import state_homes
from mindspeed_mm.optimizer.elementwise import SGD, AdamW, FusedAdam
from mindspeed_mm.optimizer.guarded import GuardedOptimizer
from mindspeed_mm.optimizer.muon import Muon


class Recorder(AdamW):
    """An optimizer that notes where its scalars are when it steps."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.told_on = {t.device.type for t in (self.grad_scale, self.found_inf) if t is not None}


@pytest.mark.parametrize("parameters", ["cpu", "cuda"])
def test_scalars_are_where_the_parameters_are(parameters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload_to_cpu torch would copy them without waiting; without it nothing may wait for the device."""
    device = SimpleNamespace(holds=lambda tensor: tensor.device.type == "cuda")
    monkeypatch.setattr(accelerator, "current", lambda: device)
    with FakeTensorMode():
        optimizer = Recorder([nn.Parameter(torch.ones(2, device=parameters))], fused=True)
        finite, factor = torch.ones((), dtype=torch.bool, device="cuda"), torch.ones((), device="cuda")
        GuardedOptimizer(optimizer).step(factor, finite)
    assert optimizer.told_on == {parameters}


def new_optimizer(kind: str, params: list[nn.Parameter]) -> Any:
    """Two parameter groups, of which the second one decays."""
    groups: list[dict] = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}]
    if kind.startswith("sgd"):
        return SGD(groups, lr=0.1, momentum=0.9, fused=kind == "sgd, fused")
    if kind.startswith("muon"):
        for group, orthogonalized in zip(groups, (False, True), strict=True):
            group["orthogonalized"] = orthogonalized
        return Muon(groups, lr=0.1, fused=kind == "muon, fused")
    if kind == "apex":
        return FusedAdam(groups, lr=0.1)
    return AdamW(groups, lr=0.1, fused=kind == "fused")


def state_of(optimizer: torch.optim.Optimizer) -> list[object]:
    """Parameters, counts of their groups and states, where zeros are what has not been made yet."""
    found: list[object] = []
    for group in optimizer.param_groups:
        found.append(group.get("step", 0))
        for param in group["params"]:
            state = {
                n: v.tolist() for n, v in optimizer.state[param].items() if isinstance(v, torch.Tensor) and v.any()
            }
            found += [param.tolist(), state]
    return found


@pytest.mark.parametrize("kind", ["fused", "plain", "sgd", "sgd, fused", "apex", "muon", "muon, fused"])
def test_a_step_that_the_device_forbids_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known late: with it or without it, be it the first one or a later one, steps go on alike."""
    monkeypatch.setattr(state_homes, "_CHUNK", 3)  # two parameters at a time, then one
    ends = []
    for factors in ([1.0, 0.5, 2.0], [float("nan"), 1.0, 0.5, float("inf"), float("nan"), 2.0]):
        params = [nn.Parameter(torch.full((1, 2), 1.0 + i)) for i in range(4)]
        optimizer = new_optimizer(kind, params)
        guard = GuardedOptimizer(optimizer)
        for factor in map(torch.tensor, factors):
            before = state_of(optimizer)
            for i, param in enumerate(params):
                param.grad = torch.tensor([[1.0, -2.0]]) * (i + 1)
            groups = optimizer.param_groups
            guard.step(factor, torch.isfinite(factor))
            assert optimizer.param_groups is groups
            guard.finish_step(stepped=bool(torch.isfinite(factor)))
            assert (state_of(optimizer) == before) == (not torch.isfinite(factor))
        ends.append(state_of(optimizer))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", ["muon", "plain"])
def test_a_fused_optimizer_divides_as_the_other_one_is_scaled(kind: str) -> None:
    """By another factor in each step: the update of a matrix alone is the same for any."""
    ends = []
    for fused in (kind, "fused" if kind == "plain" else f"{kind}, fused"):
        params = [nn.Parameter(torch.full((1, 2), 1.0 + i)) for i in range(2)]
        guard = GuardedOptimizer(new_optimizer(fused, params))
        for factor, gradient in ((1.0, [1.0, -2.0]), (0.01, [3.0, 1.0]), (100.0, [-1.0, 4.0])):
            for param in params:
                param.grad = torch.tensor([gradient])
            guard.step(torch.tensor(factor), torch.tensor(True))
        ends.append([param.detach() for param in params])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "apex"])
def test_groups_that_are_left_out_stay_as_they_are(kind: str) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = new_optimizer(kind, params)
    for param in params:
        param.grad = torch.ones(2)
    GuardedOptimizer(optimizer).step(torch.tensor(1.0), torch.tensor(True), optimizer.param_groups[1:])
    assert params[0].tolist() == [1.0, 1.0] and params[0] not in optimizer.state
    assert params[1].tolist() != [1.0, 1.0]
