"""Rows to conversations: columns, roles, placeholders, media paths; every error names the row."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.conversation.records import Conversation, RecordReader
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
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
    """D01: where questions have as many tags as there are pictures, a tag in another turn stays text."""
    row = talk("what is <image>?", "it is <image> or so", system="<image>", images=["a.png"])
    assert [text for _, text in _shown(_read(row))] == ["<image>", "what is [a.png]?", "it is <image> or so"]


def test_tags_of_all_turns_place_media_where_their_number_is_right() -> None:
    """D12: a picture in an answer, or in the system text; each tag takes the next one, kinds apart."""
    row = talk("draw", "this: <image>", system="as <image>", images=["a.png", "b.png"])
    assert [text for _, text in _shown(_read(row))] == ["as [a.png]", "draw", "this: [b.png]"]
    row = talk("<image>?", "<image> <video>", images=["a.png"], videos=["v.mp4"])
    assert [text for _, text in _shown(_read(row, videos="videos"))] == ["[a.png]?", "<image> [v.mp4]"]
    message = _error(talk("<image>", "this: <image>", images=["a.png", "b.png", "c.png"]))
    assert "1 <image> placeholder(s) in user and tool turns (2 in all turns) for 3 image(s)" in message


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
        assert _read(talk("<image>?", "ok", **columns)).media == []
    for value in ("a.png", ["a.png"], [{"path": "a.png", "bytes": None}]):
        assert _read(talk("<image>?", "ok", images=value)).media == [MediaRef("image", "a.png")]
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
    assert _read({"messages": [turn("user", nested), turn("assistant", "ok")]}).media == [MediaRef("image", "/x/y.png")]
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
    with pytest.raises(DataError, match="rows of plain text"):
        RecordReader(DatasetAttr(formatting="alpaca", prompt="a")).check_columns(["a"], "f.json")


def test_system_column() -> None:
    assert _shown(_read({**talk("u", "a"), "sys": "S"}, system="sys"))[0] == ("system", "S")
    assert _shown(_read({**talk("u", "a", system="own"), "sys": "S"}, system="sys"))[0] == ("system", "own")
    assert len(_read({**talk("u", "a"), "sys": None}, system="sys").messages) == 2


def test_kinds_of_media_are_placed_apart() -> None:
    """D01, V10: a row may have images and no videos while its text says <video>; media keep their order."""
    row = talk("<audio> then <image> and <video>", "ok", images=["i.png"], audios=["s.wav"], videos=None)
    conversation = _read(row, videos="videos", audios="audios")
    assert _shown(conversation)[0][1] == "[s.wav] then [i.png] and <video>"
    assert [(ref.kind, ref.path) for ref in conversation.media] == [("audio", "s.wav"), ("image", "i.png")]
    message = _error(talk("<image>", "ok", images=["i.png"], videos=["v.mp4"]), videos="videos")
    assert "0 <video> placeholder(s) in user and tool turns for 1 video(s)" in message
    assert "column 'videos'" in _error(talk("<video>", "ok", videos=[7]), videos="videos")


def test_typed_parts_are_the_way_to_write_a_tag_as_text() -> None:
    """D01: beside typed parts of its kind a tag is text; the other kinds go by their tags."""
    parts = [{"type": "text", "text": "<image> is a tag, <video> "}, {"type": "image"}]
    row = {"messages": [turn("user", parts), turn("assistant", "ok")], "images": ["i.png"], "videos": ["v.mp4"]}
    assert _shown(_read(row, videos="videos"))[0][1] == "<image> is a tag, [v.mp4] [i.png]"
    repeated = [{"type": "image", "image": "i.png"}, {"type": "text", "text": "?"}]
    row = {"messages": [turn("user", repeated), turn("assistant", "ok")], "images": ["i.png"]}
    assert _shown(_read(row))[0][1] == "[i.png]?"
    assert "0 image part(s) without a path for 2 path(s)" in _error({**row, "images": ["i.png", "j.png"]})


def test_tags_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGE_PLACEHOLDER", "[[pic]]")
    assert _shown(_read(talk("<image> [[pic]].", "ok", images=["a"])))[0][1] == "<image> [a]."


def test_ways_to_name_a_medium() -> None:
    png = base64.b64encode(b"png bytes").decode()
    for value, ref in (
        ("file:///x/a%20b.png", MediaRef("image", "/x/a b.png")),
        (f"data:image/png;base64,{png}", MediaRef("image", "<data>", b"png bytes")),
        ({"bytes": b"raw", "path": None}, MediaRef("image", "<bytes>", b"raw")),
        ({"bytes": png}, MediaRef("image", "<bytes>", b"png bytes")),
        ({"image": "x.png"}, MediaRef("image", "x.png")),
        ('["x.png"]', MediaRef("image", "x.png")),
        ("[x].png", MediaRef("image", "[x].png")),
    ):
        assert _read(talk("<image>", "ok", images=value)).media == [ref]
    for value in ({"bytes": None, "path": None}, [{"path": None}], float("nan"), "[]"):
        assert _read(talk("<image>", "ok", images=value)).media == []
    assert "is on the network" in _error(talk("<image>", "ok", images="https://x/y.png"))
    assert "base64" in _error(talk("<image>", "ok", images="data:image/png;base64,%%%"))


def test_openai_parts() -> None:
    """Typed parts of every published name, with the format's own names of roles."""
    sound = base64.b64encode(b"RIFF").decode()
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": "b.png"},
        {"type": "video_url", "video_url": {"url": "file:///v.mp4"}},
        {"type": "video", "video": ["f1.png", "f2.png"], "fps": 4},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "audio", "audio": "s.wav"},
    ]
    row = {"messages": [turn("developer", "s"), turn("user", parts), turn("tool", "r"), turn("assistant", "ok")]}
    conversation = RecordReader(DatasetAttr(formatting="openai")).read(row, "row")
    assert [message.role for message in conversation.messages] == ["system", "user", "tool", "assistant"]
    frames = (MediaRef("image", "f1.png"), MediaRef("image", "f2.png"))
    assert conversation.media == [
        MediaRef("image", "<data>", b"\0\0\0"),
        MediaRef("image", "b.png"),
        MediaRef("video", "/v.mp4"),
        MediaRef("video", frames=frames, fps=4.0),
        MediaRef("audio", "<data>", b"RIFF"),
        MediaRef("audio", "s.wav"),
    ]
    own = RecordReader(DatasetAttr(formatting="openai", assistant_tag="model"))
    given = own.read({"messages": [turn("user", "u"), turn("model", "m")]}, "row")
    assert [message.role for message in given.messages] == ["user", "assistant"]
    assert "of type image, image_url, video" in _error({"messages": [turn("user", [{"type": "picture"}])]})


@pytest.mark.parametrize(
    ("videos", "columns", "fps"),
    [
        ([["f1.png", "f2.png"]], {}, None),
        ([["f1.png", "f2.png"]], {"video_fps": 3}, 3.0),
        ([["f1.png", "f2.png"]], {"fps": [5]}, 5.0),
        ([{"frames": ["f1.png", "f2.png"], "fps": 7}], {"fps": 5}, 7.0),
    ],
)
def test_clips_given_as_pictures(videos: Any, columns: dict[str, Any], fps: float | None) -> None:
    """V08: a nested list is one video, with the row's own frames a second if it has any."""
    frames = (MediaRef("image", "f1.png"), MediaRef("image", "f2.png"))
    row = talk("<video>", "ok", videos=videos, **columns)
    assert _read(row, videos="videos").media == [MediaRef("video", frames=frames, fps=fps)]


def test_video_with_frames_a_second_of_its_own() -> None:
    """V08: a column of frames a second tells of pictures only; an object's own number counts for a file, too."""
    row = talk("<video>", "ok", videos=["v.mp4"], fps=30)
    assert _read(row, videos="videos").media == [MediaRef("video", "v.mp4")]
    row["videos"] = [{"video": "v.mp4", "fps": 1.5}]
    assert _read(row, videos="videos").media == [MediaRef("video", "v.mp4", fps=1.5)]
    assert "above 0" in _error(talk("<video>", "ok", videos=[{"video": "v.mp4", "fps": 0}]), videos="videos")
    assert "without any picture" in _error(talk("<video>", "ok", videos=[[None]]), videos="videos")


def test_csv_cells_hold_lists_as_text() -> None:
    turns = '[{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "[1, 2]"}]'
    assert _shown(_read({"messages": turns, "images": '["a.png"]'})) == [("user", "[a.png]"), ("assistant", "[1, 2]")]
    attr = {"formatting": "alpaca", "prompt": "p", "response": "r", "history": "h"}
    row = {"p": "[a]", "r": '["not turns"]', "h": '[["q", "a"]]'}
    shown = [("user", "q"), ("assistant", "a"), ("user", "[a]"), ("assistant", '["not turns"]')]
    assert _shown(_read(row, **attr)) == shown


def test_default_system() -> None:
    reader = RecordReader(DatasetAttr(**OPENAI, system="sys"), default_system="D")
    assert _shown(reader.read({**talk("u", "a"), "sys": ""}, "row"))[0] == ("system", "D")
    assert _shown(reader.read({**talk("u", "a"), "sys": "S"}, "row"))[0] == ("system", "S")
    assert _shown(reader.read(talk("u", "a", system="own"), "row"))[0] == ("system", "own")
    middle = {"messages": [turn("user", "u"), turn("system", "s"), turn("assistant", "a")]}
    assert [role for role, _ in _shown(reader.read(middle, "row"))] == ["user", "system", "assistant"]


def test_plain_text() -> None:
    row = {"text": "once <image> upon a time", "body": "B"}
    for reader, text in (
        (RecordReader(DatasetAttr(), is_text=True), row["text"]),
        (RecordReader(DatasetAttr(pretrain=True, prompt="body")), "B"),
    ):
        conversation = reader.read(row, "row")
        assert conversation.is_text and conversation.has_target
        assert _shown(conversation) == [("text", text)]
    reader = RecordReader(DatasetAttr(), is_text=True, default_system="D")
    assert not reader.read({"text": " "}, "row").has_target and not reader.read({"text": None}, "row").has_target
    with pytest.raises(BadSample, match="columns found: content"):
        reader.read({"content": "x"}, "row")
    with pytest.raises(DataError, match="'text'"):
        reader.check_columns(["content"], "f.json")


@pytest.mark.parametrize(
    ("attr", "row"),
    [
        ({"formatting": "alpaca", "prompt": "p"}, {"p": "q", "chosen": "good", "rejected": "bad"}),
        (
            {},
            {
                "messages": [turn("user", "q")],
                "chosen": turn("assistant", "good"),
                "rejected": turn("assistant", "bad"),
            },
        ),
        ({}, {"chosen": talk("q", "good")["messages"], "rejected": talk("q", "bad")["messages"]}),
    ],
)
def test_preference_pairs(attr: dict[str, Any], row: dict[str, Any]) -> None:
    attr = {"chosen": "chosen", "rejected": "rejected", **attr}
    conversation = _read(row, ranking=True, **attr)
    assert _shown(conversation) == [("user", "q"), ("assistant", "good")]
    assert [message.parts for message in conversation.rejected or []] == [["bad"]]
    assert "both answers" in _error({**row, "rejected": None}, ranking=True, **attr)


def test_answer_beside_a_list_of_turns() -> None:
    """The preferred answers of a file of pairs can be trained on: their column is named as the answer."""
    row = {"messages": [turn("user", "q")], "chosen": turn("assistant", "good"), "rejected": turn("assistant", "bad")}
    conversation = _read(row, response="chosen")
    assert _shown(conversation) == [("user", "q"), ("assistant", "good")] and conversation.rejected is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk("<image>", "a", images=["1", "2"]), "placeholders and media don't match"),
        ({"messages": [turn("usr", "x")]}, "unknown role"),
        ({"mesages": []}, "a column is missing"),
        ({"messages": [turn("assistant", "x", loss=7)]}, "a turn can't be read"),
        (talk("u", 5), "content can't be read"),
        (talk("<image>", "a", images="http://x"), "a medium is on the network"),
        ({"messages": [turn("function_call", "f(")]}, "a tool call can't be read"),
    ],
)
def test_faults_have_a_reason_to_count_by(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadSample) as raised:
        _read(row)
    assert raised.value.reason == reason


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
    with pytest.raises(DataError, match="none of the 1 rows can be used: 1 × no turn of the assistant"):
        build_mm_dataset(param([talk("only a question")]))


def test_bad_row_is_found_before_the_run(param: Any) -> None:
    """D03, D13: row and file in the message, from the check at the start."""
    with pytest.raises(DataError, match=r"rows\.json, row 3: 2 <image> placeholder\(s\).* 1 image"):
        build_mm_dataset(param([talk("q", "a"), talk("q", "a"), talk("<image><image>", "a", images=["x.png"])]))
    with pytest.raises(DataError, match=r"rows\.json, row 2: image not found: 'sub/x.png'; looked for /.*sub/x.png"):
        build_mm_dataset(param([talk("q", "a"), talk("<image>", "a", images=["sub/x.png"])]))


def test_faulty_rows_are_left_out_and_counted_if_asked(param: Any, said: list[str]) -> None:
    """D03, D13: with on_bad_sample skip the run starts, and one line says how many rows are left out and why."""
    rows = [
        talk("q", "a"), talk("<image><image>", "a", images=["x.png"]), talk("only a question"),
        talk("<image>", "a", images=["nowhere.png"]), talk("<image>", "a", images=["x.png", "y.png"]),
    ]  # fmt: skip
    dataset = build_mm_dataset(param(rows, on_bad_sample="skip"))
    assert dataset.indices.tolist() == [0]
    line = next(line for line in said if "left out 4 of 5 rows" in line)
    assert "2 × placeholders and media don't match (first: " in line and "rows.json, row 2: 2 <image>" in line
    assert "1 × no turn of the assistant to train on (first: " in line and "nowhere.png" in line
    with pytest.raises(DataError, match="none of the 1 rows can be used: 1 × placeholders"):
        build_mm_dataset(param(rows[1:2], on_bad_sample="skip"))


def test_rows_that_are_not_json_follow_the_same_policy(param: Any, tmp_path: Any, said: list[str]) -> None:
    (tmp_path / "broken.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}\n{"messages": 5,}\n'
    )
    with pytest.raises(BadSample, match=r"broken.jsonl, line 2 \(row 2\): not valid JSON"):
        build_mm_dataset(param("broken.jsonl"))
    assert len(build_mm_dataset(param("broken.jsonl", on_bad_sample="skip"))) == 1
    assert any("left out 1 of 2 rows: 1 × a row can't be read" in line for line in said)


def test_preference_pairs_are_refused_for_training(param: Any) -> None:
    rows = [{"p": "q", "good": "g", "bad": "b"}]
    attr = {"formatting": "alpaca", "prompt": "p", "chosen": "good", "rejected": "bad"}
    with pytest.raises(ConfigError, match="set ranking to false"):
        build_mm_dataset(param(rows, attr={**attr, "ranking": True}))
    assert len(build_mm_dataset(param(rows, attr={**attr, "response": "good"}))) == 1


def test_stream(param: Any, tmp_path: Any) -> None:
    """Rows are found on the way: no length, faults of the first rows are found before the run."""
    dataset = build_mm_dataset(param([talk("q", "a"), talk("r", "b")], streaming=True))
    assert dataset.indices is None and dataset.source.lazy
    assert [_shown(dataset.source.read(i))[0][1] for i in (0, 1)] == ["q", "r"]
    with pytest.raises(BadSample, match="row 2"):
        build_mm_dataset(param([talk("q", "a"), talk("<image>", "b", images=["1", "2"])], streaming=True))
    with pytest.raises(ConfigError, match="val_rate"):
        build_mm_dataset(param([talk("q", "a")], streaming=True, val_rate=0.5))


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
    assert [len(part) for part in build_mm_dataset(param(rows, val_size=3))] == [37, 3]
    assert len(build_mm_dataset(param(rows, val_rate=0.5, val_max_samples=3))[1]) == 3
    assert len(build_mm_dataset(param(rows, val_rate=0.5, val_max_samples=0))) == 40
    (tmp_path / "val.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}'
    )
    train, valid = build_mm_dataset(param(rows, val_dataset="val.jsonl"))
    assert (len(train), len(valid)) == (40, 1)
    with pytest.raises(DataError, match="can't be split"):
        build_mm_dataset(param(rows[:1], val_rate=0.5))
    with pytest.raises(DataError, match="val_size 40: 40 rows can't be split"):
        build_mm_dataset(param(rows, val_size=40))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"template": "qwen2_vll"}, ["template", "qwen2_vl"]),
        ({"template": "gpt_os"}, ["did you mean 'gpt_oss'"]),
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
    with pytest.raises(ConfigError, match="does not exist"):
        build_mm_dataset(param([talk("q", "a")], model=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        build_mm_dataset(param([talk("q", "a")], model=tmp_path))
