"""megatron-core on the host: its own schedules, layers, random states and optimizer, equal to one process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.workers import RankError, run_ranks

VOCABULARY, LENGTH, ROWS = 64, 16, 4


def import_first() -> None:
    import megatron.core  # noqa: F401

    from mindspeed_mm import accelerator

    accelerator.prepare_megatron()


def what_others_see() -> dict[str, Any]:
    from mindspeed_mm import accelerator

    accelerator.prepare_megatron()
    accelerator.prepare_megatron()  # a second time changes nothing
    before = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(3)
    a = torch.rand(2)
    torch.cuda.manual_seed(3)
    b = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(before)
    return {
        "cuda": torch.cuda.is_available(),
        "type": torch.ones(1).type(),
        "cast": torch.ones(1).type(torch.int32).dtype,
        "moved": [torch.ones(1, device="cuda", pin_memory=True).device.type, torch.ones(1).to("cuda").device.type],
        "module": next(nn.Linear(1, 1).to(torch.device("cuda", 0)).parameters()).device.type,
        "host generator": torch.equal(a, b),
        "imported": "megatron.core" in sys.modules,
    }


def test_only_megatron_is_told_of_a_device() -> None:
    (seen,) = run_ranks(what_others_see, 1)
    assert seen == {
        "cuda": False,
        "type": "torch.FloatTensor",
        "cast": torch.int32,
        "moved": ["cpu", "cpu"],
        "module": "cpu",
        "host generator": True,
        "imported": True,
    }


def test_too_late_is_an_error() -> None:
    with pytest.raises(RankError, match="imported before mindspeed_mm prepared"):
        run_ranks(import_first, 1)


def adam_against_torch() -> list[float]:
    from mindspeed_mm.optimizer.elementwise import FusedAdam

    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    a, b = FusedAdam(ours.parameters(), **settings), torch.optim.AdamW(theirs.parameters(), fused=True, **settings)
    differences = []
    for _ in range(5):
        x = torch.randn(4, 5)
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        differences.append(max(float((p - q).abs().max()) for p, q in zip(ours.parameters(), theirs.parameters())))
    return differences


def test_adam_is_torchs() -> None:
    (differences,) = run_ranks(adam_against_torch, 1)
    assert differences == [0.0] * 5


def random_states(tensor_parallel: int) -> dict[str, Any]:
    """megatron-core's tracker: forks of the random state, apart by tensor-parallel rank, and put back afterwards."""
    from mindspeed_mm import accelerator

    accelerator.prepare_megatron()
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as mcore

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_parallel)
    mcore.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(1)
    plain = torch.rand(3)
    torch.manual_seed(1)
    tracker = mcore.get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(3)
    after = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    return {"undisturbed": torch.equal(plain, after), "goes on": not torch.equal(first, second), "first": first}


def test_the_tracker_of_random_states_restores_them() -> None:
    """Silent if it fails: the callbacks that do it are queued for a device that never starts."""
    ranks = run_ranks(random_states, 2, 2)
    assert all(r["undisturbed"] and r["goes on"] for r in ranks)
    assert not torch.equal(ranks[0]["first"], ranks[1]["first"])
