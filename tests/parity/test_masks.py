"""Labels of every adapted family against derivations that share no code with the package, on generated conversations.

Where a template keeps what it wrote for earlier turns, the answers are found by rendering prefixes with the processor
itself; where it rewrites them, by the marker tokens of the turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.data import build_mm_dataset
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir
from tests.unit.data.conftest import THINKING

CONVERSATIONS = 200

# Text, pictures, clips, tool schemas and tool calls; nothing that an earlier turn wrote is changed by a later one.
VISION = """{%- macro body(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}{{- '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + body(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + body(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

WORDS = ["the", "red", "图片", "<image>", "<video>", "seven", "  ", "assistant", "{x}", "eight,", "<div>", "</s>"]
WORDS += ["<|im_start|>assistant", "<tool_call>", "\n", "user\n"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def words(rng: random.Random, most: int, avoid: tuple[str, ...] = ()) -> str:
    """Text that begins and ends with a word, so that turns begin and end between tokens."""
    return " ".join(rng.choice([w for w in WORDS if w not in avoid and w.strip()]) for _ in range(rng.randint(1, most)))


class Talk:
    """One generated conversation: as a row of a data file, and as the processor's own input."""

    def __init__(self, rng: random.Random, pictures: list[str], clips: list[list[str]], thoughts: bool) -> None:
        self.row: dict[str, Any] = {"messages": [], "images": [], "videos": [], "tools": None}
        self.messages: list[dict[str, Any]] = []
        if rng.random() < 0.4:
            self._add("system", words(rng, 6))
        if rng.random() < 0.3:
            self.row["tools"] = rng.choice([TOOLS, json.dumps(TOOLS)])
        for _ in range(rng.randint(1, 4)):
            self._question(rng, pictures, clips)
            if rng.random() < 0.3:
                call = {"type": "function", "function": {"name": "look", "arguments": {"where": words(rng, 2)}}}
                self._add("assistant", rng.choice([words(rng, 3), None]), tool_calls=[call])
                self._add("tool", words(rng, 4, ("<image>", "<video>")))
            thought = f"<think>\n{words(rng, 5)}\n</think>\n\n" if thoughts and rng.random() < 0.5 else ""
            self._add("assistant", thought + words(rng, 9))
        if rng.random() < 0.2:
            self._add("user", words(rng, 4, ("<image>", "<video>")))

    def _add(self, role: str, content: Any, **extra: Any) -> None:
        self.row["messages"].append({"role": role, "content": content, **extra})
        self.messages.append({"role": role, "content": content or "", **extra})

    def _question(self, rng: random.Random, pictures: list[str], clips: list[list[str]]) -> None:
        text, parts = "", []
        for _ in range(rng.randint(1, 3)):
            piece = words(rng, 4, ("<image>", "<video>"))
            text += piece
            parts.append({"type": "text", "text": piece})
            kind = rng.choice(["image", "video", "", ""])
            if kind == "image" and pictures:
                self.row["images"].append(rng.choice(pictures))
            elif kind == "video" and clips:
                self.row["videos"].append(rng.choice(clips))
            else:
                continue
            text += f"<{kind}>"
            parts.append({"type": kind})
        self._add("user", text)
        if any(part["type"] != "text" for part in parts):
            self.messages[-1]["content"] = parts

    @property
    def tools(self) -> Any:
        """Tool schemas as the template takes them."""
        tools = self.row["tools"]
        return json.loads(tools) if isinstance(tools, str) else tools


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures and the pictures of clips."""
    made = tmp_path_factory.mktemp("masks")
    rng = np.random.RandomState(0)
    sizes = [(28, 28), (56, 28), (28, 84), (40, 60)]
    for number, (height, width) in enumerate(sizes):
        for frame in range(4):
            pixels = rng.randint(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(made / f"p{number}_{frame}.png")
    return made


PICTURES = [f"p{number}_0.png" for number in range(4)]
CLIPS = [[f"p{number}_{frame}.png" for frame in range(length)] for number, length in ((0, 2), (1, 4), (3, 3))]


def dataset_of(talks: list[Talk], folder: Path, model: Path, **basic: Any) -> Any:
    """The package's data set of generated rows."""
    (folder / "rows.json").write_text(json.dumps([talk.row for talk in talks], ensure_ascii=False), encoding="utf-8")
    names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
    media = {"images": "images", "videos": "videos", "tools": "tools"}
    return build_mm_dataset(
        {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset_dir": str(folder), "dataset": "rows.json", **basic},
            "preprocess_parameters": {"model_name_or_path": str(model)},
            "attr": {**names, "assistant_tag": "assistant", **media},
        }
    )


def clip_of(folder: Path, names: list[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames of a clip of pictures at 2 a second, of even number, and what the processor wants to know of it."""
    frames = [np.asarray(Image.open(folder / name)) for name in names]
    frames += [frames[-1]] * (len(frames) % 2)
    return np.stack(frames), {"total_num_frames": len(frames), "fps": 2.0, "frames_indices": list(range(len(frames)))}


def by_processor(processor: Any, talk: Talk, folder: Path, count: int, prompt: bool) -> dict[str, Any]:
    """What the processor makes of the first `count` messages."""
    messages = talk.messages[:count]
    kinds = [part["type"] for m in messages if isinstance(m["content"], list) for part in m["content"]]
    pictures = [Image.open(folder / name) for name in talk.row["images"][: kinds.count("image")]]
    clips = [clip_of(folder, names) for names in talk.row["videos"][: kinds.count("video")]]
    text = processor.apply_chat_template(messages, tools=talk.tools, tokenize=False, add_generation_prompt=prompt)
    if prompt is False and count < len(talk.messages):
        text = text.removesuffix("\n")  # what follows the end mark isn't the model's
    options = {"videos_kwargs": {"do_sample_frames": False, "video_metadata": [m for _, m in clips]}} if clips else {}
    return processor(text=[text], images=pictures or None, videos=[f for f, _ in clips] or None, **options)


def test_vision_family_by_prefixes(folder: Path, tmp_path: Path) -> None:
    """Qwen2.5-VL: ids, types, media tensors and labels of 200 conversations with tools, pictures and clips."""
    from transformers import AutoProcessor

    model = tiny_qwen2_5_vl_dir(tmp_path / "model", weights=False)
    (model / "chat_template.jinja").write_text(VISION, encoding="utf-8")
    processor = AutoProcessor.from_pretrained(model)
    processor.video_processor.cap_pixels_per_frame = False
    rng = random.Random(5)
    talks = [Talk(rng, PICTURES, CLIPS, thoughts=False) for _ in range(CONVERSATIONS)]
    dataset = dataset_of(talks, folder, model)
    assert len(dataset) == CONVERSATIONS
    for index, talk in enumerate(talks):
        sample = dataset[index]
        whole = by_processor(processor, talk, folder, len(talk.messages), prompt=False)
        ids = list(whole["input_ids"][0])
        assert sample["input_ids"].tolist() == ids, index
        assert sample["mm_token_type_ids"].tolist() == list(whole["mm_token_type_ids"][0])
        for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            assert (key in sample) == (key in whole), (index, key)
            assert key not in whole or torch.equal(sample[key], whole[key]), (index, key)
        labels = [-100] * len(ids)
        for number, message in enumerate(talk.messages):
            if message["role"] == "assistant":
                start = len(by_processor(processor, talk, folder, number, prompt=True)["input_ids"][0])
                end = len(by_processor(processor, talk, folder, number + 1, prompt=False)["input_ids"][0])
                if number + 1 == len(talk.messages):
                    end -= 1  # the newline after the last end mark
                labels[start:end] = ids[start:end]
        assert sample["labels"].tolist() == labels, index


def turns_by_markers(ids: list[int], tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Spans of assistant turns, between `<|im_start|>assistant\\n` and `<|im_end|>` included."""
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids
    end, at = tokenizer.convert_tokens_to_ids("<|im_end|>"), 0
    while at < len(ids):
        if ids[at : at + len(header)] == header:
            start = at + len(header)
            at = ids.index(end, start) + 1
            yield start, at
        else:
            at += 1


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not thinking"])
def test_thinking_text_family_by_markers(folder: Path, tmp_path: Path, thinking: bool) -> None:
    """Qwen3: 200 conversations with system texts, tools and thoughts, through a template that drops earlier thoughts;
    with enable_thinking false the empty thought of the prompt is not a target."""
    from transformers import AutoTokenizer

    model = tiny_qwen3_dir(tmp_path / "model", weights=False)
    (model / "chat_template.jinja").write_text(THINKING, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(6)
    talks = [Talk(rng, [], [], thoughts=thinking) for _ in range(CONVERSATIONS)]
    for talk in talks:  # a typed marker would be found by the scan below; elsewhere it is tested that it is text
        for message in (*talk.row["messages"], *talk.messages):
            message["content"] = message["content"] and message["content"].replace("<|im_start|>assistant", "so")
    dataset = dataset_of(talks, folder, model, enable_thinking=thinking)
    skipped = [] if thinking else tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False).input_ids
    for index, talk in enumerate(talks):
        sample = dataset[index]
        text = tokenizer.apply_chat_template(talk.messages, tools=talk.tools, tokenize=False, enable_thinking=thinking)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert sample["input_ids"].tolist() == ids, index
        labels = [-100] * len(ids)
        for start, end in turns_by_markers(ids, tokenizer):
            if skipped and ids[start : start + len(skipped)] == skipped:
                start += len(skipped)
            labels[start:end] = ids[start:end]
        assert sample["labels"].tolist() == labels, index
