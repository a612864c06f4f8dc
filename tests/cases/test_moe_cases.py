"""Cases of experts: their load and load-balancing loss under every split of a global batch, against transformers.

The real entry script runs on flags and files; the reference is one process that takes each row alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.families import families
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.reference import rows_as_inputs
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool

ROWS, STEPS, COEFFICIENT = 8, 2, 0.5
NAMES = ("loss", "router_aux_loss", "grad_norm", "expert_imbalance", "dead_experts")
Figures = list[tuple[float, ...]]


class Experts:
    """A tiny Qwen3 with experts, its rows, and what a run on them must tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hf_dir = families()["qwen3_moe"].make(folder / "hf")
        self.data = write_mixed_dataset(folder / "rows", rows=ROWS, images=False)
        self.inputs = rows_as_inputs(self.hf_dir, self.data)

    def reference(self, rows_of: Any = None) -> Figures:
        """Of each step: token loss, load-balancing loss, gradient norm of both; rows weigh what their targets do.

        Then the largest number of tokens of an expert ÷ the mean, and the number of experts without any.
        """
        from transformers import Qwen3MoeForCausalLM

        model = Qwen3MoeForCausalLM.from_pretrained(self.hf_dir, dtype=torch.float32).train()
        optimizer, figures = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(STEPS):
            rows = range(ROWS) if rows_of is None else rows_of(step)
            token = balance = torch.zeros(())
            targets, load = 0, torch.zeros(2, 6)
            for row in (self.inputs[number] for number in rows):
                output = model(**{**row, "labels": None}, output_router_logits=True)
                wanted = row["labels"][0, 1:]
                count = int((wanted != -100).sum())
                token = token + torch.nn.functional.cross_entropy(output.logits[0, :-1], wanted, reduction="sum")
                balance, targets = balance + count * output.aux_loss, targets + count
                for layer, logits in enumerate(output.router_logits):
                    load[layer] += logits.topk(2).indices.flatten().bincount(minlength=6)
            optimizer.zero_grad()
            ((token + COEFFICIENT * balance) / targets).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            losses = (float(token.detach()) / targets, float(balance.detach()) / targets, float(norm))
            figures.append((*losses, float(load.max() / load.mean()), float((load == 0).sum())))
            optimizer.step()
        return figures

    def run(
        self, pool: RankPool, folder: Path, *, model: Any = None, data: Any = None, fsdp2: Any = None, **flags: Any
    ) -> Figures:
        """The same figures of a launch."""
        model = {"loss_cfg": {"router_aux_loss_coef": COEFFICIENT}} if model is None else model
        wrap = {"sub_modules_to_wrap": WRAP_TEXT, **(fsdp2 or {})}
        files = write_run_files(folder, self.hf_dir, self.data, model=model, data=data, fsdp2=wrap)
        settings = {"global_batch_size": ROWS, "micro_batch_size": 1, "train_iters": STEPS, "save": folder / "run"}
        settings |= {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1, "weight_decay": 0.0, "clip_grad": 0.0}
        pool.run(run_entry, launch_flags(files, **{**settings, "no_save_optim": True, **flags}), timeout=60)
        return [tuple(line[name] for name in NAMES) for line in read_metrics(folder / "run/metrics.jsonl")]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Experts:
    return Experts(tmp_path_factory.mktemp("experts"))


def assert_same(found: Figures, expected: Figures) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-6)


RECOMPUTE = {"recompute_modules": WRAP_TEXT}
EP2 = {"expert_parallel_size": 2}
CHUNKED = {"loss_cfg": {"router_aux_loss_coef": COEFFICIENT, "compute_mode": "chunk", "chunk_size": 3}}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"micro_batch_size": ROWS}),
        (1, {"micro_batch_size": ROWS // 2}),
        (2, {"micro_batch_size": ROWS // 4}),
        (2, {"micro_batch_size": 1}),
        (2, {"micro_batch_size": 2, "fsdp2": RECOMPUTE}),
        (2, {"micro_batch_size": 2, "model": CHUNKED}),
        (2, {"micro_batch_size": 2, "fsdp2": {**RECOMPUTE, **EP2}}),
        pytest.param(4, {"fsdp2": EP2}, marks=pytest.mark.full),
        pytest.param(4, {"fsdp2": {**EP2, "reshard_local_experts": False}}, marks=pytest.mark.full),
    ],
    ids=[
        "whole",
        "accumulated",
        "two ranks, accumulated",
        "row by row",
        "recomputed",
        "chunked",
        "experts over two ranks, recomputed",
        "experts over two of four ranks, sharded",
        "experts over two of four ranks, two copies",
    ],
)
def test_load_balancing_loss_is_the_same_under_any_split(
    ranks: int, settings: dict[str, Any], experts: Experts, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """L08: accumulation 2 = 1 = two ranks = one process: loss, load-balancing loss, norm of both gradients, load."""
    found = experts.run(request.getfixturevalue(f"ranks{ranks}"), tmp_path, **settings)
    assert_same(found, experts.reference())


@pytest.mark.parametrize("ranks", [2, 1])
def test_load_balancing_loss_of_packed_rows(
    ranks: int, experts: Experts, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """L08, packed: each sample of a pack has a load-balancing loss of its own; on one rank, packs are padded."""
    longest = max(row["input_ids"].shape[1] for row in experts.inputs)
    packing = {"dataset_param.basic_parameters.packing": True}
    flags = {"data": packing, "global_batch_size": 2, "seq_length": 2 * longest, "log_row_ids": True}
    found = experts.run(request.getfixturevalue(f"ranks{ranks}"), tmp_path, **flags, micro_batch_size=2 // ranks)
    files = [(tmp_path / f"run/rows/rank{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    rows = [[row for line in step for row in json.loads(line)["rows"]] for step in zip(*files, strict=True)]
    assert max(map(len, rows)) > 2
    assert_same(found, experts.reference(lambda step: rows[step]))


def test_the_models_own_config_asks_for_the_loss(experts: Experts, ranks1: RankPool, tmp_path: Path) -> None:
    """`output_router_logits` with `router_aux_loss_coef` of config.json; an explicit 0 in model.json turns it off."""
    config = experts.hf_dir / "config.json"
    before = config.read_text()
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    config.write_text(json.dumps({**json.loads(before), **asked}))
    try:
        assert_same(experts.run(ranks1, tmp_path / "asked", model={}), experts.reference())
        off = {"loss_cfg": {"router_aux_loss_coef": 0}}
        with pytest.raises(KeyError, match="router_aux_loss"):
            experts.run(ranks1, tmp_path / "off", model=off)
    finally:
        config.write_text(before)
