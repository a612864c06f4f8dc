"""Launches of inference_vlm.py in tests, and transformers' own answers to the same rows."""

from __future__ import annotations

import json
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.tasks.inference.command import main
from tests.support.families import Family, families
from tests.support.family_case import write_rows

NEW_TOKENS = 8


class AnswerCase:
    """A family's directory, and rows with its media."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.family = self.family_of(name)
        self.hf_dir = self.family.make(folder / "hf")
        self.data = write_rows(folder / "rows", self.family)
        self.rows: list[dict[str, Any]] = json.loads(self.data.read_text())

    @classmethod
    def over(cls, name: str, hf_dir: Path, folder: Path) -> AnswerCase:
        """A directory that is there already, with rows of a family."""
        made = cls.__new__(cls)
        made.name, made.family, made.hf_dir = name, cls.family_of(name), hf_dir
        made.data = write_rows(folder, made.family)
        made.rows = json.loads(made.data.read_text())
        return made

    @classmethod
    def of(cls, other: AnswerCase, rows: list[dict[str, Any]]) -> AnswerCase:
        """Another case's directory and media, with other rows."""
        made = cls.__new__(cls)
        made.name, made.family, made.hf_dir, made.data, made.rows = (
            other.name,
            other.family,
            other.hf_dir,
            other.data,
            rows,
        )
        return made

    @staticmethod
    def family_of(name: str) -> Family:
        """A family by its name."""
        return families()[name]


def launch(output: Path, *words: object, **flags: object) -> list[dict[str, Any]]:
    """Answer rows into a file, in this process; returns its lines.

    Args:
        words: further words of the command line.
        flags: flags; True is a bare one.
    """
    main(answer_words(output, *words, **flags))
    return [json.loads(line) for line in output.read_text().splitlines()]


def answer_words(output: Path, *words: object, **flags: object) -> list[str]:
    """The words of a launch."""
    found = ["--output", str(output), *map(str, words)]
    for name, value in {"max_new_tokens": NEW_TOKENS, **flags}.items():
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        found += ["--" + name.replace("_", "-"), *map(str, values)]
    return found


def transformers_answers(case: AnswerCase, rows: Sequence[int] | None = None, **options: object) -> list[str]:
    """transformers' own greedy answers: its processor, its model, one row at a time.

    Args:
        rows: numbers of the rows; None: all.
        options: arguments of `generate`.
    """
    import transformers
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    processor = (AutoProcessor if case.family.kinds else AutoTokenizer).from_pretrained(case.hf_dir)
    tokenizer = getattr(processor, "tokenizer", processor)
    name = AutoConfig.from_pretrained(case.hf_dir).architectures[0]
    model = getattr(transformers, name).from_pretrained(case.hf_dir, dtype=torch.float32).eval()
    answers = []
    for number in range(len(case.rows)) if rows is None else rows:
        inputs = inputs_of(case, processor, case.rows[number])
        ids = model.generate(**inputs, do_sample=False, **{"max_new_tokens": NEW_TOKENS, **options})[0]
        if "input_ids" in inputs:
            ids = ids[inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    return answers


def inputs_of(case: AnswerCase, processor: Any, row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What the processor makes of a row without its last answer."""
    from transformers.video_utils import VideoMetadata

    folder = case.data.parent
    media = {kind: list(row.get(f"{kind}s", ())) for kind in ("image", "video", "audio")}
    if case.name == "whisper":  # no chat: a prompt of the tokenizer's, which isn't part of the output
        sound = processor(audio=_sound(folder / media["audio"][0]), sampling_rate=16_000, return_tensors="pt")
        prompt = torch.tensor([processor.tokenizer.prefix_tokens])
        return {"input_features": sound["input_features"], "decoder_input_ids": prompt}
    messages = [
        {"role": turn["role"], "content": _parts(turn["content"]) if case.family.kinds else turn["content"]}
        for turn in row["messages"][:-1]
    ]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not case.family.kinds:
        return dict(processor([text], return_tensors="pt", add_special_tokens=False))
    if not any(media.values()) and case.name == "qwen3_asr":  # its processor wants a sound
        return dict(processor.tokenizer([text], return_tensors="pt", add_special_tokens=False))
    arguments: dict[str, Any] = {}
    bos = processor.tokenizer.bos_token
    if bos is not None and text.startswith(bos):  # as apply_chat_template does where it makes the ids itself
        arguments["add_special_tokens"] = False
    if media["image"]:
        arguments["images"] = [_picture(folder / path) for path in media["image"]]
    if media["video"]:
        clips = [np.stack([np.asarray(_picture(folder / path)) for path in paths]) for paths in media["video"]]
        metadata = [
            VideoMetadata(total_num_frames=len(clip), fps=2.0, frames_indices=list(range(len(clip)))) for clip in clips
        ]
        arguments |= {"videos": clips, "videos_kwargs": {"do_sample_frames": False, "video_metadata": metadata}}
        if "omni" in case.name:
            arguments["videos_kwargs"] = {"do_sample_frames": False, "fps": 2.0}
    if media["audio"]:
        arguments["audio"] = [_sound(folder / path) for path in media["audio"]]
    return dict(processor(text=[text], return_tensors="pt", **arguments))


def _parts(text: str) -> list[dict[str, str]]:
    """A text with tags as typed parts."""
    for kind in ("image", "video", "audio"):
        text = text.replace(f"<{kind}>", f"\0{kind}\0")
    parts = text.split("\0")
    return [{"type": part} if number % 2 else {"type": "text", "text": part} for number, part in enumerate(parts)]


def _picture(path: Path) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")


def _sound(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 2**15
