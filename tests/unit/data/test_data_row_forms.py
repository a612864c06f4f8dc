"""Rows in common forms need no `attr`: they become the samples that they are with it."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.configs.data_config import DataConfig, DatasetAttr
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.loading.providers import data_json_provider
from mindspeed_mm.data.sources.files import DataEntry
from mindspeed_mm.data.sources.row_forms import recognise
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.utils.errors import BadSample, DataError
from tests.support.runs import run_of
from tests.unit.data.data_rows import FORMS, turns_of


@pytest.mark.parametrize("form", FORMS)
def test_recognised_rows_are_the_samples_of_an_explicit_attr(form: str, param: Any, images: list[str]) -> None:
    make, attr = FORMS[form]
    explicit = param([make(n) for n in range(10)])
    explicit["attr"] = attr
    plain = copy.deepcopy(explicit)
    del plain["attr"]
    one, two = build_mm_dataset(plain), build_mm_dataset(explicit)
    assert len(one) == len(two) == 10
    for index in range(10):
        mine, theirs = one[index], two[index]
        assert mine.keys() == theirs.keys() and (mine["labels"] != -100).any()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine if isinstance(mine[key], torch.Tensor))


def _entry(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl", **attr: Any) -> DataEntry:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return DataEntry("rows", (str(path),), DatasetAttr(**attr))


@pytest.mark.parametrize(
    ("form", "suffix"),
    # a column of a table holds texts or lists, not both
    [(form, end) for form in FORMS for end in (".jsonl", ".parquet") if (form, end) != ("openai_parts", ".parquet")],
)
def test_the_names_are_those_of_an_explicit_attr(form: str, suffix: str, tmp_path: Path) -> None:
    make, attr = FORMS[form]
    rows = [make(n) for n in range(10)]
    assert recognise(_entry(tmp_path, rows, suffix)).attr == DatasetAttr(**attr)


def test_what_attr_says_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": turns_of(0, "role", "content", "user", "assistant"), "images": ["a"], "pics": ["b"]}]
    named = _entry(tmp_path, rows, images="pics", videos=None)
    with caplog.at_level(logging.INFO):
        found = recognise(named).attr
    assert (found.images, found.messages) == ("pics", "messages")
    untouched = _entry(tmp_path, rows, role_tag="role")
    assert recognise(untouched) is untouched


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"query": "a", "response": "b"}, {"instruction": "a", "output": "b"}],
         ["rows of two forms", "(row 1) has 'query'", "(row 2) has 'instruction'"]),
        ([{"messages": turns_of(0, "role", "content", "user", "assistant")},
          {"messages": turns_of(0, "role", "content", "human", "gpt")}], ["(row 1)", "(row 2)", "human, gpt"]),
        ([{"q": "a", "a": "b"}], ["columns found: a, q", "known forms: 'messages'", "dataset_param.attr"]),
        ([{"Question": "a", "answer": "b", "image": "c.png"}],
         ['probably {"formatting": "alpaca", "prompt": "Question", "response": "answer", "images": "image"}']),
        ([{"log": [{"who": 1}, {"x": 2}]}, {"chat": [{"speaker": "A", "text": "x"}, {"speaker": "B", "text": "y"}]}],
         ['"messages": "chat", "role_tag": "speaker", "content_tag": "text", "user_tag": "A", "assistant_tag": "B"}']),
        ([{"query": "a", "response": "b", "instruction": "c", "output": "d"}],
         ["(row 1)", "say in dataset_param.attr"]),
        ([{"query": "a", "response": "b", "image": "c", "images": ["d"]}], ["'images'", "'image'", "attr.images"]),
    ],
    ids=["two_forms", "two_sets_of_roles", "unknown", "a_question", "a_dialogue", "both_in_a_row", "two_media_columns"],
)  # fmt: skip
def test_what_is_not_clear_is_refused(rows: list[dict[str, Any]], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        recognise(_entry(tmp_path, rows))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("attr", [{}, {"images": None}, {"images": "image"}], ids=["silent", "null", "named"])
def test_a_medium_that_no_first_row_has_is_not_lost(param: Any, images: list[str], attr: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "<image>which"}, {"role": "assistant", "content": "seven"}]
    rows: list[dict[str, Any]] = [{"messages": [{**turns[0], "content": "which"}, turns[1]]}] * 1001
    rows.append({"messages": turns, "image": images[0]})
    described = param(rows)
    described["attr"] = attr
    if attr == {}:
        with pytest.raises(BadSample, match=r"row 1002: column 'image' holds media.*dataset_param.attr"):
            build_mm_dataset(described)[1001]
        return
    dataset = build_mm_dataset(described)
    assert dataset[0] and ("pixel_values" in dataset[1001]) == (attr["images"] == "image")


@pytest.mark.parametrize(
    ("form", "column"),
    [("messages", "system"), ("llava", "tools"), ("query_response", "tools"), ("alpaca", "input")],
)
def test_a_part_that_no_first_row_has_is_not_lost(form: str, column: str, param: Any, images: list[str]) -> None:
    row = {name: value for name, value in FORMS[form][0](0).items() if name != column}
    for value in ("brief", ""):
        described = param([row] * 1001 + [{**row, column: value}])
        del described["attr"]
        if value == "":
            assert build_mm_dataset(described)[1001]
            continue
        with pytest.raises(BadSample, match=rf"row 1002: column '{column}' is filled, and none of the first rows"):
            build_mm_dataset(described)[1001]


def test_data_json_without_dataloader_param_takes_its_defaults(param: Any, images: list[str], vl_dir: Path) -> None:
    described = param([FORMS["messages"][0](n) for n in range(4)])
    del described["attr"]
    run = run_of(data=DataConfig.from_dict({"dataset_param": described}), num_workers=0, use_torch_fsdp2=True)
    loader, valid, _ = data_json_provider(run, DataStart())
    assert len(loader.dataset) == 4 and valid is None
