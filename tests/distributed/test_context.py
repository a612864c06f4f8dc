"""Context parallelism against plain transformers on each document alone: loss, norm and every gradient, fp32."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import families
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.packs import pack
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.split_tokens import PlainModel, Step, step_on_ranks, text_documents
from tests.support.tiny import tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankPool

LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5, 1e-5
ULYSSES2 = {"context_parallel_size": 2}
ULYSSES4 = {"context_parallel_size": 4}


@functools.cache
def directory(name: str) -> Path:
    """The tiny directory of a family."""
    return families()[name].make(Path(tempfile.mkdtemp(prefix=f"{name}-")))


def check(found: Step, expected: Step) -> None:
    loss, norm, gradient, name = found.differences(expected)
    assert loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE, name
    assert found.evaluated == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)


# documents of one token, one that ends where a shard does, one that spans all shards, a filled-up last row
PACKED = ((1, 7, 27, 5), (20, 19), (1,), (13, 1, 1))
TEXT_CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3 ulysses 2": ("qwen3", 2, ULYSSES2),
    "gpt_oss ulysses 2": ("gpt_oss", 2, ULYSSES2),
}


@pytest.mark.parametrize("name", TEXT_CASES)
def test_packed_rows(name: str, ranks2: RankPool, ranks4: RankPool) -> None:
    family, world, flags = TEXT_CASES[name]
    rows = [text_documents(lengths, seed) for seed, lengths in enumerate(PACKED)]
    pool = ranks2 if world == 2 else ranks4
    batches = [pack(rows[:2]), pack(rows[2:])]
    found = pool.run(step_on_ranks, str(directory(family)), batches, flags, timeout=120)[0]
    check(found, PlainModel(directory(family), [d for row in rows for d in row]).step())


@pytest.mark.parametrize("flags", [ULYSSES2], ids=["ulysses"])
def test_a_run_equals_a_hand_written_loop(flags: dict[str, Any], ranks2: RankPool, tmp_path: Path) -> None:
    """The entry script on two ranks that share every row."""
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)
    losses, norms, _ = train_reference(hf_dir, rows_as_inputs(hf_dir, data), 3)
    files = write_run_files(tmp_path, hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    settings = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 3, "save": tmp_path / "run"}
    ranks2.run(run_entry, launch_flags(files, **settings, no_save_optim=True, **flags), timeout=120)
    found = metrics_of(tmp_path / "run")
    assert found[0] == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert found[1] == pytest.approx(norms, rel=NORM_TOLERANCE)
