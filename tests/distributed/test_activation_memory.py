"""A model of transformers whose layers' activations wait in host memory, and that runs on chunks of a micro-batch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parallel_case import ParallelCase, differences
from tests.support.parallel_models import LAYOUTS, MODELS
from tests.support.workers import RankPool

LAYERS = ["model.layers.{*}"]
KWARGS = ["attention_mask", "position_ids", "position_embeddings"]
CHUNKS = {"chunk_mbs_modules": LAYERS, "chunk_mbs_size": 1, "chunk_mbs_kwargs": KWARGS}
#: without recompute
KEPT = {"layers": {"activation_offload_modules": LAYERS}}
KEEP: dict[str, Any] = {"recompute_modules": LAYERS, "recompute_keep": ["linear", "attention"]}


@pytest.fixture(scope="module")
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool) -> dict[int, RankPool]:
    return {1: ranks1, 2: ranks2, 4: ranks4}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen3_moe", "FSDP2"),
        *(
            pytest.param(model, layout, marks=pytest.mark.full)
            for model in ("qwen3", "qwen3_moe", "gpt_oss")
            for layout in ("1 process", "TP2", "TP2 SP x FSDP2", "EP2 x FSDP2")
            if not ("EP" in layout and "experts" in MODELS[model].refused)
        ),
    ],
)
def test_losses_and_gradients_stay(model: str, layout: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """The load-balancing loss of all rows together too; chunks change what rounding changes, offload alone no bit."""
    case = ParallelCase(model, MODELS[model], Path(tempfile.mkdtemp(prefix="memory-")), pools)
    base: dict[str, Any] = {"recompute_modules": LAYERS, "use_reentrant": False}
    plain = case.run(LAYOUTS[layout], "padded", tmp_path / "plain", fsdp2=base)
    both = {**base, "activation_offload_modules": LAYERS, **CHUNKS}
    found = case.run(LAYOUTS[layout], "padded", tmp_path / "both", fsdp2=both)
    assert differences(found, plain).problems() == []
    assert found.balances == pytest.approx(plain.balances, rel=1e-6) and any(plain.balances) is (model == "qwen3_moe")
    for name, keys in KEPT.items():
        kept = case.run(LAYOUTS[layout], "padded", tmp_path / name, fsdp2=keys)
        assert kept.losses == plain.losses and kept.norms == plain.norms, name
        assert all(torch.equal(tensor, plain.gradients[name]) for name, tensor in kept.gradients.items()), name


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1 process", "FSDP2", "CP2 Ulysses"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_packed_rows(model: str, layout: str, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Documents of a row are attended to one by one, and each result of a kernel is kept."""
    case = ParallelCase(model, MODELS[model], Path(tempfile.mkdtemp(prefix="memory-")), pools)
    plain = case.run(LAYOUTS[layout], "packed", tmp_path / "plain")
    for name, keys in {**KEPT, "kept": KEEP}.items():
        found = case.run(LAYOUTS[layout], "packed", tmp_path / name, fsdp2=keys)
        assert found.losses == plain.losses and found.norms == plain.norms, name
        assert all(torch.equal(tensor, plain.gradients[name]) for name, tensor in found.gradients.items()), name
