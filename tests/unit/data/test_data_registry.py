"""Data sets by name: registry, folders, patterns, descriptions in data.json, InternVL-style lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.data_config import DatasetAttr, DatasetParam
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.loading.build import open_rows_of
from mindspeed_mm.data.loading.checking import check_rows
from mindspeed_mm.data.sources.files import DataEntry, RowSource
from mindspeed_mm.data.sources.registry import find_data_sets
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.unit.data.data_rows import talk

ALPACA = [{"instruction": "i", "output": "o"}]
SHAREGPT = [{"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}]
REGISTRY: dict[str, Any] = {
    "plain": {"file_name": "alpaca.json"},
    "chat": {"file_name": "chat.jsonl", "formatting": "sharegpt", "num_samples": 2},
    "openai": {"file_name": "open.jsonl", "formatting": "openai", "columns": {"images": "pictures"}},
    "pretraining": {"file_name": "text.csv", "columns": {"prompt": "body"}, "pretrain": True},
    "custom": {
        "file_name": ["chat.jsonl"], "formatting": "sharegpt", "media_dir": "pics",
        "columns": {"messages": "conversations"}, "tags": {"user_tag": "human", "assistant_tag": "gpt"},
    },
    "hub": {"hf_hub_url": "owner/name"},
    "typo": {"file_name": "alpaca.json", "colums": {}},
    "alpaca.json": {"file_name": "chat.jsonl", "formatting": "sharegpt"},
    "unrelated": {"kto_tag": 1},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dataset_info.json").write_text(json.dumps(REGISTRY))
    (tmp_path / "alpaca.json").write_text(json.dumps(ALPACA))
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(SHAREGPT[0]) for _ in range(5)))
    (tmp_path / "open.jsonl").write_text(json.dumps(talk("<image>", "a", pictures=["x.png"])))
    (tmp_path / "text.csv").write_text("body\nonce upon\n")
    (tmp_path / "pics").mkdir()
    return tmp_path


def _find(folder: Path, *names: Any, **options: Any) -> list[DataEntry]:
    return find_data_sets(names, str(folder), DatasetAttr(messages="mine"), **options)


def _text(param_dict: dict[str, Any]) -> list[list[tuple[str, list[Any]]]]:
    """Roles and parts of all rows that a dataset_param names."""
    param = DatasetParam.from_dict(param_dict)
    basic = param.basic_parameters
    source = open_rows_of(param, find_data_sets(basic.dataset, basic.dataset_dir, param.attr, basic.max_samples))
    return [[(m.role, m.parts) for m in source.read(i).messages] for i in range(len(source))]


def _param(folder: Path, dataset: Any, **basic: Any) -> dict[str, Any]:
    return {
        "dataset_type": "huggingface",
        "basic_parameters": {"dataset_dir": str(folder), "dataset": dataset, **basic},
        "preprocess_parameters": {"model_name_or_path": "hf"},
    }


def test_registered_names(folder: Path) -> None:
    """A comma separated list of names; each has its own columns and roles."""
    assert _text(_param(folder, "plain, chat")) == [
        [("user", ["i"]), ("assistant", ["o"])],
        *[[("user", ["h"]), ("assistant", ["g"])]] * 2,
    ]
    assert check_rows(RowSource(_find(folder, "plain")), skip=False).tolist() == [0]  # rows without 'input'
    parts = [part for _, turn in _text(_param(folder, "openai"))[0] for part in turn]
    assert [getattr(part, "path", part) for part in parts] == ["x.png", "a"]
    assert _text(_param(folder, "pretraining")) == [[("text", ["once upon"])]]
    assert [len(_find(folder, "chat", max_samples=limit)[0].paths) for limit in (1, 9)] == [1, 1]
    assert [_find(folder, "chat", max_samples=limit)[0].max_rows for limit in (1, 9)] == [1, 2]


def test_description_in_data_json(folder: Path) -> None:
    """An object stands for an entry, alone or in a list with names; media have the entry's own root."""
    inline = {"file_name": "alpaca.json", "columns": {"prompt": "instruction", "response": "output"}}
    assert _text(_param(folder, inline)) == [[("user", ["i"]), ("assistant", ["o"])]]
    assert len(_text(_param(folder, [inline, "chat"]))) == 3
    assert _find(folder, "custom")[0].media_dir == str(folder / "pics")
    assert _find(folder, {**inline, "media_dir": "/media"})[0].media_dir == "/media"
    assert _find(folder, inline)[0].media_dir == str(folder)


def test_a_file_wins_over_a_registered_name(folder: Path) -> None:
    entry = _find(folder, "alpaca.json")[0]
    assert entry.paths == (str(folder / "alpaca.json"),) and entry.attr.messages == "mine"
    (folder / "alpaca.json").unlink()
    assert _find(folder, "alpaca.json")[0].paths == (str(folder / "chat.jsonl"),)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chatt", ["chatt", "did you mean 'chat'", "dataset_info.json there has no"]),
        ("chat.json", ["chat.json", "did you mean 'chat.jsonl'"]),
        ("hub", ["'hub' has no 'file_name'", "'hf_hub_url' 'owner/name'", "download it"]),
        ("typo", ["data set 'typo'", "unknown key 'colums'", "'columns'"]),
        ({"file_name": "x.json", "formatting": "alpca"}, ["'formatting' is 'alpca'", "did you mean 'alpaca'"]),
        ({"file_name": "nowhere.json"}, ["data set 'nowhere.json'", "not found"]),
        ({"columns": {}}, ["dataset[0]", "no 'file_name'"]),
        ("pics", ["pics", "a folder without data files", "it is empty"]),
    ],
)
def test_mistakes(folder: Path, name: Any, words: list[str]) -> None:
    with pytest.raises((ConfigError, DataError)) as raised:
        _find(folder, name)
    for word in words:
        assert word in str(raised.value)


def test_keys_without_effect_are_said(folder: Path, said: list[str]) -> None:
    _find(folder, {"file_name": "alpaca.json", "split": "train"})
    assert any("'alpaca.json': no effect here: split" in line for line in said)


def test_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    for name in ("b.jsonl", "a.json", ".hidden.json", "README.md", "dataset_info.json", "state.json"):
        (tmp_path / "d" / name).write_text("{}")
    (tmp_path / "here.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    assert _find(tmp_path, "d")[0].paths == (str(tmp_path / "d/a.json"), str(tmp_path / "d/b.jsonl"))
    assert _find(tmp_path, "d/*.jsonl")[0].paths == (str(tmp_path / "d/b.jsonl"),)
    assert _find(Path("d"), "here.json")[0].paths == ("here.json",)
    assert _find(Path("d"), "a.json")[0].paths == ("d/a.json",)


def test_published_internvl_files(tmp_path: Path, param: Any) -> None:
    """dataset_type multimodal: a list of {data_path, data_folder, repeat_time}, rows with image and conversations."""
    rows = [
        {"id": 0, "image": "p/x.png", "conversations": [turn("human", "What is <image>?"), turn("gpt", "a")]},
        {"id": 1, "image": ["x.png", "y.png"], "conversations": [turn("human", "<image><image>"), turn("gpt", "b")]},
        {"id": 2, "image": "z.png", "conversations": [turn("human", "no tag"), turn("gpt", "c")]},
        {"id": 3, "conversations": [turn("human", "text only, fps"), turn("gpt", "d")], "fps": 5},
        {"id": 4, "video": "v.mp4", "conversations": [turn("human", "<video>\n?"), turn("gpt", "e")]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    for basic in (
        {"data_path": str(path), "data_folder": str(tmp_path / "pictures"), "repeat_time": 1},
        [{"data_path": str(path), "data_folder": str(tmp_path / "pictures")}],
    ):
        dataset_param = {
            "dataset_type": "multimodal",
            "basic_parameters": basic,
            "tokenizer_config": {"from_pretrained": "hf"},
            "template_name": "internvl2_5",
        }
        typed = DatasetParam.from_dict(dataset_param)
        assert typed.preprocess_parameters.model_name_or_path == "hf"
        entry = find_data_sets(typed.basic_parameters.dataset, "data", typed.attr)[0]
        assert entry.media_dir == str(tmp_path / "pictures")
        source = open_rows_of(typed, [entry])
        parts = [[getattr(p, "path", p) for p in source.read(i).messages[0].parts] for i in range(len(rows))]
        assert parts == [
            ["What is ", "p/x.png", "?"], ["x.png", "y.png"], ["z.png", "\nno tag"], ["text only, fps"],
            ["v.mp4", "\n?"],
        ]  # fmt: skip
        assert source.folders(0)[0] == str(tmp_path / "pictures")
    path.write_text(json.dumps(rows[3]))
    model = param([talk("q", "a")])["preprocess_parameters"]
    basic = [{"data_path": str(path), "repeat_time": 3}, {"data_path": str(path)}]
    dataset = build_mm_dataset(
        {"dataset_type": "multimodal", "basic_parameters": basic, "preprocess_parameters": model}
    )
    assert dataset.indices.tolist() == [0, 0, 0, 1]


def turn(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


def test_repository_registry_is_valid() -> None:
    """Every entry of the sample registry can be typed."""
    from mindspeed_mm.configs.registry_config import read_entry

    file = Path(__file__).parents[3] / "configs" / "fsdp2" / "data" / "dataset_info.json"
    registry = json.loads(file.read_text(encoding="utf-8"))
    assert {"alpaca_full", "sharegpt4_zh"} <= registry.keys()
    for name, value in registry.items():
        read_entry(value, name, str(file)).attr()
