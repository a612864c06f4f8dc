"""What a fused optimizer is told on the device while its parameters are in host memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_mm import accelerator
from mindspeed_mm.backends.fsdp2 import FSDP2Backend


class Recorder:
    """An optimizer that notes where its scalars are when it steps."""

    def __init__(self, device: str) -> None:
        self.param_groups = [{"params": [nn.Parameter(torch.ones(2, device=device))]}]

    def step(self) -> None:
        self.told_on = {self.grad_scale.device.type, self.found_inf.device.type}  # type: ignore[attr-defined]


@pytest.mark.parametrize("parameters", ["cpu", "cuda"])
def test_scalars_are_where_the_parameters_are(parameters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload_to_cpu torch would copy them without waiting; without it nothing may wait for the device."""
    device = SimpleNamespace(holds=lambda tensor: tensor.device.type == "cuda")
    monkeypatch.setattr(accelerator, "current", lambda: device)
    with FakeTensorMode():
        backend = FSDP2Backend()
        backend._fused, backend.optimizer, backend.ema = True, Recorder(parameters), None
        finite, scale = torch.ones((), dtype=torch.bool, device="cuda"), torch.ones((), device="cuda")
        backend._step_optimizer(finite, scale)
    assert backend.optimizer.told_on == {parameters}


def test_a_fused_step_divides_and_skips() -> None:
    from mindspeed_mm.optimizer.build import step_fused

    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param], lr=0.1, weight_decay=0.0, eps=1.0, fused=True)
    param.grad = torch.tensor([4.0, 8.0])
    step_fused(optimizer, torch.tensor(4.0), torch.tensor(True))
    assert param.tolist() == [1.0, 1.0] and optimizer.state[param]["step"] == 0
    step_fused(optimizer, torch.tensor(4.0), torch.tensor(False))
    # the first step of Adam: lr * g / (|g| + eps)
    assert param.tolist() == pytest.approx([1 - 0.1 * 1 / 2, 1 - 0.1 * 2 / 3])
