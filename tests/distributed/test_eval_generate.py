"""--eval-generate: a model's answers while it is trained are those of its export, and the training is that without."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint.best import BestCheckpoint, read_best
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.tasks.evaluation.command import main
from tests.support.families import families
from tests.support.labelled_pictures import write_labelled_pictures
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.support.workers import RankPool

#: whether on the Megatron backend → number of processes → workers
Pools = dict[bool, dict[int, RankPool]]

full = pytest.mark.full
STEPS, INTERVAL, ROWS = 24, 8, 7
ASKED = {
    "eval_generate": "exact_match",
    "eval_generate_rows": ROWS,
    "eval_max_new_tokens": 6,
    "eval_generate_batch_size": 2,
    "save_best": "eval_exact_match",
}


@dataclass(frozen=True)
class Case:
    """A model and a layout.

    Attributes:
        ranks: number of processes.
        fsdp2: keys of fsdp2.yaml.
        flags: of the launch.
        family: of the model.
        megatron: whether it is trained on the Megatron backend.
    """

    ranks: int = 2
    fsdp2: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen2_5_vl"
    megatron: bool = False


LORA = {"lora_target_modules": "q_proj,down_proj", "lora_modules_to_save": "lm_head", "lora_dropout": 0.1}
MEGATRON_TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES = {
    "1 process, recompute": Case(1, flags={"recompute_granularity": "full"}),
    "FSDP2": Case(fsdp2={"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}, flags=LORA),
    "TP2": Case(flags={"tensor_model_parallel_size": 2}),
    "CP2": Case(flags={"context_parallel_size": 2}),
    "Megatron TP2": Case(flags=MEGATRON_TP2, megatron=True),
}


@functools.cache
def files_of(family: str) -> tuple[Path, Path]:
    """A model's directory, and the folder of its rows."""
    folder = Path(tempfile.mkdtemp(prefix="eval-generate-"))
    sees = "image" in families()[family].kinds
    make = tiny_qwen2_5_vl_dir if family == "qwen2_5_vl" else families()[family].make
    return make(folder / "hf"), write_labelled_pictures(folder / "rows", pictures=sees)


def train(case: Case, pools: Pools, save: Path, **flags: Any) -> list[dict[str, Any]]:
    """Train, and return the records of its evaluations."""
    hf_dir, rows = files_of(case.family)
    held_out = {"dataset_param.basic_parameters.val_dataset": str(rows / "heldout.json")}
    wrap = {"sub_modules_to_wrap": WRAP if case.family == "qwen2_5_vl" else WRAP_TEXT, **case.fsdp2}
    files = write_run_files(
        save.with_name(f"{save.name}-files"), hf_dir, rows / "train.json", data=held_out, fsdp2=wrap
    )
    parallel = {"tensor_model_parallel_size", "context_parallel_size"} & case.flags.keys()
    micro = 4 if parallel else 4 // case.ranks
    settings = {"micro_batch_size": micro, "global_batch_size": 4, "train_iters": STEPS, "lr": "1e-2", "save_hf": True}
    settings |= {"eval_interval": INTERVAL, "eval_iters": 1, "save": save, **case.flags, **flags}
    pool = pools[case.megatron][case.ranks]
    if case.megatron:
        settings |= {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    pool.run(run_entry, launch_flags(files, **settings), "pretrain_vlm.py", timeout=120)
    return [record for record in read_metrics(save / "metrics.jsonl") if "eval_loss" in record]


@pytest.fixture
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool, megatron_pools: dict[int, RankPool]) -> Pools:
    return {False: {1: ranks1, 2: ranks2, 4: ranks4}, True: megatron_pools}


@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str, pools: Pools, tmp_path: Path) -> None:
    """Losses and norms are bit-equal to a run without; last score and answers are evaluate_vlm.py's on the export."""
    case, run = CASES[name], tmp_path / "with"
    without = train(case, pools, tmp_path / "without")
    found = train(case, pools, run, **ASKED)
    assert metrics_of(run) == metrics_of(tmp_path / "without")
    assert [record["eval_loss"] for record in found] == [record["eval_loss"] for record in without]
    scores = {record["iteration"]: record["eval_exact_match"] for record in found}
    assert {record["eval_rows"] for record in found} == {ROWS}
    best = max(scores, key=lambda iteration: scores[iteration])
    assert scores[best] > 0 and len(set(scores.values())) > 1, scores
    assert read_best(run) == BestCheckpoint(best, "exact_match", scores[best])

    rows = files_of(case.family)[1] / "heldout.json"
    words = ["--load", str(run / "hf"), "--data-path", str(rows), "--output", str(tmp_path / "evaluated")]
    main([*words, "--max-new-tokens", "6", "--batch-size", "2", "--limit", str(ROWS)])
    assert json.loads((tmp_path / "evaluated" / "results.json").read_text())["score"] == scores[STEPS]
    lines = [json.loads(line) for line in (tmp_path / "evaluated" / "scores.jsonl").read_text().splitlines()]
    kept = [json.loads(line) for line in (run / "eval_answers.jsonl").read_text().splitlines()]
    last = [line for line in kept if line["iteration"] == STEPS]
    assert [(line["answer"], line["reference"]) for line in last] == [
        (line["prediction"], line["references"][0]) for line in lines[: len(last)]
    ]
    assert len(last) == 3 and all(line["prompt"].endswith("which digit") for line in last)
