"""A trained run is evaluated as examples/quickstart evaluates it: from each of its forms, shared, and continued."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mindspeed_mm.tasks.evaluation.command import main
from mindspeed_mm.tasks.inference.answers_file import AnswersFile
from mindspeed_mm.tasks.inference.generation import AnswerGenerator
from tests.support.labelled_pictures import write_labelled_pictures
from tests.support.launch import ROOT, WRAP, launch_flags, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.support.workers import RankPool

STEPS = 28
FILES = ("predictions.jsonl", "scores.jsonl", "results.json")


class TrainedRun(NamedTuple):
    """A run, and rows of which it has learnt a part by heart."""

    folder: Path
    data: Path
    report: dict[str, Any]


def train(pool: RankPool, folder: Path, *, model: dict[str, Any] | None = None, **layout: Any) -> TrainedRun:
    """Four pictures are learnt with their labels; of the eight rows that are held out, four have them."""
    data, run = write_labelled_pictures(folder / "data"), folder / "run"
    hf_dir = tiny_qwen2_5_vl_dir(folder / "hf")
    held_out = {"dataset_param.basic_parameters.val_dataset": str(data / "contrary.json")}  # its loss falls and rises
    wrap = {"sub_modules_to_wrap": WRAP}
    files = write_run_files(folder, hf_dir, data / "train.json", model=model, data=held_out, fsdp2=wrap)
    flags = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": STEPS, "save": run, "save_hf": True}
    best = {"save_best": "loss", "eval_interval": STEPS // 4, "eval_iters": 1, "save_interval": STEPS}
    words = launch_flags(files, lr="1e-2", **{**flags, **best, **layout})
    pool.run(run_entry, words, "pretrain_vlm.py", timeout=120)
    words, sys.argv = sys.argv, ["evaluate.py", "--run", str(run), "--data", str(data)]
    try:
        runpy.run_path(str(ROOT / "examples" / "quickstart" / "evaluate.py"), run_name="__main__")
    finally:
        sys.argv = words
    return TrainedRun(run, data / "heldout.json", json.loads((run / "report.json").read_text()))


@pytest.fixture(scope="module")
def trained(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return train(ranks2, tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def trained_by_megatron(megatron_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    parts = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
    layout = {"use_torch_fsdp2": None, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
    layout |= {"tensor_model_parallel_size": 2, "micro_batch_size": 4}
    return train(megatron_pools[2], tmp_path_factory.mktemp("digits_megatron"), model=parts, **layout)


def words_of(trained: TrainedRun, load: Path, output: Path, *more: str) -> list[str]:
    """The words of a launch."""
    given = {"load": load, "data-path": trained.data, "output": output, "max-new-tokens": 8, "batch-size": 2}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + list(more)


def bytes_of(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


@pytest.mark.parametrize("which", ["trained", "trained_by_megatron"])
def test_a_run_has_the_score_of_its_report(
    which: str, request: pytest.FixtureRequest, ranks2: RankPool, tmp_path: Path
) -> None:
    """Its export and its checkpoint, on one process and on two, have the score that the quick start's script finds."""
    trained: TrainedRun = request.getfixturevalue(which)
    assert trained.report["heldout_accuracy"] == 0.5
    main(words_of(trained, trained.folder / "hf", tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "results.json").read_text())["score"] == trained.report["heldout_accuracy"]
    main(words_of(trained, trained.folder, tmp_path / "run"))
    ranks2.run(main, words_of(trained, trained.folder, tmp_path / "two"))
    assert bytes_of(tmp_path / "hf") == bytes_of(tmp_path / "run") == bytes_of(tmp_path / "two")


def test_the_best_checkpoint_is_evaluated(trained: TrainedRun, tmp_path: Path) -> None:
    best = json.loads((trained.folder / "best.json").read_text())["iteration"]
    assert best < STEPS
    main(words_of(trained, trained.folder, tmp_path / "best", "--ckpt-step", "best"))
    main(words_of(trained, trained.folder / f"iter_{best:07d}", tmp_path / "same"))
    main(words_of(trained, trained.folder, tmp_path / "last"))
    assert bytes_of(tmp_path / "best") == bytes_of(tmp_path / "same") != bytes_of(tmp_path / "last")


def test_an_interrupted_evaluation_goes_on(
    trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted within a line, which is dropped: only the other rows are answered, and all files are the same."""
    main(words_of(trained, trained.folder, tmp_path / "whole"))
    answered, write, answer = 0, AnswersFile.write, AnswerGenerator.answer

    def stop_in_the_third(self: Any, lines: list[Any]) -> None:
        if answered == 3:
            os.write(self._file, b'{"index": 4, "answ')
            raise KeyboardInterrupt
        write(self, lines)

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal answered
        answered += 1
        return answer(self, *arguments, **named)

    monkeypatch.setattr(AnswerGenerator, "answer", counted)
    with monkeypatch.context() as patch:
        patch.setattr(AnswersFile, "write", stop_in_the_third)
        with pytest.raises(KeyboardInterrupt):
            main(words_of(trained, trained.folder, tmp_path / "parts"))
    assert not (tmp_path / "parts" / "results.json").exists()
    main(words_of(trained, trained.folder, tmp_path / "parts"))
    assert answered == 3 + 2 and bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")
