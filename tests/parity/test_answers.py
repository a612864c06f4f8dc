"""Answers of inference_vlm.py equal those of transformers' own processor, model and `generate`."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.meta_model import build_from_meta, build_meta_model
from mindspeed_mm.models.transformers_model import load_hf_config
from mindspeed_mm.tasks.inference import generation
from mindspeed_mm.tasks.inference.decoding import decode_greedily
from mindspeed_mm.tasks.inference.loading import load_model
from mindspeed_mm.tasks.inference.source import find_model
from mindspeed_mm.utils.errors import DataError
from tests.support.answers import AnswerCase, launch, transformers_answers
from tests.support.families import families

#: images and videos, with times in positions and in the text; tiles; sounds; text alone
ALWAYS = ("qwen2_5_vl", "qwen3_vl", "internvl", "qwen2_5_omni", "qwen3")
OTHERS = sorted(families().keys() - {*ALWAYS, "llama4"})  # transformers 5.24 can't generate with Llama 4's pictures
#: transformers' `generate` takes no row with images and videos of these
ONE_KIND = ("glm4v", "glm4v_moe", "glm46v")


@functools.cache
def case_of(name: str) -> AnswerCase:
    """A family's case, made once."""
    folder = tempfile.mkdtemp(prefix=f"{name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return AnswerCase(name, Path(folder))


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_answers_equal_transformers(name: str, tmp_path: Path) -> None:
    """Greedy answers to rows of all media and of none, token for token, one by one and in padded batches."""
    case = case_of(name)
    if name in ONE_KIND:
        both = next(number for number, row in enumerate(case.rows) if row["images"] and row["videos"])
        with pytest.raises(DataError, match=rf"row {both + 1}: \w+ can't answer: Image features and image tokens"):
            launch(tmp_path / "both.jsonl", load=case.hf_dir, data_path=case.data)
        case = AnswerCase.of(case, [row for row in case.rows if not (row["images"] and row["videos"])])
        case.data = case.data.with_name("one_kind.json")
        case.data.write_text(json.dumps(case.rows))
    expected = transformers_answers(case)
    assert len(set(expected)) > 1 or name not in ALWAYS  # a tiny model may say the same to all
    for batch_size in (1, 4):
        lines = launch(tmp_path / f"{batch_size}.jsonl", load=case.hf_dir, data_path=case.data, batch_size=batch_size)
        assert [line["index"] for line in lines] == list(range(len(case.rows)))
        assert [line["answer"] for line in lines] == expected
        assert [line["reference"] for line in lines] == [row["messages"][-1]["content"] for row in case.rows]


@pytest.mark.parametrize(
    "name", ["gpt_oss", *(pytest.param(n, marks=pytest.mark.full) for n in ("ernie4_5_vl_moe", "deepseek_v3", "llava"))]
)
def test_dtypes_equal_transformers(name: str) -> None:
    """In 16 bits, some norms and routers stay in float32, in the copy that a training on Megatron answers with, too."""
    directory = str(case_of(name).hf_dir)
    config = load_hf_config(directory)
    loaded = load_model(find_model(directory, named_by="--load"), config, dtype=torch.float16)
    copied = build_from_meta(build_meta_model(ModelHub.get(None, config), config), torch.float16)
    expected = getattr(transformers, config.architectures[0]).from_pretrained(directory, dtype=torch.float16)
    dtypes = {path: parameter.dtype for path, parameter in expected.named_parameters()}
    for model in (loaded, copied):
        assert {path: parameter.dtype for path, parameter in model.named_parameters()} == dtypes
    assert torch.float32 in dtypes.values() or name == "llava"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3", pytest.param("qwen3_5", marks=pytest.mark.full)])
def test_answers_leave_a_batch_as_they_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that end at different steps, and a penalty of repeated tokens that padding would change: those of
    `generate` one by one, and the model computes no row that has ended."""
    hf_dir = Path(shutil.copytree(case_of(name).hf_dir, tmp_path / "hf"))
    case = AnswerCase.over(name, hf_dir, tmp_path / "rows")
    config = hf_dir / "generation_config.json"
    settings = {**json.loads(config.read_text()), "repetition_penalty": 1.3}
    config.write_text(json.dumps(settings))
    rows = {"load": hf_dir, "data_path": case.data, "max_new_tokens": 24}
    ids: list[list[int]] = []
    read = generation.AnswerGenerator._read
    with monkeypatch.context() as patch:
        patch.setattr(generation.AnswerGenerator, "_read", lambda self, row, n: ids.append(row) or read(self, row, n))
        launch(tmp_path / "longest.jsonl", **rows)
    ends = max({i for row in ids for i in row}, key=lambda i: len({row.index(i) for row in ids if i in row}))
    config.write_text(json.dumps({**settings, "eos_token_id": ends}))
    expected = launch(tmp_path / "alone.jsonl", **rows, batch_size=1)  # by `generate`
    computed: list[int] = []
    batches: list[int] = []

    def counted(model: Any, input_ids: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        batches.append(len(input_ids))
        handle = model.register_forward_pre_hook(
            lambda _, __, inputs: computed.append(len(inputs["input_ids"])), with_kwargs=True
        )
        try:
            return decode_greedily(model, input_ids, *arguments, **named)
        finally:
            handle.remove()

    monkeypatch.setattr(generation, "decode_greedily", counted)
    lines = launch(tmp_path / "left.jsonl", **rows)
    assert lines == expected
    alone = sum(batches) < len(lines)  # rows of other media are answered one by one
    assert computed and sum(computed) <= sum(line["new_tokens"] for line in lines)
    assert alone or sum(computed) == sum(line["new_tokens"] for line in lines)
    assert len({line["new_tokens"] for line in lines}) > 2, "answers must end at different steps"
