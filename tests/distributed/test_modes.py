"""Evaluation leaves every module in the mode that its user chose, on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.modes import evaluation_mode, report_modules_trained_in_eval_mode
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.support.tiny_steps import Chunk, Line, Micro, TinySteps, forward_step
from tests.support.workers import RankPool


class Keeps(nn.Sequential):
    """A frozen part that its user keeps in evaluation mode by overriding `train`."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class Merges(nn.Module):
    """Merges its weights for evaluation, as adapters do."""

    is_merged = False

    def train(self, mode: bool = True) -> Any:
        self.is_merged = not mode
        return super().train(mode)


def add_parts(model: nn.Module) -> None:
    """A frozen encoder in evaluation mode, but for a part; modules with two parents, or that look at their mode."""
    shared = nn.Dropout(0.5)
    model.encoder = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(shared, nn.Dropout(0.5)), nn.Dropout(0.5))
    model.encoder.requires_grad_(False).eval()
    model.encoder[1].train()
    model.other = nn.Sequential(shared, nn.Dropout(0.5))
    shared.eval()
    model.keeps, model.merges = Keeps(nn.Dropout(0.5)).train(), Merges()


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_every_module_comes_back_into_its_own_mode() -> None:
    model = nn.Module()
    add_parts(model)
    before = modes(model)
    assert {name for name, mode in before.items() if not mode} >= {"encoder", "encoder.0", "encoder.1.0", "keeps"}
    with pytest.raises(ZeroDivisionError), evaluation_mode([model]):
        assert not any(modes(model).values()) and model.merges.is_merged
        raise ZeroDivisionError
    assert modes(model) == before and not model.merges.is_merged


def test_what_is_trained_in_evaluation_mode_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].requires_grad_(False).eval()
    report_modules_trained_in_eval_mode([model])
    assert caplog.text == ""
    report_modules_trained_in_eval_mode([model.eval(), nn.Linear(2, 2).eval()])
    assert "as model_provider returned them: 0 and 1 more modules" in caplog.text


def test_what_a_models_own_hook_freezes_stays_in_evaluation_mode(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(ModelHub.find("qwen3")):  # type: ignore[misc]
        def freeze(self, config: Any) -> None:
            self.model.layers[0].requires_grad_(False).eval()

    monkeypatch.setitem(ModelHub.MODEL_MAPPINGS, "own_qwen3", Own)
    with torch.device("meta"):
        model = TransformersModel({"init_from_hf_path": str(qwen3_dir), "model_id": "own_qwen3"})
    in_evaluation = {name for name, mode in modes(model.model).items() if not mode}
    assert in_evaluation == {name for name in modes(model.model) if name.startswith("model.layers.0")}


class LineWithParts(Line):
    def __init__(self) -> None:
        super().__init__()
        add_parts(self)


class ChunkWithParts(Chunk):
    def __init__(self) -> None:
        super().__init__()
        add_parts(self)


def modes_around_an_evaluation(kind: str) -> tuple[Any, Any, Any, float]:
    run = TinySteps(kind, {"fsdp2": LineWithParts, "ptd": ChunkWithParts}[kind])
    model = run.backend.model if kind == "fsdp2" else run.backend.model[0]
    seen = {}

    def look(data: Iterator[Micro], chunk: Any) -> Any:
        seen.update(modes(model))
        return forward_step(data, chunk)

    run.step([Micro()])
    before = modes(model)
    loss, denominator = run.backend.evaluate(look, iter([Micro(2.0)]), 1)
    return before, seen, modes(model), loss / denominator


@pytest.mark.parametrize("kind", ["fsdp2", "ptd"])
def test_an_evaluation_restores_modes(ranks2: RankPool, megatron_pools: dict[int, RankPool], kind: str) -> None:
    pool = {"fsdp2": ranks2, "ptd": megatron_pools[2]}[kind]
    for before, meanwhile, after, loss in pool.run(modes_around_an_evaluation, kind):
        assert set(before.values()) == {True, False} and not any(meanwhile.values())
        assert after == before
        assert loss == pytest.approx(1.5, abs=0.1)
