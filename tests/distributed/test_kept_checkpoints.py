"""Checkpoints written by earlier code resume: kept run folders go on as the code that wrote them did."""

from __future__ import annotations

import contextlib
import json
import tarfile
from pathlib import Path

import pytest

from tests.support.kept_checkpoints import ARCHIVES, RUNS, STEPS, contents, kernels
from tests.support.launch import run_entry
from tests.support.workers import RankPool


def run_in(folder: str, words: list[str], script: str) -> None:
    """Run an entry script with `folder` as the working directory."""
    with contextlib.chdir(folder):
        run_entry(words, script)


@pytest.mark.parametrize("name", RUNS)
def test_a_kept_checkpoint_goes_on(
    name: str, ranks2: RankPool, megatron_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Steps 4 to 6 have the losses of the run that was never stopped, on the layout that wrote the checkpoint.

    On FSDP2 they are equal to the last digit where torch computes with the same kernels as then: others round sums
    differently, and so do the biases and the loss of the Megatron backend since. Gradient norms are not, as the order
    in which squares are added up may change. The next checkpoint has the same tensors (optimizer state and averages
    too) and the same values in state.json.
    """
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    launch = json.loads((tmp_path / "launch.json").read_text())
    pool = megatron_pools[launch["processes"]] if name == "megatron" else ranks2
    words = [*launch["flags"], "--save", "run", "--load", "run"]
    pool.run(run_in, str(tmp_path), words, launch["script"], timeout=120)

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    assert [record["iteration"] for record in steps] == list(range(1, STEPS + 1))
    losses, norms, rates, tokens = (
        [record[figure] for record in steps] for figure in ("loss", "grad_norm", "learning_rate", "consumed_tokens")
    )
    unbroken, end = launch["unbroken"], launch["end"]
    if kernels() == launch["kernels"] and name != "megatron":
        assert losses == unbroken["loss"]
    assert losses == pytest.approx(unbroken["loss"], rel=1e-6)
    assert norms == pytest.approx(unbroken["grad_norm"], rel=1e-5)
    assert (rates, tokens) == (unbroken["learning_rate"], unbroken["consumed_tokens"])
    found = contents(tmp_path / "run" / f"iter_{STEPS:07d}")
    assert found["norms"] == pytest.approx(end["norms"], rel=1e-5)
    assert {**found["state"], **end["state"]} == found["state"]
