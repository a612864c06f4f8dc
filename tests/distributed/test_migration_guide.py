"""Scripts written after the published migration guide (tests/fixtures/user_scripts) train as they are."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_mm.configs.config import ConfigReader
from mindspeed_mm.models.common.modelzoo import ModelHub
from tests.support.launch import ROOT, launch_flags, metrics_of, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool

SCRIPTS = ROOT / "tests" / "fixtures" / "user_scripts"
STEPS, ROWS, WIDTH, CLIP = 3, 8, 10, 0.5


def run_script(words: list[str], script: str) -> dict[str, Any]:
    """Run a user's script; which modules of its model are units, what one rank holds of a weight, and what it noted."""
    before, registered = sys.argv, dict(ModelHub.MODEL_MAPPINGS)
    sys.argv = [script, *words]
    try:
        names = runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        sys.argv = before
        ModelHub.MODEL_MAPPINGS.clear()
        ModelHub.MODEL_MAPPINGS.update(registered)
    (model,) = names["built"]
    model = getattr(model, "sharded_module", model)
    weight = next(param for param in model.parameters())
    return {
        "bases": [base.__name__ for base in type(model).__mro__],
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "local": tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape),
        "steps": getattr(model, "steps", None),
        "seen": names.get("seen"),
        "is_ours": getattr(model, "is_ours", None),
        "trained": [name for name, param in model.named_parameters() if param.requires_grad],
    }


def train_own_model(sharding: str) -> tuple[list[float], list[float]]:
    """The steps of the script's model over all rows at once, in a plain loop."""
    names = runpy.run_path(str(SCRIPTS / "pretrain_own_model.py"))
    model = names["WAYS"][sharding](ConfigReader({"width": WIDTH}))
    rows = [names["CustomDataset"](ROWS)[index] for index in range(ROWS)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(**batch).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms


@pytest.mark.parametrize("sharding", ["mixin", "steps", "torch", "without"])
def test_a_model_of_ones_own(sharding: str, ranks2: RankPool, tmp_path: Path) -> None:
    """Each way of sharding trains to what a plain loop does: gradients are scaled as the loss is, whoever wraps."""
    contents = {
        "model.json": {"width": WIDTH, "sharding": sharding},
        "data.json": {"rows": ROWS},
        "tools.json": {},
        "fsdp2.yaml": {"sharding_size": "auto", "num_to_forward_prefetch": 1},
    }
    if sharding == "mixin":
        contents["fsdp2.yaml"]["sub_modules_to_wrap"] = ["layers.{*}"]
    files = {name: tmp_path / name for name in contents}
    for name, content in contents.items():
        files[name].write_text(json.dumps(content))
    run = tmp_path / "run"
    flags = {"micro_batch_size": 2, "global_batch_size": ROWS, "train_iters": STEPS, "save": run, "clip_grad": CLIP}
    words = launch_flags(files, **flags, lr=1e-2, adam_eps=1e-3, no_save_optim=True)
    found = ranks2.run(run_script, words, "pretrain_own_model.py", timeout=60)[0]
    assert found["units"] == ["", "layers.0", "layers.1"]
    assert found["local"] == (WIDTH // 2, 6)
    assert found["steps"] == (["pre", "shard", "post"] if sharding == "steps" else None)
    # two micro-batches in each step and in the evaluation at the end, and once more after pretrain
    each = [(iteration, iteration * ROWS) for iteration in range(STEPS + 1) for _ in range(2)]
    assert found["seen"] == [*each, each[-1]]
    losses, norms = metrics_of(run)
    expected_losses, expected_norms = train_own_model(sharding)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)


def test_a_model_of_a_third_party(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """A class that the script registers, built by TransformersModel from model.json, on data.json's rows."""
    rows = write_mixed_dataset(tmp_path / "rows", rows=ROWS, images=False)
    model = {"model_id": "qwen3_generation"}
    wrap = {"sub_modules_to_wrap": ["model.layers.{*}"]}
    files = write_run_files(tmp_path / "files", qwen3_dir, rows, model=model, fsdp2=wrap)
    run = tmp_path / "run"
    flags = {"micro_batch_size": 1, "global_batch_size": ROWS, "train_iters": STEPS, "save": run}
    words = launch_flags(files, **flags, no_save_optim=True)
    found = ranks2.run(run_script, words, "pretrain_registered.py", timeout=60)[0]
    assert "Qwen3Generation" in found["bases"] and found["is_ours"]
    assert found["units"] == ["", "model.layers.0", "model.layers.1"]
    assert "model.embed_tokens.weight" not in found["trained"]
    losses, norms = metrics_of(run)
    inputs = rows_as_inputs(qwen3_dir, rows)
    expected = train_reference(qwen3_dir, inputs, STEPS, frozen=lambda name: "embed_tokens" in name)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norms == pytest.approx(expected[1], rel=1e-5)
