"""Images and videos encoded in parts by context-parallel ranks, against plain transformers; fp32."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.families import families
from tests.support.packs import make_samples, pack
from tests.support.split_tokens import PlainModel, Step, step_on_ranks
from tests.support.workers import RankPool


@functools.cache
def directory(name: str) -> Path:
    """The tiny directory of a family."""
    return families()[name].make(Path(tempfile.mkdtemp(prefix=f"{name}-")))


def step_and_patches(*args: Any, **kwargs: Any) -> tuple[Step | None, list[int]]:
    """A step, and the rows that this rank's tower has encoded in each call; runs on every rank of a pool."""
    from mindspeed_mm.parallel.media import TowerSplit

    rows, run = [], TowerSplit._run

    def counted(self: Any, *inputs: Any, **named: Any) -> Any:
        rows.append(len(next(value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor))))
        return run(self, *inputs, **named)

    with mock.patch.object(TowerSplit, "_run", counted):
        return step_on_ranks(*args, **kwargs), rows


# images and videos of uneven sizes; two images, of which four ranks get none or one; none at all
SAMPLES = {"images and videos": (0, 1, 2, 3, 5, 6), "images": (0, 1, 5, 6), "two images": (0, 1, 6), "none": (1, 4)}


@pytest.mark.parametrize(
    ("name", "samples", "flags"),
    [
        ("qwen2_5_vl", "images and videos", {"context_parallel_size": 2}),
        ("qwen3_vl", "two images", {"context_parallel_size": 4}),
        pytest.param("qwen3_vl", "images", {"context_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "none", {"context_parallel_size": 2}, marks=pytest.mark.full),
    ],
)
def test_a_step(name: str, samples: str, flags: dict[str, Any], ranks2: RankPool, ranks4: RankPool) -> None:
    every = make_samples(directory(name))
    documents = [every[number] for number in SAMPLES[samples]]
    rows = [row for row in (documents[:2], documents[2:3], documents[3:]) if row]
    batches = [pack(rows[:2]), *(pack([row]) for row in rows[2:])]
    pool = ranks2 if flags["context_parallel_size"] == 2 else ranks4
    answers = pool.run(step_and_patches, str(directory(name)), batches, flags, timeout=120)
    expected = PlainModel(directory(name), documents).step()
    loss, norm, gradient, where = answers[0][0].differences(expected)
    assert loss <= 1e-6 and norm <= 1e-5 and gradient <= 1e-5, where
    if samples != "none":
        whole = sum(int(batch["image_grid_thw"].prod(-1).sum()) for batch in batches if "image_grid_thw" in batch)
        assert all(sum(rows) < 2 * whole for _, rows in answers)
