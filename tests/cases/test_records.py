"""Cases of the kind Records and placeholders: rows that other trainers dropped, misread or stopped at, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.log import logger
from tests.support.clips import write_clip

NAMES = {
    "messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user",
    "assistant_tag": "assistant", "images": "images",
}  # fmt: skip


def turn(role: str, content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


def talk(question: Any, answer: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [turn("user", question), turn("assistant", answer)], **columns}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record.getMessage()))
    return lines


@pytest.fixture
def data(tmp_path: Path, qwen2_5_vl_dir: Path) -> Callable[..., dict[str, Any]]:
    """`data(rows, attr=…, **basic)`: a dataset_param; rows are a list, or the name of a file in the folder."""
    (tmp_path / "pics").mkdir()
    for name, colour in (("a.png", "red"), ("b.png", "green"), ("c.png", "blue")):
        Image.new("RGB", (56, 28), colour).save(tmp_path / "pics" / name)

    def make(rows: Any, attr: dict[str, Any] | None = None, **basic: Any) -> dict[str, Any]:
        if isinstance(rows, list):
            (tmp_path / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
            rows = "rows.json"
        return {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset_dir": str(tmp_path), "dataset": rows, **basic},
            "preprocess_parameters": {"model_name_or_path": str(qwen2_5_vl_dir)},
            "attr": {**NAMES, **(attr or {})},
        }

    return make


def shown(dataset: Any, index: int, targets: bool = False) -> str:
    """The text of a sample, or of its targets; a run of pads of one medium is written once."""
    sample = dataset[index]
    ids = sample["labels"][sample["labels"] != -100] if targets else sample["input_ids"]
    text = dataset.encoder.tokenizer.tokenizer.decode(ids)
    for pad in ("<|image_pad|>", "<|video_pad|>"):
        while pad * 2 in text:
            text = text.replace(pad * 2, pad)
    return text


PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize("tag", ["<video>", "<image>", "<audio>", "<|image_pad|>", "<|video_pad|>"])
def test_d01_tags_in_a_row_without_media_are_text(data: Any, tag: str) -> None:
    """D01: a list of HTML tags in an answer, a tag or the model's own pad token typed in by the user."""
    answer = f"<ul><li>{tag}</li></ul>"
    rows = [
        talk(f"What is {tag}?", answer),
        talk(f"What is {tag}?", answer, images=[]),
        talk("<image>", "a", images="pics/a.png"),
    ]
    dataset = build_mm_dataset(data(rows))
    for index in (0, 1):
        assert "pixel_values" not in dataset[index]
        assert shown(dataset, index, targets=True).startswith(answer)
        assert not set(dataset[index]["input_ids"].tolist()) & set(dataset.encoder.tokenizer.media_ids)
    assert dataset[2]["image_grid_thw"].shape == (1, 3)


def test_d01_literal_tags_beside_media(data: Any) -> None:
    """D01: in an answer a tag is text; in a question typed parts make it text; else the row is named."""
    parts = [{"type": "text", "text": "Is <image> "}, {"type": "image"}, {"type": "text", "text": " <video>?"}]
    rows = [
        talk("<image>?", "write <image>", images=["pics/a.png"]),
        talk(parts, "yes", images=["pics/b.png"]),
    ]
    dataset = build_mm_dataset(data(rows))
    assert f"{PICTURE}?" in shown(dataset, 0) and shown(dataset, 0, targets=True).startswith("write <image>")
    assert f"Is <image> {PICTURE} <video>?" in shown(dataset, 1)
    wrong = talk("<image> or the tag <image>?", "a", images=["pics/a.png"])
    with pytest.raises(BadSample, match=r"rows\.json, row 1: 2 <image> placeholder\(s\).*1 image\(s\)"):
        build_mm_dataset(data([wrong]))


def test_d03_counts_and_places_of_tags(data: Any) -> None:
    """D03: two tags and one path, three paths and two tags: file, row and counts; a tag stays where it was written."""
    good = [
        talk(text, "a", images=[f"pics/{name}.png" for name in "abc"[: text.count("<image>")]])
        for text in ("<image>start", "mid<image>dle", "at the end<image>", "<image>both<image>")
    ]
    dataset = build_mm_dataset(data(good))
    for index, row in enumerate(good):
        assert row["messages"][0]["content"].replace("<image>", PICTURE) in shown(dataset, index)
    for text, count, words in (("<image><image>", 1, "2 <image>"), ("<image> and <image>", 3, "2 <image>")):
        bad = talk(text, "a", images=["pics/a.png"] * count)
        with pytest.raises(BadSample) as raised:
            build_mm_dataset(data([*good, bad]))
        assert f"rows.json, row 5: {words} placeholder(s)" in str(raised.value)
        assert f"for {count} image(s)" in str(raised.value)


def test_d04_images_absent_null_empty_and_one(data: Any) -> None:
    """D04: the first four are text only, and a batch of them with the fifth, which has a picture, is whole."""
    rows = [talk("q", "a"), *[talk("q", "a", images=value) for value in (None, [], "")]]
    rows.append(talk("<image>", "a", images=["pics/a.png"]))
    dataset = build_mm_dataset(data(rows))
    assert [("pixel_values" in dataset[index]) for index in range(5)] == [False] * 4 + [True]
    loader = build_mm_dataloader(dataset, {"shuffle": False}, micro_batch_size=5, global_batch_size=5)
    batch = next(iter(loader))
    assert batch["image_grid_thw"].shape == (1, 3) and batch["input_ids"].shape[0] == 5
    pads = (batch["input_ids"] == dataset.encoder.tokenizer.tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum(1)
    assert pads[:4].tolist() == [0] * 4 and pads[4] == batch["image_grid_thw"].prod() // 4


def test_d06_column_map(data: Any) -> None:
    """D06: conversations/from/value against messages/role/content, both ways; text, then typed parts."""
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    with pytest.raises(DataError) as raised:
        build_mm_dataset(data([sharegpt]))
    assert "'messages' (dataset_param.attr.messages)" in str(raised.value) and "conversations" in str(raised.value)
    other = {"messages": "conversations", "role_tag": "from", "content_tag": "value"}
    with pytest.raises(DataError, match=r"'conversations' \(dataset_param.attr.messages\).*columns found: messages"):
        build_mm_dataset(data([talk("hi", "ho")], attr=other))
    other |= {"user_tag": "human", "assistant_tag": "gpt"}
    assert shown(build_mm_dataset(data([sharegpt], attr=other)), 0, targets=True).startswith("ho")
    dataset = build_mm_dataset(data([talk("hi", "ho"), talk([{"type": "text", "text": "hi"}], "ho")]))
    assert dataset[0]["input_ids"].tolist() == dataset[1]["input_ids"].tolist()


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
@pytest.mark.parametrize("shape", ["array", "lines", "pretty", "blank last line"])
def test_d07_shape_is_taken_from_the_content(data: Any, tmp_path: Path, shape: str, suffix: str) -> None:
    """D07: an array saved as .jsonl, lines saved as .json, pretty-printed objects, a blank last line."""
    rows = [talk("one", "1"), talk("two", "2")]
    text = {
        "array": json.dumps(rows),
        "lines": "\n".join(map(json.dumps, rows)),
        "pretty": "\n".join(json.dumps(row, indent=2) for row in rows),
        "blank last line": "\n".join(map(json.dumps, rows)) + "\n\n",
    }[shape]
    (tmp_path / f"shape.{suffix}").write_text(text)
    dataset = build_mm_dataset(data(f"shape.{suffix}"))
    assert [shown(dataset, index, targets=True)[0] for index in range(len(dataset))] == ["1", "2"]


def test_d08_byte_order_mark_crlf_and_locale(data: Any, tmp_path: Path) -> None:
    """D08: UTF-8 with BOM and CRLF, Chinese text, LC_ALL=C, of rows and of data.json."""
    row = json.dumps(talk("图片是什么？", "狗"), ensure_ascii=False)
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n{row}\r\n".encode())
    param = data("rows.jsonl")
    text = json.dumps({"dataset_param": param}, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    (tmp_path / "data.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    code = (
        "from mindspeed_mm.configs.files import read_json\n"
        "from mindspeed_mm.data.loading.build import open_rows_of\n"
        "from mindspeed_mm.data.sources.registry import find_data_sets\n"
        "from mindspeed_mm.configs.data_config import DataConfig\n"
        f"param = DataConfig.from_dict(read_json({str(tmp_path / 'data.json')!r})).dataset_param\n"
        "basic = param.basic_parameters\n"
        "source = open_rows_of(param, find_data_sets(basic.dataset, basic.dataset_dir, param.attr))\n"
        "print(len(source), ascii(source.read(1).messages[1].parts))"
    )
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == f"2 {['狗']!a}", done.stderr


def test_d10_odd_orders_of_turns(data: Any, said: list[str]) -> None:
    """D10: system in the middle, two tool results, assistant first, user last, empty answer: used, or counted."""
    rows = [
        {"messages": [turn("user", "u"), turn("system", "s"), turn("assistant", "A")]},
        {"messages": [turn("user", "u"), turn("tool", "1"), turn("tool", "2"), turn("assistant", "B")]},
        {"messages": [turn("assistant", "first"), turn("user", "u"), turn("assistant", "C")]},
        {"messages": [turn("user", "u"), turn("assistant", "D"), turn("user", "last question")]},
        {"messages": [turn("user", "u"), turn("assistant", ""), turn("user", "v"), turn("assistant", "E")]},
        {"messages": [turn("user", "no answer")]},
    ]
    dataset = build_mm_dataset(data(rows))
    assert dataset.indices.tolist() == [0, 1, 2, 3, 4]
    assert any("left out 1 of 6 rows: 1 × no turn of the assistant" in line for line in said)
    for index, answer in enumerate("ABCDE"):
        assert answer in shown(dataset, index, targets=True)
    assert "question" in shown(dataset, 3) or shown(dataset, 3).count("assistant") == 1
    assert "question" not in shown(dataset, 3, targets=True)
    assert "first" in shown(dataset, 2, targets=True)


def test_d11_tool_calls_and_schemas(data: Any) -> None:
    """D11: content null beside tool_calls, an image in a tool's answer, tools as text, as a list and absent."""
    call = {"function": {"name": "look", "arguments": '{"x": 1}'}}
    messages = [
        turn("user", "Look."), turn("assistant", None, tool_calls=[call]), turn("tool", "seen: <image>"),
        turn("assistant", "done"),
    ]  # fmt: skip
    schema = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    rows = [
        {"messages": messages, "images": ["pics/a.png"], "tools": tools} for tools in (json.dumps(schema), schema, None)
    ]
    del rows[2]["tools"]
    dataset = build_mm_dataset(data(rows, attr={"tools": "tools"}, template="qwen3_vl"))
    for index in range(3):
        text, targets = shown(dataset, index), shown(dataset, index, targets=True)
        assert "None" not in text and f"seen: {PICTURE}" in text
        assert '"name": "look"' in targets and "done" in targets and "seen" not in targets
        assert text.count('"parameters"') == (0 if index == 2 else 1)
    assert dataset[0]["input_ids"].tolist() == dataset[1]["input_ids"].tolist()


def test_d13_media_roots(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """D13: relative paths are found from any working folder; a missing one names row and full path, or is counted."""
    rows = [talk("<image>", "a", images=["pics/a.png"]), talk("<image>", "b", images=["pics/nowhere.png"])]
    monkeypatch.chdir("/")
    assert build_mm_dataset(data(rows[:1]))[0]["image_grid_thw"].shape == (1, 3)
    entry = {"file_name": "rows.json", "formatting": "openai", "columns": {"images": "images"}, "media_dir": "pics"}
    data([talk("<image>", "a", images=["a.png"])])
    assert build_mm_dataset(data(entry))[0]["image_grid_thw"].shape == (1, 3)
    with pytest.raises(BadSample) as raised:
        build_mm_dataset(data(rows))
    assert "rows.json, row 2" in str(raised.value) and str(tmp_path / "pics" / "nowhere.png") in str(raised.value)
    assert len(build_mm_dataset(data(rows, on_bad_sample="skip"))) == 1
    assert any("left out 1 of 2 rows: 1 × " in line and "nowhere.png" in line for line in said)


def test_d13_videos_and_sounds(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D13: the same rule for every kind of medium."""
    (tmp_path / "clips").mkdir()
    for name in ("v.mp4", "s.wav"):
        (tmp_path / "clips" / name).write_bytes(b"x")
    attr = {"videos": "videos", "audios": "audios"}
    monkeypatch.chdir("/")
    rows = [talk("<video><audio>", "a", videos=["clips/v.mp4"], audios=["clips/s.wav"])]
    assert len(build_mm_dataset(data(rows, attr=attr))) == 1
    for kind in ("videos", "audios"):
        rows[0] = talk(f"<{kind[:-1]}>", "a", **{kind: ["clips/none"]})
        with pytest.raises(BadSample, match=rf"row 1.*{tmp_path}/clips/none"):
            build_mm_dataset(data(rows, attr=attr))


def test_d15_max_samples(data: Any) -> None:
    """D15: 100000 with a 3-row file is an upper bound; -1 and null mean all, 0 is refused."""
    rows = [talk(str(number), "a") for number in range(3)]
    for limit, count in ((100_000, 3), (2, 2), (-1, 3), (None, 3)):
        dataset = build_mm_dataset(data(rows, max_samples=limit))
        assert len(dataset) == count and torch.is_tensor(dataset[count - 1]["input_ids"])
    with pytest.raises(ConfigError, match="max_samples' is 0"):
        build_mm_dataset(data(rows, max_samples=0))


def test_v08_clip_given_as_pictures(data: Any) -> None:
    """V08: a nested list is one video of three pictures, with data.json's frames a second or its own."""
    pictures = [f"pics/{name}.png" for name in "abc"]
    rows = [
        talk("<video>", "a", videos=[pictures]),
        talk("<video>", "a", videos=[pictures], fps=4),
        talk("<video><video>", "a", videos=[pictures, {"frames": pictures[:2], "fps": 1}]),
    ]
    dataset = build_mm_dataset(data(rows, attr={"videos": "videos"}))
    media = [dataset.source.read(index).media for index in range(3)]
    assert [[ref.kind for ref in refs] for refs in media] == [["video"], ["video"], ["video", "video"]]
    assert [[(len(ref.frames), ref.fps) for ref in refs] for refs in media] == [
        [(3, None)], [(3, 4.0)], [(3, None), (2, 1.0)],
    ]  # fmt: skip
    rows[0]["videos"] = [["pics/a.png", "pics/lost.png"]]
    with pytest.raises(BadSample, match=r"row 1.*lost\.png"):
        build_mm_dataset(data(rows, attr={"videos": "videos"}))


def test_v08_video_with_frames_a_second_of_its_own(data: Any, tmp_path: Path) -> None:
    """V08: the row's own number of frames a second comes before data.json's, for a video file, too."""
    write_clip(tmp_path / "v.mp4", frames=48, rate=24)
    videos = ["v.mp4", {"video": "v.mp4", "fps": 6}, {"video": "v.mp4", "fps": 3}]
    dataset = build_mm_dataset(
        data([talk("<video>", "a", videos=[video]) for video in videos], attr={"videos": "videos"})
    )
    frames = [int(dataset[index]["video_grid_thw"][0, 0]) for index in range(3)]
    assert frames == [2, 6, 3]  # of two seconds; one position covers two frames


def test_v10_sources_with_different_media(data: Any, tmp_path: Path) -> None:
    """V10: one file has images only, the other videos only; a column that a file lacks is no medium."""
    (tmp_path / "images.jsonl").write_text(json.dumps(talk("<image>", "a", images=["pics/a.png"])))
    clip = [[f"pics/{name}.png" for name in "abc"]]
    (tmp_path / "videos.jsonl").write_text(json.dumps(talk("<video>", "b", videos=clip)))
    dataset = build_mm_dataset(data("images.jsonl, videos.jsonl", attr={"videos": "videos"}))
    assert [[ref.kind for ref in dataset.source.read(i).media] for i in range(2)] == [["image"], ["video"]]
    for index, key in enumerate(("pixel_values", "pixel_values_videos")):
        assert [name for name in dataset[index] if name.startswith("pixel")] == [key]
