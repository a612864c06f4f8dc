"""Loss and log-probabilities of a head that two ranks split by vocabulary, against the whole head."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mindspeed_mm.models.common.head_loss import HeadLoss
from mindspeed_mm.models.common.loss import LossOptions, select_targets
from mindspeed_mm.parallel.tensor import apply_tensor_parallel
from mindspeed_mm.parallel.tensor_plan import TensorSplit
from tests.support.workers import RankPool

HIDDEN, VOCABULARY = 16, 38


def inputs() -> tuple[torch.Tensor, torch.Tensor, nn.ModuleDict]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, HIDDEN, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (3, 7))
    labels[0, :5] = -100
    head = nn.Linear(HIDDEN, VOCABULARY)
    with torch.no_grad():
        head.weight.mul_(200)  # exponentials that no float32 holds without the largest logit taken away
    return hidden, labels, nn.ModuleDict({"head": head})


def check(chunk: int | None, loss_type: str, each: bool, factor: float | None) -> None:
    hidden, labels, model = inputs()
    targets = select_targets(labels, loss_type)  # type: ignore[arg-type]
    weights = torch.ones(len(targets.tokens)) if targets.weights is None else targets.weights
    logits = model["head"](hidden).flatten(0, 1)[targets.index]
    losses = F.cross_entropy(logits, targets.tokens, reduction="none")
    expected = -losses if each else (losses * weights).sum()
    upstream = torch.linspace(1, 3, len(losses)) if each else torch.tensor(0.5)
    (expected * upstream).sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()} | {"hidden": hidden.grad}

    hidden, _, model = inputs()
    options = LossOptions() if chunk is None else LossOptions(compute_mode="chunk", chunk_size=chunk)
    loss = HeadLoss(model["head"], options)
    split = TensorSplit(columns={"head": model["head"]}, gathered=frozenset({"head"}))  # type: ignore[dict-item]
    apply_tensor_parallel(model, split, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    assert torch.equal(model["head"](hidden), inputs()[2]["head"](hidden))  # without targets: whole logits
    loss.expect(targets, 1, factor, each=each)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        found = model["head"](hidden)
    assert max(call.args[0].numel() for call in reduce.call_args_list) <= 2 * len(losses)  # never the logits
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
    (found * upstream).sum().backward()
    assert hidden.grad is not None
    for name, grad in [*((n, p.grad) for n, p in model.named_parameters()), ("hidden", hidden.grad)]:
        assert isinstance(grad, DTensor) == (name != "hidden")
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(whole, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk, factor", [(None, None), (5, None), (5, 8.0), (1000, None)])
@pytest.mark.parametrize("loss_type, each", [("per_token_loss", False), ("square_loss", False), ("default", True)])
def test_equals_a_whole_head(
    chunk: int | None, factor: float | None, loss_type: str, each: bool, ranks2: RankPool
) -> None:
    ranks2.run(check, chunk, loss_type, each, factor)
