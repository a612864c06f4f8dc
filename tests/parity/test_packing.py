"""Packed rows against transformers' models on each sample alone: losses, norms and gradients, on both backends, fp32.

Entry scripts' own callbacks run in the workers; batches are packed by hand.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.data.loading.counting import drop_host_fields
from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, write_run_files
from tests.support.megatron import start
from tests.support.packs import ROWS, make_samples, packed_batches, run_on_batches
from tests.support.reference import train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir

STEPS = 3
LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5, 1e-5
TRAINED = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
FSDP2: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1 process": (1, {}, {}),
    "2 processes, recompute": (2, {"recompute_modules": True}, {}),
    "1 process, chunked loss": (1, {}, {"loss_cfg": {"compute_mode": "chunk", "chunk_size": 4}}),
    "1 process, eager": (1, {}, {"attn_implementation": "eager"}),
}
PTD: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2, any length, recompute": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "variable_seq_lengths": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "DP2, selective recompute": (2, {"recompute_activations": True}),
}


@functools.cache
def model_dir(kind: str) -> Path:
    make = tiny_qwen3_dir if kind == "text" else tiny_qwen2_5_vl_dir
    return make(Path(tempfile.mkdtemp(prefix="packing-")) / "hf", seed=3, tie=False, deep=True)


@functools.cache
def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    return make_samples(model_dir(kind))


@functools.cache
def reference(kind: str) -> tuple[list[float], list[float]]:
    alone = [samples(kind)[number] for row in ROWS for number in row]
    losses, norms, _ = train_reference(model_dir(kind), alone, STEPS)
    return losses, norms


def run(
    kind: str,
    pool: Any,
    folder: Path,
    script: str,
    model: dict[str, Any],
    fsdp2: Any,
    train: Callable[..., Any] = run_on_batches,
    **flags: Any,
) -> list[Any]:
    """Train and compare; returns what `train` does on each rank."""
    files = write_run_files(folder, model_dir(kind), folder / "unused", model=model, fsdp2=fsdp2)
    settings = {"micro_batch_size": 2, "global_batch_size": len(ROWS), "train_iters": STEPS, "mm_data": None}
    settings |= {"save": folder / "run", "no_save_optim": True, "log_row_ids": True, **flags}
    batches = packed_batches(samples(kind))
    returned = pool.run(train, launch_flags(files, **settings), script, batches, timeout=120)
    split = flags.get("tensor_model_parallel_size", 1) * flags.get("pipeline_model_parallel_size", 1)
    check_figures(folder / "run", pool.world_size // split)
    losses, norms = metrics_of(folder / "run")
    expected_losses, expected_norms = reference(kind)
    assert losses == pytest.approx(expected_losses, rel=LOSS_TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=NORM_TOLERANCE)
    return returned


def check_figures(folder: Path, data_parallel: int) -> None:
    """The rows of each data-parallel rank are written down once, and told apart by their cost."""
    files = sorted((folder / "rows").iterdir())
    assert [file.name for file in files] == [f"rank{rank}.jsonl" for rank in range(data_parallel)]
    micro_batches = [[number for row in rows for number in row] for rows in (ROWS[:2], ROWS[2:])]
    for rank, file in enumerate(files):
        rows = [number for batch in micro_batches[rank::data_parallel] for number in batch]
        steps = [{"iteration": step, "rows": rows} for step in range(1, STEPS + 1)]
        assert [json.loads(line) for line in file.read_text().splitlines()] == steps
    for record in read_metrics(folder / "metrics.jsonl"):
        assert (record["imbalance"] > 1) == (data_parallel > 1)
        assert 0 < record["padding_fraction"] < 1 and record["rows_left_out"] == 0


@pytest.mark.parametrize("name", FSDP2)
@pytest.mark.parametrize("kind", ["vl", "text"])
def test_fsdp2_equals_samples_alone(kind: str, name: str, pools: dict[int, Any], tmp_path: Path) -> None:
    ranks, settings, model = FSDP2[name]
    wrap = WRAP_TEXT if kind == "text" else WRAP
    fsdp2 = {"sub_modules_to_wrap": wrap, **({"recompute_modules": wrap, "use_reentrant": False} if settings else {})}
    run(kind, pools[ranks], tmp_path, "pretrain_transformers.py", model, fsdp2)


def train_by_onednn(*args: Any) -> tuple[str, str | None]:
    """Train as if the model's matrices were large; returns how float32 is multiplied then, and why not by oneDNN."""
    from mindspeed_mm.accelerator import host_products

    with mock.patch.object(host_products, "_LARGE", 1):
        run_on_batches(*args)
    return torch.get_float32_matmul_precision(), host_products.why_not_onednn()


def test_products_by_onednn_are_as_exact(pools: dict[int, Any], tmp_path: Path) -> None:
    """The samples alone, in this process, are multiplied by BLAS."""
    how = {"train": train_by_onednn}
    returned = run("vl", pools[1], tmp_path, "pretrain_transformers.py", {}, {"sub_modules_to_wrap": WRAP}, **how)
    assert [precision == "medium" for precision, _ in returned] == [why is None for _, why in returned]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("name", PTD)
@pytest.mark.parametrize("kind", ["vl", "text"])
def test_megatron_equals_samples_alone(kind: str, name: str, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    run_megatron(kind, name, megatron_pools, tmp_path)


@pytest.mark.full
def test_megatrons_products_by_onednn_are_as_exact(megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    returned = run_megatron("vl", "TP2 SP", megatron_pools, tmp_path, train=train_by_onednn)
    assert [precision == "medium" for precision, _ in returned] == [why is None for _, why in returned]


def run_megatron(kind: str, name: str, megatron_pools: dict[int, Any], tmp_path: Path, **how: Any) -> list[Any]:
    ranks, layout = PTD[name]
    model = {"model_id": "qwen3"} if kind == "text" else {"model_id": "qwen2_5_vl", **TRAINED}
    flags = {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 96, **layout}
    loss = {"loss_cfg": {"loss_type": "per_token_loss"}}
    return run(kind, megatron_pools[ranks], tmp_path, "pretrain_vlm.py", {**model, **loss}, None, **flags, **how)


@pytest.mark.parametrize("kind", ["vl", "text"])
@pytest.mark.parametrize("loss_type", ["per_token_loss", "per_sample_loss", "square_loss"])
def test_every_gradient_equals_that_of_samples_alone(kind: str, loss_type: str) -> None:
    from mindspeed_mm.models.transformers_model import TransformersModel

    def gradients(batches: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
        model = TransformersModel({"init_from_hf_path": str(model_dir(kind)), "loss_cfg": {"loss_type": loss_type}})
        for batch in batches:
            drop_host_fields(batch)
        outputs = [model(**model.prepare(batch)) for batch in batches]
        loss = sum(o["loss"] for o in outputs) / sum(o["denominator"] for o in outputs)
        loss.backward()
        return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    loss, found = gradients(packed_batches(samples(kind)))
    expected_loss, expected = gradients([samples(kind)[number] for row in ROWS for number in row])
    assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-7)
        assert difference < GRADIENT_TOLERANCE, name


def rotary_angles() -> tuple[torch.Tensor, torch.Tensor]:
    """What the decoder's layers rotate by, [sequence, batch, 1, head size], and the table by position."""
    start()
    from transformers import Qwen3Config

    from mindspeed_mm.models.common.families import require_megatron_form
    from mindspeed_mm.models.megatron.layers import SampleLengths
    from mindspeed_mm.models.megatron.text_decoder.gpt import build_language_model
    from mindspeed_mm.parallel.sizes import ParallelSizes

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 64}
    config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = build_language_model(config, ParallelSizes(), require_megatron_form("qwen3"), tied=False)
    seen: list[torch.Tensor] = []
    model.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["rotary_pos_emb"]), with_kwargs=True
    )
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    lengths = SampleLengths(lengths=[[3, 2, 1], [6]])
    model(torch.zeros_like(positions), positions, None, packed_seq_params=lengths)
    model(torch.zeros_like(positions), positions, None)
    return seen[0], seen[1]


def test_megatron_rotates_by_positions_that_restart(megatron_pools: dict[int, Any]) -> None:
    """A shift of a whole sample would be seen in rounding only: the angles themselves are compared."""
    ((angles, table),) = megatron_pools[1].run(rotary_angles, timeout=60)
    assert table.shape == (6, 1, 1, 8) and angles.shape == (6, 2, 1, 8)
    assert torch.equal(angles[:, 0], table[[0, 1, 2, 0, 1, 0], 0])
    assert torch.equal(angles[:, 1], table[:, 0])
