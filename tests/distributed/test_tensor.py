"""Tensor parallelism through the entry script against plain transformers in one process, fp32.

Losses 1e-6 and norms 1e-5 of a plain loop, and every gradient of the first step 1e-5.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.optimizer.clip import local_tensor
from mindspeed_mm.parallel.world import start_world
from tests.parity.test_families import case_of, load_all
from tests.support.gradients import reference_gradients, run_for_gradients, worst_difference
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.roundtrip import load_and_export
from tests.support.tiny import tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankPool

full = pytest.mark.full
SEQUENCE = {"sequence_parallel": True}
CHUNKED = {"loss_cfg": {"compute_mode": "chunk", "chunk_size": 3}}
ROWS, STEPS = 8, 3


@dataclass(frozen=True)
class Layout:
    """Number of ranks, and what differs in flags and files of a tied Qwen3 with rows of odd lengths."""

    world: int = 2
    micro: int = 2
    fsdp2: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)


def sharded(**keys: Any) -> dict[str, Any]:
    return {"sharding_size": "auto", **keys}


LAYOUTS = {
    "TP2": (Layout(), full),
    "TP2, chunked loss, recompute": (
        Layout(model=CHUNKED, flags={"recompute_granularity": "full", **SEQUENCE}, fsdp2={"use_reentrant": True}),
        None,
    ),
    "TP2, recompute": (Layout(fsdp2={"recompute_modules": WRAP_TEXT, "use_reentrant": False}), full),
    "TP2, reentrant recompute": (Layout(fsdp2={"recompute_modules": WRAP_TEXT, "use_reentrant": True}), full),
    "TP2 × FSDP2, meta, deferred gradient sync": (
        Layout(4, 1, sharded(defer_gradient_sync=True), flags={"init_model_with_meta_device": True}),
        None,
    ),
    "TP2 × FSDP2, SP": (Layout(4, 1, sharded(), flags=SEQUENCE), full),
    "TP2 × FSDP2, head a unit, chunked loss": (
        Layout(4, 1, sharded(sub_modules_to_wrap=[*WRAP_TEXT, "lm_head"]), CHUNKED),
        full,
    ),
    "TP2 × FSDP2, ZeRO-2, prefetch": (
        Layout(4, 1, sharded(reshard_after_forward=False, num_to_forward_prefetch=2, num_to_backward_prefetch=2)),
        full,
    ),
    "TP2 × FSDP2, offload": (Layout(4, 1, sharded(offload_to_cpu=True)), full),
    "TP2 × 2 replicas": (Layout(4, 1, {"sharding_size": 1}), full),
    "TP2 × 2 replicas, deferred gradient sync": (Layout(4, 1, {"sharding_size": 1, "defer_gradient_sync": True}), full),
    "TP2 × FSDP2, norm ignored": (Layout(4, 1, sharded(ignored_modules=["model.norm"])), full),
    "TP2, norm ignored": (Layout(2, 1, {"sharding_size": 1, "ignored_modules": ["model.norm"]}), full),
}


def cases(table: dict[str, tuple[Any, Any]]) -> list[Any]:
    return [pytest.param(name, marks=[] if mark is None else [mark]) for name, (_, mark) in table.items()]


@functools.cache
def tied_model() -> tuple[Path, Path]:
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="tensor-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tiny_qwen3_dir(folder / "hf", seed=3), write_mixed_dataset(folder / "data", ROWS, seed=5, images=False)


@functools.cache
def reference() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    hf_dir, data = tied_model()
    inputs = rows_as_inputs(hf_dir, data)
    losses, norms, _ = train_reference(hf_dir, inputs, STEPS)
    return losses, norms, reference_gradients(hf_dir, inputs)


@pytest.fixture(scope="module")
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool) -> dict[int, RankPool]:
    return {1: ranks1, 2: ranks2, 4: ranks4}


@pytest.mark.parametrize("name", cases(LAYOUTS))
def test_layouts(name: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    layout, (hf_dir, data) = LAYOUTS[name][0], tied_model()
    fsdp2 = {"sub_modules_to_wrap": WRAP_TEXT, **layout.fsdp2}
    files = write_run_files(tmp_path, hf_dir, data, model=layout.model, fsdp2=fsdp2)
    settings = {"tensor_model_parallel_size": 2, "micro_batch_size": layout.micro, "global_batch_size": ROWS}
    settings |= {"train_iters": STEPS, "save": tmp_path / "run", "no_save_optim": True, **layout.flags}
    ranks = pools[layout.world].run(run_for_gradients, launch_flags(files, **settings), timeout=120)
    losses, norms, gradients = reference()
    found = metrics_of(tmp_path / "run")
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)
    clipped = {name: gradient * min(1.0, 1.0 / norms[0]) for name, gradient in gradients.items()}
    worst = worst_difference(ranks[0].steps[0], clipped)
    assert worst[0] < 1e-5, worst


@dataclass(frozen=True)
class OfFamily:
    """A family, and what differs in flags and in fsdp2.yaml."""

    family: str
    world: int = 2
    fsdp2: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "gpt_oss, TP2 × FSDP2": (OfFamily("gpt_oss", 4), full),  # sinks, and biases that must be added once
    "gpt_oss, TP2, SP": (OfFamily("gpt_oss", flags=SEQUENCE), full),
    "qwen3, TP2": (OfFamily("qwen3"), full),
    "qwen3, TP2 × FSDP2, SP": (OfFamily("qwen3", 4, flags=SEQUENCE), full),
    "qwen3_vl, TP2, SP": (OfFamily("qwen3_vl", flags=SEQUENCE), full),
    "qwen3, TP2 × CP2": (OfFamily("qwen3", 4, flags={"context_parallel_size": 2}), full),
    "qwen3, TP2 × CP2, SP": (OfFamily("qwen3", 4, flags={"context_parallel_size": 2, **SEQUENCE}), full),
    "qwen2_5_vl, TP2 × FSDP2": (OfFamily("qwen2_5_vl", 4), full),
    "qwen2_5_vl, TP2, SP": (OfFamily("qwen2_5_vl", flags=SEQUENCE), full),
    "qwen3_moe, TP2, SP": (OfFamily("qwen3_moe", flags=SEQUENCE), full),
    "qwen3_moe, TP2 × EP2": (OfFamily("qwen3_moe", fsdp2={"expert_parallel_size": 2}), full),
    "qwen3_moe, TP2 × FSDP2 × EP2, SP": (OfFamily("qwen3_moe", 4, {"expert_parallel_size": 2}, SEQUENCE), full),
    "qwen3_vl_moe, TP2 × FSDP2": (OfFamily("qwen3_vl_moe", 4), full),
    "glm4v_moe, TP2 × FSDP2": (OfFamily("glm4v_moe", 4), full),
    "glm4v_moe, TP2, SP": (OfFamily("glm4v_moe", flags=SEQUENCE), full),
    "internvl, TP2": (OfFamily("internvl"), full),
    "internvl, TP2, SP": (OfFamily("internvl", flags=SEQUENCE), full),
    "qwen3_omni_moe, TP2": (OfFamily("qwen3_omni_moe"), full),
    "gemma3_text, TP2, SP": (OfFamily("gemma3_text", flags=SEQUENCE), full),
    "gemma4_moe, TP2": (OfFamily("gemma4_moe"), full),  # capped logits of a head that ranks split
    "ernie4_5_vl_moe, TP2": (OfFamily("ernie4_5_vl_moe"), full),
    "ernie4_5_vl_moe, TP2, SP": (OfFamily("ernie4_5_vl_moe", flags=SEQUENCE), full),
    "llama4, TP2": (OfFamily("llama4"), full),
    "llama4, TP2, SP": (OfFamily("llama4", flags=SEQUENCE), full),
}


@pytest.mark.parametrize("name", cases(FAMILIES))
def test_families(name: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Losses, norms and every gradient."""
    chosen = FAMILIES[name][0]
    case = case_of(chosen.family)
    fsdp2 = {"sharding_size": "auto", "sub_modules_to_wrap": list(case.family.wrap), **chosen.fsdp2}
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(fsdp2))
    settings = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 2, "save": tmp_path / "run"}
    settings |= {"no_save_optim": True, "clip_grad": 0, "fsdp2_config_path": tmp_path / "fsdp2.yaml"}
    settings |= {"tensor_model_parallel_size": 2, **case.family.flags, **chosen.flags}
    ranks = pools[chosen.world].run(run_for_gradients, launch_flags(case.files, **settings), timeout=120)
    rows, outputs = case.inputs(), case.family.outputs
    losses, norms, _ = train_reference(case.hf_dir, rows, 2, clip=1e9, outputs=outputs)
    found = metrics_of(tmp_path / "run")
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)
    worst = worst_difference(ranks[0].steps[0], reference_gradients(case.hf_dir, rows, outputs=outputs))
    assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("name", [pytest.param("gpt_oss"), pytest.param("qwen3_vl", marks=full)])
def test_weights_come_out_as_they_went_in(name: str, ranks4: RankPool, tmp_path: Path) -> None:
    """Read in parts of split and sharded layers, and exported: bit-equal, under the hub's names."""
    case = case_of(name)
    model = {**case.family.model, "init_from_hf_path": str(case.hf_dir)}
    sizes = {"dp": 2, "tp": 2, "dp_shard": 2}
    ranks = ranks4.run(load_and_export, model, list(case.family.wrap), tmp_path / "hf", sizes, timeout=120)
    exported, source = load_all(tmp_path / "hf"), load_all(case.hf_dir)
    assert exported.keys() == source.keys()
    for key, tensor in source.items():
        assert exported[key].dtype == tensor.dtype and torch.equal(exported[key], tensor), key
    heads = [rank["lm_head.weight"][0] for rank in ranks]
    assert [4 * rows for rows in heads] == [len(source["lm_head.weight"])] * 4


@full
def test_resumes_in_any_layout(ranks1: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    """Saved with AdamW's state by TP2 × FSDP2 and by one process; each goes on in the other as if nothing had been."""
    hf_dir, data = tied_model()
    files = write_run_files(tmp_path, hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    settings = {"micro_batch_size": 1, "global_batch_size": ROWS, "save_interval": 1}
    split = {"tensor_model_parallel_size": 2}
    losses, norms, _ = reference()
    for first, then, flags in ((ranks4, ranks1, (split, {})), (ranks1, ranks4, ({}, split))):
        folder = tmp_path / ("split" if first is ranks4 else "whole")
        settings |= {"save": folder}
        first.run(run_entry, launch_flags(files, **settings, **flags[0], train_iters=STEPS - 1), timeout=120)
        then.run(run_entry, launch_flags(files, **settings, **flags[1], train_iters=STEPS, load=folder), timeout=120)
        found = metrics_of(folder)
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(norms, rel=1e-5)


def test_a_run_from_scratch(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """L06: weights drawn at random, losses, evaluation, tokens, rows, averaged and exported weights of one process."""
    hf_dir, data = tiny_qwen3_dir(tmp_path / "hf", weights=False), tied_model()[1]
    keys = {"dataset_param.basic_parameters.val_dataset": str(data)}
    model = {"train_from_scratch": True}
    files = write_run_files(tmp_path, hf_dir, data, data=keys, model=model, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    settings = {"global_batch_size": ROWS, "micro_batch_size": 2, "train_iters": 2, "log_row_ids": True}
    settings |= {"eval_interval": 1, "eval_iters": 1, "save_hf": True, "no_save_optim": True, "ema_decay": 0.5}
    runs = []
    for world, flags in ((1, {}), (4, {"tensor_model_parallel_size": 2, **SEQUENCE})):
        folder = tmp_path / f"run{world}"
        pools[world].run(run_entry, launch_flags(files, **{**settings, **flags, "save": folder}), timeout=120)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for file in (folder / "rows").iterdir() for line in file.read_text().splitlines()]
        seen = sorted((row["iteration"], number) for row in rows for number in row["rows"])
        exported = {file.parent.name: load_all(file.parent) for file in folder.rglob("model*.safetensors")}
        runs.append((records, seen, exported))
    (records, rows, exported), (found, found_rows, found_exported) = runs
    assert found_rows == rows
    for name, rel in (("loss", 1e-6), ("eval_loss", 1e-6), ("grad_norm", 1e-5), ("consumed_tokens", 0)):
        values = [[r[name] for r in of_run if name in r] for of_run in (found, records)]
        assert len(values[0]) >= 1 and values[0] == pytest.approx(values[1], rel=rel), name
    assert len(exported) == 2 and exported.keys() == found_exported.keys()
    for kind, tensors in exported.items():
        assert tensors.keys() == found_exported[kind].keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(found_exported[kind][key], tensor, rtol=1e-4, atol=1e-5, msg=f"{kind} {key}")


class Block(nn.Module):
    """A block with a residual connection of its own around two linear layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Own(FSDP2Mixin, WeightInitMixin, nn.Module):
    """A model of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def split_own_model(keys: dict[str, Any]) -> float:
    """The largest difference of outputs and of gradients of two micro-batches between a split model and a whole one."""
    dims = Dims(dp=2, tp=2, dp_shard=2)
    world = start_world("gloo", dims)
    torch.manual_seed(0)
    whole, model = Own(), Own()
    model.load_state_dict(whole.state_dict())
    with build_context(BuildContext(dims=dims, world=world, fsdp2=Fsdp2Config.from_dict(keys))):
        model.fully_shard(world.gradients.group)
    worst = 0.0
    for step in range(2):
        batches = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
        expected = whole(batches)
        expected.square().sum().backward()
        output = model(batches[world.gradients.rank])
        output.square().sum().backward()
        worst = max(worst, float((output - expected[world.gradients.rank]).abs().max()))
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(one.grad, DTensor) and other.grad is not None
        worst = max(worst, float((one.grad.full_tensor() - other.grad).abs().max()))
    parts = [tuple(local_tensor(block.up.weight).shape) for block in model.blocks]
    assert parts == [(4, 8)] * 2, parts
    return worst


def test_a_model_of_ones_own(ranks4: RankPool) -> None:
    """fsdp2.yaml names what is split; the outputs of a layer that nothing split follows are whole."""
    keys = {"tp_colwise": ["blocks.{*}.up", "out"], "tp_rowwise": ["blocks.{*}.down"], "sharding_size": "auto"}
    assert max(ranks4.run(split_own_model, {**keys, "sub_modules_to_wrap": ["blocks.{*}"]})) < 1e-5
