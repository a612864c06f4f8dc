"""--eval-generate: a model's answers while it is trained are those of its export, and the training is that without."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.backends.fsdp2 import FSDP2Backend
from mindspeed_mm.backends.protocol import Generation
from mindspeed_mm.checkpoint.best import BestCheckpoint, read_best
from mindspeed_mm.checkpoint.rng import random_state
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.tasks.evaluation.command import main
from mindspeed_mm.tasks.evaluation.scores import edit_distance
from mindspeed_mm.tasks.evaluation.transcripts import words_of as words_of_transcript
from tests.support.answers import AnswerCase
from tests.support.families import families
from tests.support.labelled_pictures import write_labelled_pictures
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_dir
from tests.support.workers import RankError, RankPool

#: whether on the Megatron backend → number of processes → workers
Pools = dict[bool, dict[int, RankPool]]

STEPS, INTERVAL, ROWS = 16, 8, 7
ASKED = {
    "eval_generate": "exact_match",
    "eval_generate_rows": ROWS,
    "eval_max_new_tokens": 6,
    "eval_generate_batch_size": 3,  # three batches, which two processes can't share evenly
    "save_best": "eval_exact_match",
}


@dataclass(frozen=True)
class Case:
    """A model and a layout.

    Attributes:
        ranks: number of processes.
        micro: rows of a micro-batch.
        fsdp2: keys of fsdp2.yaml; None: it is trained on the Megatron backend.
        flags: of the launch.
        model: keys of model.json.
        family: of the model.
        steps: number of optimizer steps, in which answers get right.
        evaluated: words for evaluate_vlm.py; None: it would answer with other weights.
    """

    ranks: int = 2
    micro: int = 4
    fsdp2: dict[str, Any] | None = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen2_5_vl"
    steps: int = STEPS
    evaluated: tuple[str, ...] | None = ()


LORA = {"lora_target_modules": "q_proj,down_proj", "lora_modules_to_save": "lm_head", "lora_dropout": 0.5}
NF4 = {"lora_target_modules": "q_proj,down_proj", "lora_modules_to_save": "lm_head", "lora_quantize": "nf4"}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
TRAINED = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
CHUNKED = {"loss_cfg": {"compute_mode": "chunk", "chunk_size": 3}}
LAYERS = ["model.language_model.layers.{*}"]
IN_CHUNKS = {
    "recompute_modules": LAYERS,
    "use_reentrant": False,
    "activation_offload_modules": LAYERS,
    "chunk_mbs_modules": LAYERS,
    "chunk_mbs_kwargs": ["position_embeddings", "attention_mask"],
    "chunk_mbs_size": 1,
}
CASES = {
    "1 process": Case(1, flags={"recompute_granularity": "full"}),
    "FSDP2, LoRA": Case(2, 2, {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}, LORA),
    "TP2, SP": Case(flags={**TP2, "sequence_parallel": True}),
    "Megatron TP2": Case(fsdp2=None, flags={**TP2, "sequence_parallel": True}, model=TRAINED),
}
MORE_CASES = {
    "FSDP2, bf16": Case(2, 2, flags={"bf16": True}, evaluated=("--dtype", "bf16")),
    "FSDP2, NF4": Case(2, 2, flags=NF4, evaluated=None),
    "FSDP2, on meta, offload": Case(2, 2, {"offload_to_cpu": True}, {"init_model_with_meta_device": True}),
    "FSDP2, ZeRO-2, chunked loss": Case(2, 2, {"reshard_after_forward": False}, model=CHUNKED),
    "FSDP2, rows in chunks": Case(2, 2, IN_CHUNKS),
    "FSDP2, text": Case(2, 2, family="qwen3"),
    "EP2": Case(2, 2, {"expert_parallel_size": 2}, family="qwen3_moe", steps=32),
    "EP2, images": Case(2, 2, {"expert_parallel_size": 2}, family="qwen3_vl_moe"),
    "CP2": Case(flags=CP2),
    "CP2 in a ring × FSDP2": Case(4, 2, flags={**CP2, "context_parallel_algo": "megatron_cp_algo"}),
    "TP2 × FSDP2, chunked loss": Case(4, 2, flags=TP2, model=CHUNKED),
    "TP2 × CP2": Case(4, flags={**TP2, **CP2}),
    "Megatron PP2": Case(fsdp2=None, flags=PP2, model=TRAINED, micro=2),
    "Megatron DP2": Case(2, 2, None, OVERLAP, TRAINED),
    "Megatron TP2 × PP2, LoRA": Case(4, 2, None, {**TP2, **PP2, **LORA}, steps=32),
    "Megatron TP2 × DP2, LoRA": Case(4, 2, None, {**TP2, **OVERLAP, **LORA}),
    "Megatron TP2, bf16": Case(fsdp2=None, flags={**TP2, "bf16": True}, model=TRAINED, evaluated=("--dtype", "bf16")),
    "Megatron VPP2, text": Case(
        2, 2, None, {**PP2, "virtual_pipeline_model_parallel_size": 2, **OVERLAP}, family="deep qwen2", steps=32
    ),
}


@functools.cache
def files_of(family: str) -> tuple[Path, Path]:
    """A model's directory, and the folder of its rows."""
    folder = Path(tempfile.mkdtemp(prefix="eval-generate-"))
    if family == "deep qwen2":
        return tiny_qwen2_dir(folder / "hf", deep=True), write_labelled_pictures(folder / "rows", pictures=False)
    sees = "image" in families()[family].kinds
    return families()[family].make(folder / "hf"), write_labelled_pictures(folder / "rows", pictures=sees)


def words_of(case: Case, folder: Path, **flags: Any) -> list[str]:
    """The words of a launch; its files are in `folder`, and its run folder is there."""
    hf_dir, rows = files_of(case.family)
    held_out = {"dataset_param.basic_parameters.val_dataset": str(rows / "heldout.json")}
    wrap = {"sub_modules_to_wrap": WRAP if "image" in kinds_of(case) else WRAP_TEXT}
    files = write_run_files(
        folder / "files",
        hf_dir,
        rows / "train.json",
        model=case.model,
        data=held_out,
        fsdp2={**wrap, **(case.fsdp2 or {})},
    )
    settings = {"micro_batch_size": case.micro, "global_batch_size": 4, "train_iters": case.steps, "lr": "1e-2"}
    settings |= {"eval_interval": INTERVAL, "eval_iters": 1, "save": folder / "run", "save_hf": True}
    if case.fsdp2 is None:
        settings |= {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    return launch_flags(files, **{**settings, **case.flags, **flags})


def kinds_of(case: Case) -> tuple[str, ...]:
    return () if case.family == "deep qwen2" else tuple(families()[case.family].kinds)


def train(case: Case, pools: Pools, folder: Path, **flags: Any) -> list[dict[str, Any]]:
    """Train, and return the records of its evaluations."""
    pool = pools[case.fsdp2 is None][case.ranks]
    pool.run(run_entry, words_of(case, folder, **flags), "pretrain_vlm.py", timeout=120)
    return [record for record in read_metrics(folder / "run" / "metrics.jsonl") if "eval_loss" in record]


@pytest.fixture
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool, megatron_pools: dict[int, RankPool]) -> Pools:
    return {False: {1: ranks1, 2: ranks2, 4: ranks4}, True: megatron_pools}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_CASES)])
def test_layouts(name: str, pools: Pools, tmp_path: Path) -> None:
    """Losses and norms are bit-equal to a run without; last score and answers are evaluate_vlm.py's on the export."""
    case, run = {**CASES, **MORE_CASES}[name], tmp_path / "with" / "run"
    without = train(case, pools, tmp_path / "without")
    found = train(case, pools, tmp_path / "with", **ASKED)
    assert metrics_of(run) == metrics_of(tmp_path / "without" / "run")
    assert [record["eval_loss"] for record in found] == [record["eval_loss"] for record in without]
    scores = {record["iteration"]: record["eval_exact_match"] for record in found}
    assert {record["eval_rows"] for record in found} == {ROWS}
    best = max(scores, key=lambda iteration: scores[iteration])
    assert scores[best] > 0 and len(set(scores.values())) > 1, scores
    assert read_best(run) == BestCheckpoint(best, "exact_match", scores[best])
    kept = [json.loads(line) for line in (run / "eval_answers.jsonl").read_text().splitlines()]
    last = [line for line in kept if line["iteration"] == case.steps]
    assert len(last) == 3 and all("which digit" in line["prompt"] for line in last)
    if case.evaluated is None:
        return

    rows = files_of(case.family)[1] / "heldout.json"
    words = ["--load", str(run / "hf"), "--data-path", str(rows), "--output", str(tmp_path / "evaluated")]
    main([*words, "--max-new-tokens", "6", "--batch-size", "3", "--limit", str(ROWS), *case.evaluated])
    assert json.loads((tmp_path / "evaluated" / "results.json").read_text())["score"] == scores[case.steps]
    lines = [json.loads(line) for line in (tmp_path / "evaluated" / "scores.jsonl").read_text().splitlines()]
    assert [(line["answer"], line["reference"]) for line in last] == [
        (line["prediction"], line["references"][0]) for line in lines[:3]
    ]


def state_of(backend: FSDP2Backend) -> dict[str, Any]:
    """What a generation could leave behind in a process."""
    model: Any = backend.model
    text = model.model.get_decoder()
    return {
        "modes": [module.training for module in model.modules()],
        "parameters": [type(parameter) for parameter in model.parameters()],
        "random": {name: value.tolist() for name, value in random_state().items()},
        "attention": text.config._attn_implementation,
        "generation_config": id(model.model.generation_config),
        "positions": [id(module.rope_deltas) for module in model.modules() if hasattr(module, "rope_deltas")],
        "gradients": torch.is_grad_enabled(),
    }


def states_around_generations(words: list[str]) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Train, and return this process's state before, in and after each generation."""
    found, enter = [], FSDP2Backend.generation

    @contextmanager
    def watched(self: FSDP2Backend) -> Iterator[Generation]:
        for unit in self._units:
            unit.reshard()  # as it is between two steps
        before = state_of(self)
        with enter(self) as generation:
            yield generation
            inside = state_of(self)
        found.append((before, inside, state_of(self)))

    with mock.patch.object(FSDP2Backend, "generation", watched):
        run_entry(words, "pretrain_vlm.py")
    return found


def test_nothing_is_left_behind(pools: Pools, tmp_path: Path) -> None:
    """All that differs while a model answers is afterwards what it was; context parallelism is off in between."""
    case = Case(flags={**CP2, "train_iters": 2, "eval_interval": 1})
    for states in pools[False][2].run(states_around_generations, words_of(case, tmp_path, **ASKED), timeout=120):
        assert len(states) == 2
        for before, inside, after in states:
            assert after == before and not inside["gradients"]
            assert (before["attention"], inside["attention"]) == ("context_parallel", "sdpa")
            assert all(inside[name] != before[name] for name in ("modes", "parameters", "random", "positions"))


def test_a_resumed_run_has_the_same_figures(pools: Pools, tmp_path: Path) -> None:
    """Stopped between two evaluations; word error rates, whose best value is the least, from a share of the rows."""
    case, asked = CASES["1 process"], {**ASKED, "eval_generate": "wer", "save_best": "wer", "early_stop": 2}
    unbroken = train(case, pools, tmp_path / "unbroken", **asked)
    train(case, pools, tmp_path / "broken", **asked, exit_interval=INTERVAL + 3)
    broken = train(case, pools, tmp_path / "broken", **asked, load=tmp_path / "broken" / "run")
    assert broken == unbroken and len(broken) > 1
    assert read_best(tmp_path / "broken" / "run") == read_best(tmp_path / "unbroken" / "run")
    best = read_best(tmp_path / "broken" / "run")
    assert best is not None and best.value == min(record["eval_wer"] for record in broken)


@pytest.mark.parametrize(
    ("turns", "more", "sentence"),
    [
        (
            ["user", "assistant", "user"],
            {},
            r"--eval-generate exact_match: .*held\.json, row 1: the row ends without an",
        ),
        (["user", "assistant"], {"eval_generate": "multiple_choice"}, r"row 1: the question has no options"),
    ],
)
def test_rows_that_can_not_be_scored_are_refused(
    turns: list[str], more: dict[str, Any], sentence: str, pools: Pools, tmp_path: Path
) -> None:
    words = words_of(CASES["1 process"], tmp_path, **{**ASKED, "save_best": None, **more})
    row = {"messages": [{"role": role, "content": "a red one"} for role in turns]}
    hold_out(tmp_path, [row, row])
    with pytest.raises(RankError, match=sentence):
        pools[False][1].run(run_entry, words, "pretrain_vlm.py")


def hold_out(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Let the run of `words_of` in a folder hold out other rows, of which bad ones are skipped."""
    (folder / "held.json").write_text(json.dumps(rows))
    data = json.loads((folder / "files" / "data.json").read_text())
    data["dataset_param"]["basic_parameters"] |= {"val_dataset": str(folder / "held.json"), "on_bad_sample": "skip"}
    (folder / "files" / "data.json").write_text(json.dumps(data))


def test_a_row_that_is_skipped_counts_as_an_empty_answer(pools: Pools, tmp_path: Path) -> None:
    """Its characters are missing in a score of Chinese transcripts."""
    asked = {**ASKED, "eval_generate": "wer", "eval_generate_language": "zh", "save_best": None}
    words = words_of(CASES["1 process"], tmp_path, **asked, train_iters=1)
    turns = [{"role": "user", "content": "<image>which"}, {"role": "assistant", "content": "12个"}]
    picture = str(files_of("qwen2_5_vl")[1] / "0.png")
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    hold_out(tmp_path, [{"messages": turns, "images": [path]} for path in (picture, str(tmp_path / "torn.png"))])
    pools[False][1].run(run_entry, words, "pretrain_vlm.py")
    kept = [json.loads(line) for line in (tmp_path / "run" / "eval_answers.jsonl").read_text().splitlines()]
    assert [line["answer"] != "" for line in kept] == [True, False]
    found = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    answered = [edit_distance(list("十二个"), words_of_transcript(line["answer"], "zh")) for line in kept]
    assert answered[1] == 3 and (found["eval_rows"], found["eval_wer"]) == (2, sum(answered) / 6 * 100)


def test_a_model_with_an_encoder_of_its_own_is_refused(pools: Pools, tmp_path: Path) -> None:
    case = AnswerCase("whisper", tmp_path / "whisper")
    files = write_run_files(
        tmp_path / "files", case.hf_dir, case.data, data={"dataset_param.basic_parameters.val_dataset": str(case.data)}
    )
    words = launch_flags(
        files, micro_batch_size=1, global_batch_size=1, train_iters=1, eval_interval=1, eval_generate="wer"
    )
    with pytest.raises(
        RankError, match="--eval-generate wer: WhisperForConditionalGeneration has an encoder that runs"
    ):
        pools[False][1].run(run_entry, words, "pretrain_vlm.py")
