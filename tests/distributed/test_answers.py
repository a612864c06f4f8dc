"""Answers into a file: shared by processes, with sharded parameters, continued after a kill, from checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.tasks.inference import answers_file, command
from mindspeed_mm.tasks.inference.generation import AnswerGenerator
from mindspeed_mm.tools.converters.generic import Given, checkpoint_to_hf
from mindspeed_mm.utils.errors import ConfigError
from tests.support.answers import AnswerCase, answer_words, launch, transformers_answers
from tests.support.kept_checkpoints import ARCHIVES
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.workers import RankError, RankPool, run_ranks


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AnswerCase:
    return AnswerCase("qwen2_5_vl", tmp_path_factory.mktemp("answers"))


def answer(words: list[str]) -> tuple[int, int]:
    """Run a launch in this process; the batches it answered, and the parameters that are sharded."""
    from torch.distributed.tensor import DTensor

    batches, sharded, usual = 0, 0, AnswerGenerator.answer

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal batches, sharded
        batches, sharded = batches + 1, sum(isinstance(p, DTensor) for p in self.model.parameters())
        return usual(self, *arguments, **named)

    AnswerGenerator.answer = counted  # type: ignore[method-assign]
    try:
        command.main(words)
    finally:
        AnswerGenerator.answer = usual  # type: ignore[method-assign]
    return batches, sharded


def test_two_processes_answer_as_one(case: AnswerCase, ranks2: RankPool, tmp_path: Path) -> None:
    """Whole models, then sharded parameters: the same bytes, and each process has a part of the batches."""
    rows = {"load": case.hf_dir, "data_path": case.data, "batch_size": 2}
    launch(tmp_path / "one.jsonl", **rows)
    found = ranks2.run(answer, answer_words(tmp_path / "two.jsonl", **rows))
    assert [batches for batches, _ in found] == [3, 2] and found[0][1] == 0
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    found = ranks2.run(answer, answer_words(tmp_path / "sharded.jsonl", "--use-torch-fsdp2", **rows))
    assert found[0][0] == found[1][0] and found[0][1] > 40
    assert (tmp_path / "sharded.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_batch_that_is_too_large_is_halved(
    case: AnswerCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device's memory ends with more than two rows: the same answers; with one row, the launch ends, too."""
    rows = {"load": case.hf_dir, "data_path": case.data}
    expected = launch(tmp_path / "whole.jsonl", **rows)
    usual, room = AnswerGenerator.answer, 2

    def answer_some(self: Any, requests: Any, *arguments: Any) -> Any:
        if len(requests) > room:
            raise torch.OutOfMemoryError("out of memory")
        return usual(self, requests, *arguments)

    monkeypatch.setattr(AnswerGenerator, "answer", answer_some)
    assert launch(tmp_path / "halves.jsonl", **rows) == expected
    assert "answered in two halves" in caplog.text
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        launch(tmp_path / "none.jsonl", **rows)


def kill_after(lines: int, words: list[str]) -> None:
    """Run a launch that is killed while it writes a line."""
    usual, written = answers_file.AnswersFile.write, 0

    def write(self: Any, new: list[Any]) -> None:
        nonlocal written
        if written + len(new) > lines:
            os.write(self._file, json.dumps(new[0]).encode()[:20])
            os.kill(os.getpid(), signal.SIGKILL)
        written += len(new)
        usual(self, new)

    answers_file.AnswersFile.write = write  # type: ignore[method-assign]
    command.main(words)


def test_a_killed_launch_is_continued(case: AnswerCase, tmp_path: Path) -> None:
    """Killed within a line, then continued with another number of processes' parts there: the bytes of an unbroken
    one, drawn tokens too; nothing is answered twice; a third launch answers nothing."""
    flags = {"load": case.hf_dir, "data_path": case.data, "do_sample": True, "temperature": 2, "seed": 5}
    launch(tmp_path / "unbroken.jsonl", **flags)
    words = answer_words(tmp_path / "a.jsonl", **flags)
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(kill_after, 1, 3, words)
    part = tmp_path / "a.jsonl.part0"
    assert part.read_bytes().count(b"\n") == 3 and not part.read_bytes().endswith(b"\n")
    part.rename(tmp_path / "a.jsonl.part1")
    assert answer(words)[0] == 5
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "unbroken.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("a.*")) == ["a.jsonl", "a.jsonl.settings"]
    assert answer(words)[0] == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "unbroken.jsonl").read_bytes()


def test_answers_of_other_settings_are_not_continued(case: AnswerCase, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "what is it"}]}\n')
    output = tmp_path / "a.jsonl"
    flags = {"load": case.hf_dir, "data_path": rows}
    first = launch(output, **flags)
    with pytest.raises(ConfigError, match=r'holds answers with generation \{"max_new_tokens": 8\}, now it is'):
        launch(output, **{**flags, "max_new_tokens": 3})
    rows.write_text('{"messages": [{"role": "user", "content": "how many"}]}\n')
    with pytest.raises(ConfigError, match="holds answers with rows"):
        launch(output, **flags)
    with pytest.raises(ConfigError, match=r"no b\.jsonl\.settings says where its answers come from"):
        (tmp_path / "b.jsonl").write_bytes(output.read_bytes())
        launch(tmp_path / "b.jsonl", **flags)
    with open(tmp_path / "a.jsonl.part0", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process is writing '.*a\.jsonl\.part0'"):
            launch(output, **flags)
    assert launch(output, "--overwrite", **flags) != first


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_checkpoint_answers_as_its_export(backend: str, tmp_path: Path) -> None:
    """From a run folder, from its checkpoint, and from the export: the answers of plain transformers on the export."""
    with tarfile.open(ARCHIVES / f"{backend}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    with contextlib.chdir(tmp_path):
        checkpoint_to_hf(Given("load_dir", "run"), Given("save_dir", "export"), Given("model_assets_dir", "hf"))
        case = AnswerCase.__new__(AnswerCase)
        case.name, case.hf_dir, case.data = backend, tmp_path / "export", tmp_path / "rows.json"
        case.rows = json.loads(case.data.read_text())[:4]
        case.family = AnswerCase.family_of("qwen2_5_vl")
        (tmp_path / "four.json").write_text(json.dumps(case.rows))
        expected = transformers_answers(case)
        assert len(set(expected)) > 1
        state = tmp_path / "run/iter_0000003/state.json"
        saved = json.loads(state.read_text())
        for number, (place, more) in enumerate(
            [("run", {"processor_path": "hf"}), ("run/iter_0000003", {}), ("export", {}), ("run", {})]
        ):
            if not more:  # where the run began is remembered
                state.write_text(json.dumps({**saved, "source": str(tmp_path / "hf")}))
                (state.parent / "manifest.json").unlink(missing_ok=True)
            lines = launch(tmp_path / f"{number}.jsonl", load=place, data_path="four.json", **more)
            assert [line["answer"] for line in lines] == expected, place


def test_a_checkpoint_of_adapters_answers_as_its_export(ranks1: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """A run with LoRA: its folder, whose checkpoint holds adapters only, and the PEFT directory that it exports."""
    case = AnswerCase.over("qwen3", qwen3_dir, tmp_path / "case")
    files = write_run_files(tmp_path / "files", qwen3_dir, case.data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    lora = {"lora_target_modules": "q_proj,down_proj", "lora_r": 2, "lora_alpha": 64, "lr": 1, "save_hf": True}
    settings = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 2, "save": tmp_path / "run", **lora}
    ranks1.run(run_entry, launch_flags(files, **settings), timeout=120)
    assert json.loads((tmp_path / "run/iter_0000002/state.json").read_text())["lora"] is not None
    rows = {"data_path": case.data, "batch_size": 4}
    found = launch(tmp_path / "run.jsonl", load=tmp_path / "run", **rows)
    assert found == launch(tmp_path / "export.jsonl", load=tmp_path / "run/hf", **rows)
    assert found != launch(tmp_path / "base.jsonl", load=qwen3_dir, **rows)
