"""Cases of a training step itself, on both backends: a global batch that holds nothing to train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.data.loading.counting import BatchCounts
from tests.support.predictors import cases
from tests.support.tiny_steps import Micro, TinySteps, own_part
from tests.support.workers import RankPool

BACKENDS = ("fsdp2", "ptd")
TRAINED, EMPTY = [[Micro(2.0)], [Micro(1.0)]], [[Micro(0.0, factor=0.0)], [Micro(0.0, factor=0.0)]]
HALF = [[Micro(0.0, factor=0.0)], [Micro(1.0)]]
# the same where the loss function returns means, beside which it may say how many targets they are of
MEANS = {0: Micro(None, {"loss": (0.0, 0.0)}, 0.0), 1: Micro(None, {"loss": (1.0, 1.0)}), None: Micro(None, factor=0.0)}


@pytest.fixture
def pools(ranks2: RankPool, megatron_pools: dict[int, RankPool]) -> dict[str, RankPool]:
    """Two workers of each backend."""
    return {"fsdp2": ranks2, "ptd": megatron_pools[2]}


def states_and_results(kind: str, plan: Any, flags: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(state afterwards, result) of each step."""
    run = TinySteps(kind, **flags)
    found = []
    for micros in own_part(plan):
        result = run.step(micros)
        found.append((run.state(), result))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {"lr_warmup_iters": 10, "ema_decay": 0.9},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "fp16": {"fp16": True, "loss_scale_window": 2, "initial_loss_scale": 8.0},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_w03_a_global_batch_without_targets_is_a_skipped_step(
    pools: dict[str, RankPool], kind: str, settings: str
) -> None:
    """W03: weights, momenta, averages, schedule and loss scale stand still; it is skipped, and says why."""
    plan = [TRAINED, EMPTY, HALF, EMPTY, TRAINED]
    for ranks in pools[kind].run(states_and_results, kind, plan, SETTINGS[settings]):
        states, results = zip(*ranks, strict=True)
        assert [r.skip_reason for r in results] == ["", "no targets", "", "no targets", ""]
        assert states[1] == states[0] and states[3] == states[2]
        assert states[0][0] != states[2][0] != states[4][0]
        assert results[1].loss != results[1].loss and results[2].loss == results[2].loss


@pytest.mark.parametrize("kind", BACKENDS)
def test_w03_so_it_is_where_the_loss_is_a_mean(pools: dict[str, RankPool], kind: str) -> None:
    """W03: also where the loss function returns a mean of targets; one that doesn't say how many is always of some."""
    plan = [[[MEANS[0], MEANS[1]]] * 2, [[MEANS[0]] * 2] * 2, [[MEANS[0]] * 2, [MEANS[1]] * 2], [[MEANS[None]]] * 2]
    for ranks in pools[kind].run(states_and_results, kind, plan, {}):
        states, results = zip(*ranks, strict=True)
        assert [r.skip_reason for r in results] == ["", "no targets", "", ""]
        assert states[1] == states[0] != states[2] != states[3]
        assert results[0].loss == 1.5 and results[0].metrics == {}


# name → what model.json says
LANGUAGE: dict[str, dict[str, Any]] = {
    "a sum": {},
    "a mean": {"loss_cfg": {"loss_type": "default"}},
    "a mean of all ranks": {"loss_cfg": {"loss_type": "token_loss"}},
}


def steps_of_a_model(build: Callable[[], Any], batches: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Why each step was skipped, and whether any weight has moved in it."""
    from pretrain_transformers import loss_func

    run = TinySteps("fsdp2", build, init_model_with_meta_device=True)
    found = []
    for batch in batches:

        def forward_step(data: Any, model: Any) -> Any:
            return model(**model.prepare(next(data))), loss_func

        before = [param.detach().clone() for param in run.backend.model.parameters()]
        run.backend.forward_backward(forward_step, iter([batch]), 1)
        result = run.backend.step(BatchCounts(), False).result()
        after = run.backend.model.parameters()
        moved = any(not old.equal(param.detach()) for old, param in zip(before, after, strict=True))
        found.append((result.skip_reason, moved))
    return found


def language_steps(hf_dir: str, loss: str) -> list[tuple[str, bool]]:
    from mindspeed_mm.models.transformers_model import TransformersModel

    ids = torch.arange(2, 10)[None]
    batches = [{"input_ids": ids, "labels": labels} for labels in (ids, torch.full_like(ids, -100), ids)]
    return steps_of_a_model(lambda: TransformersModel({"init_from_hf_path": hf_dir, **LANGUAGE[loss]}), batches)


def generation_steps() -> list[tuple[str, bool]]:
    from mindspeed_mm.models.generation.sora_model import SoRAModel

    name, case = cases()["wan-t2v"]
    batches = [{**case.batch([0, 1]), "sample_weights": torch.tensor(w)} for w in ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0])]
    return steps_of_a_model(lambda: SoRAModel(case.model_json(name)), batches)


@pytest.mark.parametrize("loss", LANGUAGE)
def test_w03_a_language_batch_of_fillers(ranks2: RankPool, qwen3_dir: Path, loss: str) -> None:
    """W03: rows without a target on every rank, as where all were too long, move no weight, whatever the loss type."""
    for steps in ranks2.run(language_steps, str(qwen3_dir), loss):
        assert steps == [("", True), ("no targets", False), ("", True)]


def test_w03_a_generation_batch_of_fillers(ranks2: RankPool) -> None:
    """W03: fillers in the place of clips that could not be read move no weight; one clip among them does."""
    for steps in ranks2.run(generation_steps):
        assert steps == [("", True), ("no targets", False), ("", True)]
