"""AdamW and SGD over local parts against torch's own, bit for bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.optimizer import state_homes
from mindspeed_mm.optimizer.build import build_optimizer
from mindspeed_mm.optimizer.elementwise import SGD, AdamW, ElementWise, FusedAdam
from mindspeed_mm.optimizer.guarded import GuardedOptimizer
from mindspeed_mm.optimizer.streamed_state import Swapped
from mindspeed_mm.utils.errors import ConfigError
from tests.support.fake_accelerator import fake_accelerator
from tests.support.live_bytes import LiveBytes
from tests.support.runs import run_of

SHAPES = ((33, 7), (5,), (0, 4), (130, 3), (1,))
STEPS, SKIPPED, IDLE = 5, 1, 4
FACTOR = 0.3
ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(kind: str, step: int) -> list[torch.Tensor | None]:
    """Those of a step, of which one forbids it; the last parameter has few.

    But not where torch could not follow: Megatron's common counts, and momenta that begin apart in a fused SGD.
    """
    generator = torch.Generator().manual_seed(10 + step)
    factor = float("nan") if step == SKIPPED else 1.0
    found: list[torch.Tensor | None] = [factor * torch.randn(shape, generator=generator) for shape in SHAPES]
    if step != SKIPPED + 1 and kind not in ("megatron", "megatron, fused", "sgd, fused"):
        found[IDLE] = None
    return found


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "weight_decay": 0.0}]


def trained(kind: str, *, swaps: bool = False) -> tuple[list[nn.Parameter], dict[nn.Parameter, dict[str, Any]]]:
    """Parameters and state after our steps, of which the device forbids one."""
    params = parameters()
    optimizer: ElementWise
    if kind.startswith("sgd"):
        optimizer = SGD(groups(params), **MOMENTUM, fused="fused" in kind)
    elif kind.startswith("megatron"):
        optimizer = FusedAdam([{**group, "fused": "fused" in kind} for group in groups(params)], **ADAM)
    else:
        optimizer = AdamW(groups(params), **ADAM, fused="fused" in kind)
    if swaps:
        optimizer.home = Swapped(optimizer.param_groups)
    guard = GuardedOptimizer(optimizer)
    for step in range(STEPS):
        for param, grad in zip(params, gradients(kind, step), strict=True):
            param.grad = grad
        finite = torch.tensor(step != SKIPPED)
        guard.step(torch.tensor(FACTOR, dtype=torch.float64), finite)
        guard.finish_step(stepped=bool(finite))
    optimizer.ensure_state()
    return params, optimizer.state


def trained_by_torch(kind: str) -> tuple[list[nn.Parameter], dict[nn.Parameter, dict[str, Any]]]:
    """The same by torch's optimizers, which never see the step that is skipped."""
    params, fused = parameters(), "fused" in kind
    optimizer: torch.optim.Optimizer
    if kind.startswith("sgd"):
        optimizer = torch.optim.SGD(groups(params), **MOMENTUM, fused=fused)
    else:
        optimizer = torch.optim.AdamW(groups(params), **ADAM, fused=fused, foreach=not fused)
    for step in range(STEPS):
        if step == SKIPPED:
            continue
        for param, grad in zip(params, gradients(kind, step), strict=True):
            param.grad = grad
        if kind == "adam, fused":
            optimizer.grad_scale, optimizer.found_inf = (1 / torch.tensor(FACTOR).double()).float(), torch.zeros(())
        else:
            for param in params:
                if param.grad is not None:
                    param.grad *= torch.tensor(FACTOR)
        optimizer.step()
    return params, optimizer.state


@pytest.mark.parametrize("kind", ["adam, fused", "adam", "megatron, fused", "megatron", "sgd, fused", "sgd"])
def test_steps_are_torchs_bit_for_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With empty parts, an idle parameter and a step that is skipped."""
    monkeypatch.setattr(state_homes, "_CHUNK", 200)
    (ours, state), (theirs, expected) = trained(kind), trained_by_torch(kind)
    for param, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=0)
        for name, value in expected[other].items():
            if not (kind.startswith("megatron") and name == "step"):  # its groups count
                torch.testing.assert_close(state[param][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["adam, fused", "adam", "megatron, fused", "megatron", "sgd, fused"])
def test_a_state_in_host_memory_changes_no_value(kind: str) -> None:
    """On a device whose copies are done only when something waits for them."""
    expected, state = trained(kind)
    with fake_accelerator() as device:
        ours, swapped = trained(kind, swaps=True)
    for param, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=0)
        torch.testing.assert_close(swapped[param], state[other], rtol=0, atol=0)
    assert device.log.count("pin") >= 2 and device.log.count("copy") == device.log.count("copied") > 8


def test_dense_parameters_of_any_order_are_swapped() -> None:
    """One is a transposed matrix, and the other one's gradient is."""
    ends = []
    for swaps in (False, True):
        values = torch.arange(6000.0).view(60, 100).sin()
        params = [nn.Parameter(values.clone().t()), nn.Parameter(values.clone())]
        optimizer = AdamW(params, fused=True)
        if swaps:
            optimizer.home = Swapped(optimizer.param_groups)
        for step in range(1, 3):
            params[0].grad = (values.t() * step).cos()
            grad = values * step
            params[1].grad = grad.t().contiguous().t() if swaps else grad  # torch's kernel would mix its values up
            optimizer.step()
        ends.append([*params, *(t for p in params for t in optimizer.state[p].values())])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_little_of_a_swapped_state_is_on_the_device(make: Any) -> None:
    """At most a twentieth at any time, also where most of it belongs to one parameter."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((700, 64), (64,), (64, 64), (30, 64), (3,))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = make(params, fused=True, **({} if make is AdamW else {"momentum": 0.9}))
    optimizer.home = Swapped(optimizer.param_groups)
    optimizer.step()
    whole = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert whole >= sum(p.nbytes for p in params) * (2 if make is AdamW else 1)
    with LiveBytes() as live:
        optimizer.step()
    assert 0 < live.peak <= 0.05 * whole and live.alive == 0


class Launches(TorchDispatchMode):
    """Counts operators, but for views: they launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_launch = not func.is_view and func.namespace != "profiler"
        if is_launch and func is not torch.ops.aten._local_scalar_dense.default:  # counts of steps, on the host
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def launched(kind: str, number: int) -> Counter[str]:
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(number)]
    make: Any = {"adam": AdamW, "sgd": SGD}[kind.split(",")[0]]
    guard = GuardedOptimizer(make([{"params": params}], fused="fused" in kind))
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(4, 3)
        with Launches() as launches:
            guard.step(torch.tensor(0.5), torch.tensor(True))
    return launches.names


@pytest.mark.parametrize("kind", ["adam, fused", "adam", "sgd, fused", "sgd"])
def test_a_step_launches_as_much_for_any_number_of_parameters(kind: str) -> None:
    few, many = launched(kind, 3), launched(kind, 30)
    assert few == many and few.total() <= (12 if "fused" in kind else 40), many


def test_what_cannot_be_swapped_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for optimizer in ("muon", "adam8bit"):
        with pytest.raises(ConfigError, match=f"--swap-optimizer moves .*--optimizer {optimizer}"):
            run_of(use_torch_fsdp2=True, optimizer=optimizer, swap_optimizer=True)
    with fake_accelerator(offloads=True):
        options = run_of(use_torch_fsdp2=True, swap_optimizer=True).optimizer
        assert isinstance(build_optimizer(nn.Linear(2, 2), options).home, state_homes.Resident)  # type: ignore[union-attr]
    assert "--swap-optimizer has no effect: offload_to_cpu keeps" in caplog.text
