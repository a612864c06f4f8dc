"""Samples: ids equal to the processor's, media beside them, literals that stay text, cuts at whole turns."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.conversation.tokens import Tokenizer
from mindspeed_mm.data.media.media import Foreseen
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from tests.unit.data.data_rows import talk, targets, turn


def _expected(row: dict[str, Any], folder: Path, processor: Any) -> dict[str, torch.Tensor]:
    """What transformers' processor makes of the row."""
    messages = []
    for message in row["messages"]:
        pieces = message["content"].split("<image>")
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
        messages.append({**message, "content": parts})
    text = processor.apply_chat_template(messages)
    pictures = [Image.open(folder / name).convert("RGB") for name in row["images"]]
    return processor(text=[text], images=pictures or None, return_tensors="pt")


def test_samples_equal_the_processor(param: Any, images: list[str], tmp_path: Path, processor: Any) -> None:
    """0, 1, 2 and 3 images, several turns, a system text: every tensor equal, the first row and later ones."""
    a, b, c = images
    rows = [
        talk("one <image>", "ok", images=[a]),
        talk("no image", "ok", "and then", "nothing", system="brief", images=[]),
        talk("<image> or <image>", "ok", "and<image>", "图片里有什么", images=[c, a, b]),
        talk("two<image><image>", "ok", images=[b, b]),
    ]
    dataset = build_mm_dataset(param(rows))
    for row, sample in zip(rows, (dataset[i] for i in range(4)), strict=True):
        expected = _expected(row, tmp_path, processor)
        for key in ("input_ids", "mm_token_type_ids"):
            assert sample[key].dtype == torch.int64
            assert torch.equal(sample[key], expected[key][0]), key
        assert ("pixel_values" in sample) == bool(row["images"])
        for key in ("pixel_values", "image_grid_thw"):
            assert torch.equal(sample[key], expected[key]) if row["images"] else key not in sample
    assert dataset.encoder.tokenizer._trusted == {"image": True}  # what was foreseen agreed with the processor


def test_a_processor_that_keeps_its_text_to_itself_is_refused(
    param: Any, images: list[str], processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes for a medium can't be known then; the run ends, whatever is done with bad rows."""
    whole = type(processor).__call__

    def call(self: Any, *args: Any, return_text_replacement_offsets: bool, **options: Any) -> Any:
        return whole(self, *args, **options)

    dataset = build_mm_dataset(param([talk("one <image>", "ok", images=images[:1])], on_bad_sample="skip"))
    monkeypatch.setattr(type(processor), "__call__", call)
    with pytest.raises(ConfigError, match=r"Processor of transformers \S+ doesn't say what it writes for images"):
        dataset[0]


def test_a_processor_of_another_kind_is_called_whole(
    param: Any, images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where geometry doesn't tell what the processor makes, media are decoded to measure; the sample is the same."""
    rows = [talk("one <image> two <image>", "ok", "and", "so", images=images[:2])]
    usual = build_mm_dataset(param(rows))
    monkeypatch.setattr(DefaultAdapter, "foresee", lambda *_: Foreseen("<|image_pad|>", 4, 16))
    dataset = build_mm_dataset(param(rows))
    other, expected = dataset[0], usual[0]
    assert dataset.encoder.tokenizer._trusted == {"image": False}
    assert expected.keys() == other.keys() and all(torch.equal(expected[key], other[key]) for key in expected)
    (size,), (foreseen,) = dataset.measure(0), usual.measure(0)
    assert (size.tokens, size.patches) == (foreseen.tokens, foreseen.patches)
    assert (size.tokens, size.patches) == (len(other["input_ids"]), len(other["pixel_values"]))


def test_a_processor_that_makes_other_ids_is_refused(param: Any, images: list[str], monkeypatch: Any) -> None:
    """Where the processor's ids are not those of its expanded text, exact labels are not possible."""
    monkeypatch.setattr(Tokenizer, "_types", lambda _self, ids: ids)
    dataset = build_mm_dataset(param([talk("<image>", "ok", images=images[:1])]))
    with pytest.raises(ConfigError, match="makes other token ids"):
        dataset[0]


def test_model_tokens_typed_by_a_person_stay_text(param: Any, images: list[str], processor: Any) -> None:
    """D01: the model's own image token in a text is spelt out, alone and beside a picture that keeps its place."""
    rows = [
        talk("what is <|image_pad|> or <|video_pad|>?", "<image> is <|image_pad|>.", images=[]),
        talk("<|image_pad|> before <image> after", "I see <|image_pad|>", images=images[1:2]),
    ]
    dataset = build_mm_dataset(param(rows))
    media = {processor.image_token_id, processor.video_token_id}
    text, picture = dataset[0], dataset[1]
    decode = processor.tokenizer.decode
    assert not media & set(text["input_ids"].tolist())
    assert "what is <|image_pad|> or <|video_pad|>?" in decode(text["input_ids"])
    assert targets(text, processor.tokenizer) == "<image> is <|image_pad|>.<|im_end|>"
    assert int(picture["mm_token_type_ids"].sum()) == int(picture["image_grid_thw"].prod()) // 4
    at = (picture["mm_token_type_ids"] == 1).nonzero().flatten()
    assert decode(picture["input_ids"][: at[0]]).endswith("<|image_pad|> before <|vision_start|>")
    assert decode(picture["input_ids"][at[-1] + 1 :]).startswith("<|vision_end|> after")
    assert targets(picture, processor.tokenizer) == "I see <|image_pad|><|im_end|>"


def test_split_special_tokens_spells_out_every_typed_token(param: Any, processor: Any) -> None:
    rows = [talk("end with <|im_end|>", "ok")]
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    counts = [
        build_mm_dataset(param(rows, preprocess={"split_special_tokens": split}))[0]["input_ids"].tolist().count(end)
        for split in (False, True)
    ]
    assert counts == [4, 3]  # system, user, assistant; and the typed one unless it is split


def test_length_limit_is_inclusive(param: Any) -> None:
    """T06: a row of exactly the limit is kept whole; one token more and its last turn goes."""
    row = talk("q", "one", "r", "two")
    length = len(build_mm_dataset(param([row]))[0]["input_ids"])
    whole = build_mm_dataset(param([row]), max_length=length)[0]
    shorter = build_mm_dataset(param([row]), max_length=length - 1)[0]
    assert len(whole["input_ids"]) == length and "note" not in whole
    assert torch.equal(shorter["input_ids"], build_mm_dataset(param([talk("q", "one")]))[0]["input_ids"])
    assert f"{length} tokens, cut after" in shorter["note"]
    assert len(build_mm_dataset(param([row], cutoff_len=length - 1))[0]["input_ids"]) < length


@pytest.mark.parametrize("inside", [1, 3, 5, 8, 12])
def test_a_limit_inside_an_image_takes_the_whole_turn(
    param: Any, images: list[str], processor: Any, inside: int
) -> None:
    """T01: a limit within the second image's tokens leaves the first turn with its image, and every side tensor cut."""
    row = talk("see <image>", "one", "see <image> too", "two", images=[images[0], images[2]])
    first = build_mm_dataset(param([talk("see <image>", "one", images=images[:1])]))[0]
    whole = build_mm_dataset(param([row]))[0]
    run = (whole["mm_token_type_ids"] == 1).nonzero().flatten()[4:]
    cut = build_mm_dataset(param([row]), max_length=int(run[0]) + inside)[0]
    note = cut.pop("note")
    assert cut.keys() == first.keys() and all(torch.equal(cut[key], first[key]) for key in first)
    assert "row 1" in note
    assert (
        int(cut["mm_token_type_ids"].sum()) == int(cut["image_grid_thw"].prod()) // 4 == len(cut["pixel_values"]) // 4
    )


def test_row_whose_first_answer_doesnt_fit_trains_nothing(param: Any, images: list[str]) -> None:
    """T01: the row keeps its place in the order; its length is in the note."""
    sample = build_mm_dataset(param([talk("see <image>", "one " * 50, images=images[:1])]), max_length=40)[0]
    assert set(sample["labels"].tolist()) == {-100} and "pixel_values" not in sample
    assert "not even the first answer fits into 40" in sample["note"]
    trailing = talk("q", "a", "a long question without an answer " * 9)
    assert "cut after" in build_mm_dataset(param([trailing]), max_length=60)[0]["note"]


def test_filler(param: Any) -> None:
    filler = build_mm_dataset(param([talk("q", "a")]))[-1]
    assert filler["labels"].tolist() == [-100, -100] and len(filler["input_ids"]) == 2
    assert int(filler["num_rows"]) == 0 and filler["mm_token_type_ids"].tolist() == [0, 0]


def test_text_model_has_no_processor(param: Any, text_dir: Path, images: list[str], tokenizer: Any) -> None:
    """A tokenizer alone is enough for text; a row with an image says what is missing."""
    rows = [talk("q", "a"), talk("<image>", "a", images=images[:1])]
    dataset = build_mm_dataset(param(rows, model=text_dir))
    assert sorted(dataset[0]) == ["input_ids", "labels"]
    assert dataset.pad_token_id == tokenizer.pad_token_id
    with pytest.raises(DataError, match=r"row 2: the row has 1 image\(s\), but .* takes text only"):
        dataset[1]


def test_data_set_loads_nothing_before_the_first_sample_and_is_picklable(param: Any) -> None:
    dataset = build_mm_dataset(param([talk("q", "a"), talk("r", "b")]))
    assert dataset.lazy_encoder._built is None
    before = dataset[1]
    again = pickle.loads(pickle.dumps(dataset))
    assert again.lazy_encoder._built is None
    assert torch.equal(again[1]["input_ids"], before["input_ids"])


def test_damaged_image_names_the_row(param: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"<html>")
    dataset = build_mm_dataset(param([talk("<image>", "a", images=["bad.png"])]))
    with pytest.raises(DataError, match=r"rows\.json, row 1: .*bad\.png is not an image"):
        dataset[0]


def test_what_the_processor_refuses_names_the_row(param: Any, tmp_path: Path) -> None:
    """I01: a picture beyond the processor's aspect ratio."""
    Image.new("RGB", (3000, 2)).save(tmp_path / "thin.png")
    dataset = build_mm_dataset(param([talk("<image>", "a", images=["thin.png"])]))
    with pytest.raises(DataError, match=r"rows\.json, row 1: .*thin.png is 3000×2 pixels"):
        dataset[0]


def test_pixel_limits_are_applied_before_the_processor(param: Any, tmp_path: Path) -> None:
    Image.new("RGB", (224, 112)).save(tmp_path / "wide.png")
    rows = [talk("<image>", "a", images=["wide.png"])]
    grids = [
        build_mm_dataset(param(rows, preprocess=limits))[0]["image_grid_thw"].tolist()
        for limits in ({}, {"image_max_pixels": 112 * 56, "image_min_pixels": 0})
    ]
    assert grids == [[[1, 8, 16]], [[1, 4, 8]]]


def test_parquet_with_images_as_bytes(param: Any, tmp_path: Path, images: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = (tmp_path / images[0]).read_bytes()
    rows = [talk("<image>", "a", images=[{"path": None, "bytes": content}]), talk("q", "a", images=None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    by_path = build_mm_dataset(param([talk("<image>", "a", images=images[:1])]))[0]
    dataset = build_mm_dataset(param("rows.parquet"))
    sample = dataset[0]
    assert sample.keys() == by_path.keys() and all(torch.equal(sample[key], by_path[key]) for key in by_path)
    assert "pixel_values" not in dataset[1]


def test_tool_schemas_reach_the_template_once(param: Any, text_dir: Path, tokenizer: Any) -> None:
    """D11: as JSON text in one row, as a list in another, absent in a third; null content never becomes a word."""
    call = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    turns = [turn("user", "q"), turn("assistant", None, tool_calls=call), turn("tool", "r"), turn("assistant", "so")]
    rows = [{"messages": turns, "tools": tools} for tools in ('[{"name": "look"}]', [{"name": "look"}], None)]
    dataset = build_mm_dataset(param(rows, attr={"tools": "tools"}, model=text_dir))
    texts = [tokenizer.decode(dataset[i]["input_ids"]) for i in range(3)]
    assert texts[0] == texts[1] and [text.count("# Tools") for text in texts] == [1, 1, 0]
    assert not any("None" in text for text in texts)
    assert targets(dataset[2], tokenizer).startswith("<tool_call>")


def test_measured_sizes_are_those_of_the_samples(param: Any, images: list[str]) -> None:
    """Tokens and patches of rows with 0 to 3 images are known before any is decoded, cut rows included."""
    a, b, c = images
    rows = [
        talk("no image", "ok"),
        talk("<image>", "ok", images=[b]),
        talk("<image><image>", "ok", "<image> again", "a long answer " * 20, images=[c, a, b]),
    ]
    dataset = build_mm_dataset(param(rows), max_length=100)
    for index in range(3):
        (size,), sample = dataset.measure(index), dataset[index]
        assert size.tokens == len(sample["input_ids"])
        assert size.patches == len(sample.get("pixel_values", ()))
        grids = sample["image_grid_thw"].prod(1) if "image_grid_thw" in sample else torch.zeros(0)
        assert size.squared_patches == int(grids.square().sum())
    assert "cut after" in dataset[2]["note"]


def test_bad_samples_are_raised_or_skipped_with_a_reason(param: Any, images: list[str], tmp_path: Path) -> None:
    """I08: with skip a row that can't be used is a filler whose fault can be counted; measuring says the same."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "cut.jpg")
    content = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    rows = [
        talk("<image>", "ok", images=images[:1]),
        talk("<image>", "ok", images=["cut.jpg"]),
        talk("<image>", "ok", images=["empty.png"]),
    ]
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(BadSample, match=r"row 2: .*cut\.jpg"):
        build_mm_dataset(param(rows))[1]
    dataset = build_mm_dataset(param(rows, on_bad_sample="skip"))
    assert "fault" not in dataset[0]
    for index, name in ((1, "cut.jpg"), (2, "empty.png")):
        sample = dataset[index]
        assert int(sample["num_rows"]) == 0 and set(sample["labels"].tolist()) == {-100}
        assert sample["fault"] == "image can't be decoded" and name in sample["note"]
    assert [size.fault for size in dataset.measure(2)] == ["image can't be decoded"]


def test_room_cuts_a_sample_further(param: Any) -> None:
    """What is left of a pack is a limit as well; a row that then doesn't fit at all is a filler with its fault."""
    row = talk("q", "one", "r", "two")
    shorter = build_mm_dataset(param([talk("q", "one")]))[0]
    dataset = build_mm_dataset(param([row]))
    length = len(dataset[0]["input_ids"])
    assert torch.equal(dataset.get(0, room=length - 1)["input_ids"], shorter["input_ids"])
    assert dataset.get(0, room=5)["fault"] == "longer than the length limit"


def test_plain_text_is_trained_whole_and_cut_into_pieces(param: Any, text_dir: Path, tokenizer: Any) -> None:
    """Every token is a target and the end token closes a text; without packs the first piece is taken, with a note."""
    rows = [{"text": "the quick brown fox " * 8}, {"text": "seven <|im_start|>assistant"}]
    columns = {"prompt": "text", "formatting": "alpaca", "images": None}
    dataset = build_mm_dataset(param(rows, attr=columns, model=text_dir, stage="pretrain", cutoff_len=20))
    whole = [*tokenizer(rows[0]["text"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    pieces = [dataset.get(0, piece, room=20) for piece in range(len(dataset.measure(0)))]
    assert [token for piece in pieces for token in piece["input_ids"].tolist()] == whole
    assert all(torch.equal(piece["labels"], piece["input_ids"]) and "note" not in piece for piece in pieces)
    assert [size.tokens for size in dataset.measure(0)] == [len(piece["input_ids"]) for piece in pieces]
    assert f"{len(whole)} tokens, cut after 20" in dataset[0]["note"]
    assert "note" not in dataset[1] and tokenizer.decode(dataset[1]["input_ids"]).startswith(rows[1]["text"])
