"""Rows to conversations: columns, roles, placeholders, media paths; every error names the row."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.records import Conversation, ImageRef, RecordReader
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.unit.data.data_rows import talk, turn

OPENAI = {
    "messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user",
    "assistant_tag": "assistant", "images": "images",
}  # fmt: skip


def _read(row: dict[str, Any], **attr: Any) -> Conversation:
    return RecordReader(DatasetAttr(**{**OPENAI, **attr})).read(row, "rows.json, row 7")


def _error(row: dict[str, Any], **attr: Any) -> str:
    with pytest.raises(DataError) as raised:
        _read(row, **attr)
    assert str(raised.value).startswith("rows.json, row 7: ")
    return str(raised.value)


def _shown(conversation: Conversation) -> list[tuple[str, str]]:
    """(role, text with each image's path in brackets) of every turn."""
    return [
        (m.role, "".join(p if isinstance(p, str) else f"[{p.path}]" for p in m.parts)) for m in conversation.messages
    ]


def test_tag_without_media_is_text() -> None:
    """D01: <image>, <video>, <audio> in a row without media are what was written."""
    row = talk("write <image>, <video> or <audio>", "<video src=x> and <image>", images=[])
    assert _shown(_read(row)) == [
        ("user", "write <image>, <video> or <audio>"),
        ("assistant", "<video src=x> and <image>"),
    ]


def test_tag_beside_media_binds_in_questions_only() -> None:
    """D01: with media beside it, a tag in an answer or in the system turn stays text and takes no picture."""
    row = talk("what is <image>?", "it is <image> or so", system="<image>", images=["a.png"])
    assert [text for _, text in _shown(_read(row))] == ["<image>", "what is [a.png]?", "it is <image> or so"]
    assert "0 <image> placeholder(s)" in _error(talk("what?", "this: <image>", images=["a.png"]))


@pytest.mark.parametrize(
    ("text", "paths", "found"), [("<image> and <image>", 1, 2), ("see <image><image>", 3, 2), ("none", 1, 0)]
)
def test_counts_of_tags_and_media_must_agree(text: str, paths: int, found: int) -> None:
    """D03: a mismatch names file, row and both counts."""
    message = _error(talk(text, "ok", images=[f"{i}.png" for i in range(paths)]))
    assert f"{found} <image> placeholder(s)" in message and f"{paths} image(s)" in message


@pytest.mark.parametrize("text", ["<image>start", "mid<image>dle", "end<image>", "<image>", " <image> \n<image>x"])
def test_tag_stays_where_it_was_written(text: str) -> None:
    """D03: at the start, in the middle, at the very end."""
    count = text.count("<image>")
    shown = _shown(_read(talk(text, "ok", images=[f"{i}" for i in range(count)])))
    assert shown[0][1] == text.replace("<image>", "[0]", 1).replace("<image>", "[1]")


def test_images_absent_null_empty_and_one() -> None:
    """D04: absent, null, [] and "" all mean text only; one path may stand without a list."""
    for columns in ({}, {"images": None}, {"images": []}, {"images": ""}, {"images": [""]}, {"images": [None]}):
        assert _read(talk("<image>?", "ok", **columns)).images == []
    for value in ("a.png", ["a.png"], [{"path": "a.png", "bytes": None}]):
        assert _read(talk("<image>?", "ok", images=value)).images == [ImageRef("a.png")]
    assert "column 'images'" in _error(talk("<image>?", "ok", images=[3]))


def test_column_map_is_obeyed_or_the_columns_are_listed() -> None:
    """D06: conversations/from/value against messages/role/content, both ways."""
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    expected = [("user", "hi"), ("assistant", "ho")]
    assert _shown(RecordReader(DatasetAttr()).read(sharegpt, "row")) == expected
    assert _shown(_read(talk("hi", "ho"))) == expected
    message = _error({**sharegpt, "message": 1})
    for word in ("'messages'", "attr.messages", "conversations", "did you mean 'message'"):
        assert word in message
    with pytest.raises(DataError, match="columns found: messages"):
        RecordReader(DatasetAttr()).read(talk("hi", "ho"), "row")
    message = _error({"messages": sharegpt["conversations"]})
    assert "turn 1" in message and "'role'" in message and "'from': 'human'" in message
    assert "unknown role 'human'" in _error({"messages": [turn("human", "x")]})
    assert "no key 'content'" in _error({"messages": [{"role": "user", "contents": "x"}]})


def test_content_as_text_or_as_typed_parts() -> None:
    """D06: plain text in one turn, a list of typed parts in the next; a part without a path takes the column's next."""
    parts = [{"type": "text", "text": "A <image> "}, {"type": "image"}, {"type": "image", "image": "own.png"}]
    row = {"messages": [turn("user", parts), turn("assistant", [{"type": "text", "text": "yes"}])], "images": ["c.png"]}
    assert _shown(_read(row)) == [("user", "A <image> [c.png][own.png]"), ("assistant", "yes")]
    assert "1 image part(s) without a path for 0 path(s)" in _error({**row, "images": []})
    nested = [{"type": "image_url", "image_url": {"url": "file:///x/y.png"}}]
    assert _read({"messages": [turn("user", nested), turn("assistant", "ok")]}).images == [ImageRef("/x/y.png")]
    assert "type 'video'" in _error({"messages": [turn("user", [{"type": "video", "video": "v.mp4"}])]})
    assert "typed parts" in _error({"messages": [turn("user", 5)]})


def test_odd_orders_of_turns_are_accepted() -> None:
    """D10: system in the middle, two tool results, assistant first, user last, empty answer."""
    turns = [
        turn("assistant", ""), turn("system", "s"), turn("user", "u"), turn("observation", "1"), turn("tool", "2"),
        turn("assistant", None), turn("user", "last"),
    ]  # fmt: skip
    conversation = _read({"messages": turns})
    assert [m.role for m in conversation.messages] == [
        "assistant", "system", "user", "tool", "tool", "assistant", "user",
    ]  # fmt: skip
    assert _shown(conversation)[5] == ("assistant", "")
    assert conversation.has_target
    assert not _read({"messages": turns[1:3]}).has_target


def test_loss_flags() -> None:
    """T04: `loss` and `loss_mask` of a turn are read as keys; anything but 0 and 1 is refused."""
    row = {"messages": [turn("user", "u"), turn("assistant", "a", loss_mask=0), turn("assistant", "b", loss=True)]}
    assert [m.train for m in _read(row).messages] == [True, False, True]
    assert not _read({"messages": [turn("user", "u"), turn("assistant", "a", loss=False)]}).has_target
    assert "'loss' is 'no'" in _error({"messages": [turn("assistant", "a", loss="no")]})


def test_tool_calls_and_schemas() -> None:
    """D11: content null beside tool_calls; a function turn holds its call as JSON; schemas as text, list, absent."""
    call = {"name": "look", "arguments": {"x": 1}}
    calls = [{"type": "function", "function": call}]
    row = {"messages": [turn("user", "u"), turn("assistant", None, tool_calls=calls), turn("tool", "r")]}
    message = _read(row).messages[1]
    assert (message.parts, message.extra["tool_calls"]) == ([""], calls)
    written = turn("function_call", '{"name": "look", "arguments": "{\\"x\\": 1}"}')
    message = _read({"messages": [turn("user", "u"), written]}).messages[1]
    assert (message.role, message.extra["tool_calls"]) == ("assistant", calls)
    assert "tool call that isn't valid JSON" in _error({"messages": [turn("function_call", "look()")]})
    schema = {"name": "look", "parameters": None}
    for tools, expected in (('[{"name": "look"}]', [{"name": "look"}]), ([schema], [{"name": "look"}]), ("", None)):
        assert _read({**row, "tools": tools}, tools="tools").tools == expected
    assert _read(row, tools="tools").tools is None
    assert "isn't valid JSON" in _error({**row, "tools": "{"}, tools="tools")


def test_alpaca_rows() -> None:
    attr = {"formatting": "alpaca", "prompt": "instruction", "query": "input", "response": "output"}
    row = {"instruction": "Add.", "input": "1 and <image>", "output": "3", "images": ["a.png"]}
    assert _shown(_read(row, **attr)) == [("user", "Add.\n1 and [a.png]"), ("assistant", "3")]
    assert _shown(_read({**row, "input": "", "images": None}, **attr))[0] == ("user", "Add.")
    full = {**row, "images": [], "past": [["q", "a"]], "sys": "S"}
    shown = _shown(_read(full, **attr, history="past", system="sys"))
    assert shown[:3] == [("system", "S"), ("user", "q"), ("assistant", "a")]
    assert "'output' (dataset_param.attr.response)" in _error({"instruction": "x"}, **attr)
    assert not _read({**row, "output": None}, **attr).has_target
    with pytest.raises(DataError, match="alpaca rows need"):
        RecordReader(DatasetAttr(formatting="alpaca")).check_columns(["a"], "f.json")


def test_system_column() -> None:
    assert _shown(_read({**talk("u", "a"), "sys": "S"}, system="sys"))[0] == ("system", "S")
    assert _shown(_read({**talk("u", "a", system="own"), "sys": "S"}, system="sys"))[0] == ("system", "own")
    assert len(_read({**talk("u", "a"), "sys": None}, system="sys").messages) == 2


def test_videos_and_audio_are_refused_with_the_row() -> None:
    assert "column 'videos'" in _error(talk("u", "a", videos=["v.mp4"]), videos="videos")
    assert _read(talk("u", "a", videos=[]), videos="videos").has_target


# What a run says before it starts.


def test_wrong_column_in_data_json_fails_at_the_start(param: Any) -> None:
    """D06: the message has the key, the columns found and the nearest one."""
    rows = [talk("hi", "ho", images=None)]
    for key, name, words in (
        ("messages", "mesages", ["attr.messages", "images, messages", "did you mean 'messages'"]),
        ("images", "image", ["attr.images", "did you mean 'images'"]),
        ("system", "sys", ["attr.system", "columns found"]),
    ):
        with pytest.raises(DataError) as raised:
            build_mm_dataset(param(rows, attr={key: name}))
        for word in words:
            assert word in str(raised.value)


def test_media_column_may_be_missing_in_a_text_file(param: Any) -> None:
    """D04: the published configuration names an image column that a text-only file doesn't have."""
    assert len(build_mm_dataset(param([talk("hi", "ho")]))) == 1


def test_unmapped_media_column_is_said(param: Any, said: list[str]) -> None:
    build_mm_dataset(param([talk("hi <image>", "ho", images=["a.png"], tools=[])], attr={"images": None}))
    assert any("column 'images' isn't used" in line for line in said)
    assert any("column 'tools' isn't used" in line for line in said)


def test_rows_without_a_target_are_left_out_and_counted(param: Any, said: list[str]) -> None:
    """D10: a row that ends before any answer, or whose answers are all flagged off."""
    off = {"messages": [turn("user", "u"), turn("assistant", "a", loss=0)]}
    dataset = build_mm_dataset(param([talk("q", "a"), talk("only a question"), talk("r", "b"), off]))
    assert len(dataset) == 2
    assert [line for line in said if "left out 2 of 4 rows" in line and "row 2" in line]
    with pytest.raises(DataError, match="every other row"):
        build_mm_dataset(param([talk("only a question")]))


def test_bad_row_is_found_before_the_run(param: Any) -> None:
    """D03, D13: row and file in the message, from the check at the start."""
    with pytest.raises(DataError, match=r"rows\.json, row 3: 2 <image> placeholder\(s\).* 1 image"):
        build_mm_dataset(param([talk("q", "a"), talk("q", "a"), talk("<image><image>", "a", images=["x.png"])]))
    with pytest.raises(DataError, match=r"rows\.json, row 2: image not found: 'sub/x.png'; looked for /.*sub/x.png"):
        build_mm_dataset(param([talk("q", "a"), talk("<image>", "a", images=["sub/x.png"])]))


def test_max_samples_is_an_upper_bound(param: Any) -> None:
    """D15: 100000 with 3 rows; null and -1 mean all; 0 is refused."""
    rows = [talk(str(i), "a") for i in range(3)]
    for limit, count in ((100_000, 3), (2, 2), (-1, 3), (None, 3)):
        assert len(build_mm_dataset(param(rows, max_samples=limit))) == count
    with pytest.raises(ConfigError, match="max_samples"):
        build_mm_dataset(param(rows, max_samples=0))


def test_validation_rows(param: Any, tmp_path: Any) -> None:
    rows = [talk(str(i), "a") for i in range(40)]
    splits = []
    for seed in (1, 1, 2):
        train, valid = build_mm_dataset(param(rows, val_rate=0.1), seed=seed)
        assert (len(train), len(valid)) == (36, 4)
        assert sorted([*train.indices, *valid.indices]) == list(range(40))
        splits.append(valid.indices.tolist())
    assert splits[0] == splits[1] != splits[2]
    assert len(build_mm_dataset(param(rows, val_rate=0.5, val_max_samples=3))[1]) == 3
    assert len(build_mm_dataset(param(rows, val_rate=0.5, val_max_samples=0))) == 40
    (tmp_path / "val.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}'
    )
    train, valid = build_mm_dataset(param(rows, val_dataset="val.jsonl"))
    assert (len(train), len(valid)) == (40, 1)
    with pytest.raises(DataError, match="can't be split"):
        build_mm_dataset(param(rows[:1], val_rate=0.5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"template": "qwen2_vll"}, ["template", "qwen2_vl"]),
        ({"train_on_prompt": True, "mask_history": True}, ["exclude each other"]),
        ({"tool_format": "qwen"}, ["tool_format"]),
        ({"dataset": "row.json"}, ["row.json", "did you mean 'rows.json'"]),
        ({"mask_hystory": True}, ["mask_hystory", "mask_history"]),
    ],
)
def test_bad_configuration_ends_with_a_sentence(param: Any, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ConfigError, DataError)) as raised:
        param_dict = param([talk("q", "a")])
        param_dict["basic_parameters"].update(change)
        build_mm_dataset(param_dict)
    for word in words:
        assert word in str(raised.value)


def test_other_dataset_type_and_missing_model(param: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="huggingface"):
        build_mm_dataset({**param([talk("q", "a")]), "dataset_type": "hugingface"})
    with pytest.raises(ConfigError, match="no folder"):
        build_mm_dataset(param([talk("q", "a")], model=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        build_mm_dataset(param([talk("q", "a")], model=tmp_path))
