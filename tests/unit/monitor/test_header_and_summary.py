"""The lines at a run's start and end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.recipe import GeneratedFigures
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.models.contract import ModelOutline, as_trainable
from mindspeed_mm.monitor.console.header import header_lines
from mindspeed_mm.monitor.console.summary import Totals, summary_lines
from mindspeed_mm.monitor.records import EvaluationRecord
from mindspeed_mm.utils.launch import Launch
from tests.support.records import step_record
from tests.support.runs import run_of

LANGUAGE_MODEL = TransformersModelConfig.from_dict({"init_from_hf_path": "hf"})


def data_of(**figures: Any) -> Any:
    """The facts of a run's data."""
    valid = SimpleNamespace(limit_batches=lambda wanted: min(wanted, 3))
    known = {"train_rows": 3600, "global_batches_per_epoch": 225.0, "valid": valid, "why_no_length": "it is streamed"}
    return SimpleNamespace(**{**known, **figures})


def launched(run: Run, processes: int, a_machine: int) -> Run:
    return dataclasses.replace(run, launch=Launch(world_size=processes, local_world_size=a_machine))


class Device(CPUAccelerator):
    """A device with a name."""

    is_host = False

    def model_name(self) -> str:
        return "NVIDIA H200"


def test_the_header_of_a_run_on_devices() -> None:
    """Sizes above one, in words; saves, exports and evaluations."""
    flags = {"save": "runs/x", "save_interval": 250, "save_hf": 500, "save_best": "loss", "eval_interval": 100}
    flags |= {"eval_generate": "wer", "eval_generate_rows": 360, "use_torch_fsdp2": True, "micro_batch_size": 4}
    run = run_of(world_size=8, train_iters=1000, global_batch_size=64, bf16=True, **flags)
    outline = ModelOutline("FSDPQwen3ForCausalLM", 7_616_000_000, 20_185_088, "documents_or_sdpa")
    run = dataclasses.replace(launched(run, 8, 4), dims=dataclasses.replace(run.dims, dp=4, ulysses=2, dp_shard=8))
    with mock.patch("mindspeed_mm.accelerator.current", return_value=Device()):
        lines = header_lines(run, outline, data_of(), 0, "bf16")
    assert lines == [
        "model       Qwen3ForCausalLM, 7.62B parameters, 20.2M of them trained (0.3 %)",
        "devices     8 × NVIDIA H200, on 2 nodes",
        "layout      FSDP2, data parallel 4, context parallel (Ulysses) 2, weights sharded over 8",
        "precision   bf16, over fp32 weights",
        "attention   flash attention of PyTorch for the host, document by document",
        "data        3,600 rows, 225 steps an epoch",
        "training    1,000 steps (4.44 epochs) of 64 rows = micro-batches of 4 × 2 accumulated × 8 data parallel",
        "checkpoints every 250 steps, at the best loss and at the end, in runs/x",
        "export      in HF's layout, every 500 steps and at the end",
        "evaluation  every 100 steps and at the end, on 3 global batches; wer of answers to 360 rows",
    ]


def test_the_header_of_a_run_that_goes_on_without_much() -> None:
    """On the host, from a checkpoint, streamed data, nothing saved or evaluated; a model of the script's own."""
    run = run_of(train_iters=40, load="runs/y")
    data = data_of(train_rows=None, global_batches_per_epoch=None, valid=None)
    assert header_lines(run, None, data, 30, "fp32") == [
        "devices     1 process on the CPU",
        "layout      Megatron-core",
        "precision   fp32",
        "data        rows of unknown number, no epochs: it is streamed",
        "training    40 steps of 1 row = micro-batches of 1",
        "goes on     after step 30, from 'runs/y'",
        "checkpoints none, as there is no --save",
    ]


def test_the_outline_counts_what_is_trained() -> None:
    """As `numel` of torch does, each tensor once; attention by its name in transformers."""
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.model.layers[0].requires_grad_(False)
    frozen = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 8 + 2 * 8 + 2 * 16  # q, k and v, o, mlp, norms of heads, norms
    outline = as_trainable(model).outline
    assert outline == ModelOutline("Qwen3ForCausalLM", 32 * 16 + 2 * frozen + 16, 32 * 16 + frozen + 16, "sdpa")


def fed(start: int = 0) -> Totals:
    """The totals of a launch of 20 steps with an evaluation after each ten."""
    totals = Totals(start, 32 * start, 100 * start)
    for number, loss in ((1, 5.9761), (10, 3.0), (20, 1.25)):
        now = start + number
        figures = {"consumed_samples": 32 * now, "consumed_tokens": 100 * now, "step_ms": 6000.0, "loss": loss}
        totals.step(step_record(iteration=now, data_wait_ms=300.0, memory_bytes=number * 2**30, **figures))
        if number >= 10:
            totals.evaluation(
                EvaluationRecord(now, 3, float("nan") if number == 10 else 2.5, GeneratedFigures({"wer": 1.0 * now}, 7))
            )
    return totals


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    run = run_of(save=str(tmp_path), save_hf=0, model=LANGUAGE_MODEL, train_iters=20)
    assert summary_lines(run, fed(), {"evaluation": 75.2, "saving": 0.1}, is_over=True) == [
        "trained     20 steps, 640 samples, 2.00k tokens, 16.7 tokens/s",
        "time        training 2m00s, evaluation 1m15s; 5.0 % of training waiting for data",
        "loss        5.9761 at step 1, 1.2500 at step 20, 1 step skipped",
        "evaluation  best loss 2.5000 at step 20, wer 10.0 at step 10",
        "memory      20.0 GiB at most on this device",
        f"written     {tmp_path}, exported to {tmp_path}/hf",
        f"report      {tmp_path}/report.html",
        f"try it      mindspeed-mm chat {tmp_path}/hf",
    ]


def test_the_summary_of_a_launch_that_ends_early_counts_its_own_steps() -> None:
    run = run_of(save="runs/x", model=LANGUAGE_MODEL)
    lines = summary_lines(run, fed(start=30), {}, is_over=False)
    assert lines[0] == "trained     20 steps, 640 samples, 2.00k tokens, 16.7 tokens/s"
    assert lines[2].startswith("loss        5.9761 at step 31, 1.2500 at step 50")
    assert lines[-3:] == [
        "written     runs/x",
        "report      runs/x/report.html",
        "go on       mindspeed-mm train runs/x --load runs/x",
    ]
    assert len(lines) <= 8
    assert summary_lines(run, Totals(30, 0, 0), {}, is_over=False) == []


@pytest.mark.parametrize(
    "model, trained, last",
    [
        (LANGUAGE_MODEL, "2.00k tokens, 16.7 tokens/s", "try it      mindspeed-mm chat runs/x"),
        (SoRAModelConfig.model_construct(), "640 samples, 5.33 samples/s", "report      runs/x/report.html"),
        (None, "2.00k tokens, 16.7 tokens/s", "report      runs/x/report.html"),
    ],
    ids=["language", "generation", "a model of the script's own"],
)
def test_only_language_models_of_ours_chat(model: Any, trained: str, last: str) -> None:
    lines = summary_lines(run_of(save="runs/x", model=model), fed(), {}, is_over=True)
    assert lines[0].endswith(trained) and lines[-1] == last
    without = summary_lines(run_of(save="runs/x", model=model, report=False), fed(), {}, is_over=True)
    assert without == [line for line in lines if not line.startswith("report ")]
