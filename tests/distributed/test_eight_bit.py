"""AdamW with a state of 8 bits a value against torchao's own, and against AdamW."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mindspeed_mm.optimizer.build import build_optimizer
from mindspeed_mm.optimizer.elementwise import AdamW
from mindspeed_mm.optimizer.guarded import GuardedOptimizer
from mindspeed_mm.utils import extras
from mindspeed_mm.utils.errors import ConfigError
from tests.support.apart import find_torchao
from tests.support.runs import run_of
from tests.support.workers import run_ranks

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((96, 128), (4096,), (17, 16))  # the last one's state stays in float32
STEPS = 12


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _optimizer(params: list[nn.Parameter]) -> AdamW:
    from mindspeed_mm.optimizer.eight_bit_state import EightBit

    return AdamW(params, **OPTIONS, fused=True, home=EightBit())


def _gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * (1 + step % 3)


def beside_torchaos() -> dict[str, float]:
    """How far parameters are from torchao's after some steps, and the share of other codes; its kernel not compiled."""
    find_torchao()
    from torchao.optim import AdamW8bit

    ours, theirs = _parameters(), _parameters()
    mine, other = _optimizer(ours), AdamW8bit(theirs, **OPTIONS)
    first = 0.0
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        for step in range(STEPS):
            for params, optimizer in ((ours, mine), (theirs, other)):
                _gradients(params, step)
                optimizer.step()
            if step == 0:
                first = max(float((p - q).abs().max()) for p, q in zip(ours, theirs, strict=True))
    apart, values = 0, 0
    for param, same in zip(ours[:2], theirs[:2], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            codes, expected = mine.state[param][name].codes, other.state[same][name]
            apart += int((codes.codes[: param.numel()] != expected.codes.flatten()).sum())
            values += param.numel()
            torch.testing.assert_close(codes.scales[: expected.scale.numel()], expected.scale, rtol=1e-5, atol=0)
    whole = sum(t.nbytes for t in mine.state[ours[0]]["exp_avg"].codes.__dict__.values())
    distances = torch.cat([(p - q).abs().flatten() for p, q in zip(ours, theirs, strict=True)])
    far, last = float((distances > 1e-6).float().mean()), float(distances.max())
    small = mine.state[ours[2]]["exp_avg"]
    torch.testing.assert_close(small, other.state[theirs[2]]["exp_avg"], rtol=1e-5, atol=1e-7)
    return {"first": first, "far": far, "last": last, "codes": apart / values, "bytes": whole / ours[0].nbytes}


def test_steps_are_those_of_torchao() -> None:
    (found,) = run_ranks(beside_torchaos, 1)
    """But for roundings: a value between two codes may get the other one, for some steps."""
    assert found["first"] < 1e-6 and found["far"] < 1e-3 and found["last"] < OPTIONS["lr"], found
    assert found["codes"] < 1e-3, found
    assert found["bytes"] < 0.35  # of float32, with the table of one small parameter


def skipping_and_coding() -> list[str]:
    """What is wrong: a step that is forbidden changes nothing, and decoded values are encoded as they were."""
    find_torchao()
    from mindspeed_mm.optimizer.eight_bit_state import EightBit

    wrong = []
    ends = []
    for skips in (False, True):
        params = _parameters()
        guard = GuardedOptimizer(optimizer := _optimizer(params))
        for step in range(4):
            for factor in (float("nan"), 1.0) if skips else (1.0,):
                _gradients(params, step)
                guard.step(torch.tensor(factor), torch.tensor(factor == 1.0))
                guard.finish_step(stepped=factor == 1.0)
        coded = [optimizer.state[p][name].codes for p in params[:2] for name in ("exp_avg", "exp_avg_sq")]
        ends.append([*params, *(t for c in coded for t in (c.codes, c.scales))])
    wrong += [f"skipped: {i}" for i, (a, b) in enumerate(zip(*ends, strict=True)) if not torch.equal(a, b)]

    generator = torch.Generator().manual_seed(4)
    kinds = {
        "normal": torch.randn(400, 256, generator=generator),
        "tiny": torch.randn(400, 256, generator=generator) * 1e-14,
        "negative": -torch.rand(400, 256, generator=generator) * 7,
        "zeros": torch.zeros(4, 256),
        "wide": torch.randn(400, 256, generator=generator) * torch.rand(400, 1, generator=generator) ** 20,
    }
    for kind, blocks in kinds.items():
        for name in ("exp_avg", "exp_avg_sq"):
            values = blocks.abs().flatten() if name == "exp_avg_sq" else blocks.flatten()
            memory = EightBit()._allocate(name, values, values.numel())
            if memory.decode().any():
                wrong.append(f"{name} doesn't begin with zeros")
            memory.encode(values)
            error = (memory.decode() - values).abs().view_as(blocks).amax(-1) / blocks.abs().amax(-1).clip(1e-12)
            if float(error.max()) > 0.05:
                wrong.append(f"{kind} {name}: {float(error.max())} of the largest")
            decoded = memory.decode()
            memory.encode_again(decoded)
            if not torch.equal(memory.decode(), decoded):
                wrong.append(f"{kind} {name}: decoded values come back as others")
    return wrong


def test_a_skipped_step_and_a_round_trip_change_no_code() -> None:
    assert run_ranks(skipping_and_coding, 1) == [[]]


def learning() -> dict[str, list[float]]:
    """Losses of a small network with either optimizer."""
    find_torchao()
    found = {}
    for name in ("adam", "adam8bit"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = build_optimizer(model, run_of(use_torch_fsdp2=True, optimizer=name, lr=2e-3).optimizer)
        inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(5))
        targets = (inputs[:, :3].prod(-1, keepdim=True) + inputs[:, 3:4].sin()).detach()
        losses = []
        for step in range(200):
            rows = slice(step % 8 * 64, step % 8 * 64 + 64)
            loss = (model(inputs[rows]) - targets[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[name] = losses
    return found


def test_it_learns_as_adamw_does() -> None:
    (found,) = run_ranks(learning, 1)
    adam, coded = (torch.tensor(found[name]) for name in ("adam", "adam8bit"))
    assert adam[-8:].mean() < 0.5 * adam[:8].mean() and not torch.equal(adam, coded)
    assert ((coded - adam).abs() / adam).max() < 0.1 and (coded[-8:].mean() / adam[-8:].mean() - 1).abs() < 0.03, found


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "torchao")
    with pytest.raises(ConfigError, match=r"--optimizer adam8bit needs torchao, .* 'mindspeed_mm\[quantization\]'"):
        build_optimizer(nn.Linear(2, 2), run_of(use_torch_fsdp2=True, optimizer="adam8bit").optimizer)
