"""Rendered rows show what is trained: their text, pictures, frames of clips, and the length of sounds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.loading.corpus import CorpusRows
from mindspeed_mm.data.loading.dataset import RowMedia
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.media.media_reader import MediaLimits, MediaReader
from mindspeed_mm.monitor.recording.rendered_rows import (
    CaptionRenderer,
    ConversationRenderer,
    CorpusRenderer,
    render_medium,
)
from mindspeed_mm.monitor.recording.samples import different_first, write_samples
from mindspeed_mm.monitor.recording.thumbnails import pixels_of
from mindspeed_mm.utils.log import logger
from tests.support.clips import numbered_frame, read_number, tone, write_clip, write_wav
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.unit.data.data_rows import ROLES, talk
from tests.unit.data.generation.generation_maker import opened, write_rows


def frames_of(medium: dict[str, Any], folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(folder / name)) for name in medium["thumbnails"]]


@pytest.fixture
def renderer(tmp_path: Path) -> ConversationRenderer:
    """Rows: text, picture and clip, a long text, a row that is cut, a row whose picture is damaged."""
    write_clip(tmp_path / "clip.mp4", frames=24, rate=4, size=(128, 64))
    Image.fromarray(numbered_frame(5, 640, 320)).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    rows = [
        talk("which digit", "seven"),
        talk("<image> and <video>", "two", images=["a.png"], videos=["clip.mp4"]),
        talk("seven " * 900, "long"),
        talk("one", "seven", "two " * 900, "eight " * 900),
        talk("<image>", "none", images=["cut.png"]),
    ]
    write_rows(tmp_path / "rows.json", rows)
    basic = {"dataset_dir": str(tmp_path), "dataset": "rows.json", "cutoff_len": 1000, "on_bad_sample": "raise"}
    model = tiny_qwen2_5_vl_dir(tmp_path / "model", weights=False)
    config = {
        "dataset_type": "huggingface",
        "basic_parameters": basic,
        "preprocess_parameters": {"model_name_or_path": str(model), "video_fps": 2},
        "attr": {**ROLES, "images": "images", "videos": "videos"},
    }
    dataset = build_mm_dataset(config)
    assert not isinstance(dataset, tuple)
    return ConversationRenderer(dataset)


def test_a_conversation_with_its_media(renderer: ConversationRenderer, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    line = renderer.render(1, folder)
    assert line is not None and json.loads(json.dumps(line)) == line
    assert renderer.kinds(1) == ["image", "video"] and line["where"].endswith("rows.json, row 2")
    assert [(piece["text"].split("\n")[-1], piece["is_trained"]) for piece in line["pieces"]][1] == (
        "two<|im_end|>",
        True,
    )
    picture, clip = line["media"]
    assert (picture["width"], picture["height"], picture["path"]) == (640, 320, "a.png")
    (small,) = frames_of(picture, folder)
    assert small.shape == (128, 256, 3) and read_number(small) == 5
    assert (clip["frames"], clip["seconds"], clip["width"]) == (12, 6.0, 128)
    # of 24 frames at 4 a second every second one is trained; of these the first, the last, and two between
    assert [read_number(frame) for frame in frames_of(clip, folder)] == [0, 8, 14, 22]
    assert clip["thumbnail"] == clip["thumbnails"][0]


def test_long_rows_are_shortened_and_cut_ones_say_so(renderer: ConversationRenderer, tmp_path: Path) -> None:
    long, cut = (renderer.render(row, tmp_path) for row in (2, 3))
    assert long is not None and cut is not None
    assert len(long["pieces"][0]["text"]) < 2100 and " characters) …" in long["pieces"][0]["text"]
    assert long["cut_from"] is None and sum(piece["tokens"] for piece in long["pieces"]) == long["tokens"]
    assert cut["tokens"] < 1000 < cut["cut_from"]


def test_rows_that_give_no_sample_are_left_out(
    renderer: ConversationRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "report"
    (folder / "media").mkdir(parents=True)
    (folder / "media" / "of-an-earlier-run.jpg").touch()
    assert different_first(range(5), renderer) == [1, 4, 0, 2, 3]  # each kind in turn, media first
    write_samples(range(5), renderer, folder)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [line["where"].rsplit("row ")[1] for line in lines] == ["2", "1", "3", "4"]
    named = {name for line in lines for medium in line["media"] for name in medium["thumbnails"]}
    assert {f"media/{path.name}" for path in (folder / "media").iterdir()} == named

    said: list[str] = []
    monkeypatch.setattr(logger, "error", said.append)
    monkeypatch.setattr(renderer, "render", lambda row, folder: 1 / 0)
    write_samples([0], renderer, folder)
    assert (folder / "samples.jsonl").read_text() == ""
    assert said == ["row 0 of the training data can't be shown: ZeroDivisionError: division by zero"]


def test_a_sound_has_its_length(tmp_path: Path) -> None:
    write_wav(tmp_path / "tone.wav", tone(440, 1.5, 8000), 8000)
    reader = MediaReader(PreprocessParameters(model_name_or_path="none"), MediaLimits(sampling_rate=16_000))
    media = RowMedia(reader, [str(tmp_path)], "a row")
    medium = render_medium(MediaRef("audio", "tone.wav"), media, reader.sampling_rate, tmp_path)
    assert medium == {
        **dict.fromkeys(("width", "height", "frames", "thumbnail")),
        **{"kind": "audio", "seconds": 1.5, "path": "tone.wav", "thumbnails": []},
    }


def test_a_row_of_a_corpus(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2_5_vl_dir(tmp_path / "model", weights=False))
    ids = torch.tensor(tokenizer.encode("which digit seven two"))
    mask = torch.ones(len(ids) - 1)
    mask[1] = 0.0  # the token after the second one is no target

    class Rows(list[Any]):
        shuffle_index, sample_index, document_index = np.array([0]), np.array([[0], [0]]), np.array([0])

    corpus = SimpleNamespace(tokenizer=tokenizer, where=lambda documents: f"documents {documents}")
    rows = CorpusRows(corpus, Rows([{"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}]), None, 1.0)
    line = CorpusRenderer(rows).render(0, tmp_path)
    assert line is not None and line["where"] == "documents [0]"
    assert (line["tokens"], line["trained"]) == (len(ids) - 1, len(ids) - 2)
    words = [tokenizer.decode([token]) for token in ids[:-1].tolist()]
    assert [(piece["text"], piece["is_trained"]) for piece in line["pieces"]] == [
        (words[0], False),
        (words[1], True),
        (words[2], False),
        ("".join(words[3:]), True),
    ]


def test_a_caption_stands_beside_the_pixels_that_are_trained(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", frames=30, rate=8, size=(128, 64))
    write_rows(tmp_path / "rows.json", [{"path": "clip.mp4", "cap": "a red cat"}])
    dataset = opened(tmp_path / "rows.json", basic_data_folder=str(tmp_path))
    line = CaptionRenderer(dataset, epoch=3).render(0, tmp_path / "report")
    assert line is not None
    assert [piece["text"] for piece in line["pieces"]] == ["a red cat"] and line["kind"] == "caption"
    (medium,) = line["media"]
    assert (medium["kind"], medium["frames"], medium["height"], medium["width"]) == ("video", 9, 32, 64)
    trained = pixels_of(dataset.get(0, 0, 3)["video"])
    assert [read_number(frame) for frame in frames_of(medium, tmp_path / "report")] == [
        read_number(trained[place]) for place in (0, 3, 5, 8)
    ]
    assert line["tokens"] == dataset.get(0, 0, 3)["num_tokens"]
