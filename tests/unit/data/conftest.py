"""Model directories without weights (a real tokenizer, a real Qwen2.5-VL processor) and data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHATML_VL = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}\
{% endif %}{% endfor %}{% endif %}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Like Qwen3's: text content only, thoughts of turns before the last question are left out, the last answer always
# opens with a thought, and with enable_thinking false the prompt holds an empty one.
THINKING = """{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}\
{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

MARKED = """{%- for message in messages -%}{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}{%- generation -%}{{- message.content -}}{%- endgeneration -%}{{- '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}"""

NO_PROMPT = """{{- bos_token -}}{%- for message in messages -%}{%- if message.role == 'assistant' -%}
{{- ' ' + message.content | trim + eos_token -}}
{%- else -%}{{- '[INST] ' + message.content + ' [/INST]' -}}{%- endif -%}{%- endfor -%}"""


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AddedToken, Qwen2Tokenizer

    text = [
        "the quick brown fox jumps over the lazy dog",
        "which digit is in the image? a seven, an eight",
        "图片里有什么",
    ]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(text * 20, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    learned = json.loads(raw.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    made = Qwen2Tokenizer(vocab=learned["vocab"], merges=merges, unk_token=None, eos_token=None, pad_token=None)
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    made.eos_token, made.pad_token = "<|im_end|>", "<|endoftext|>"
    return made


@pytest.fixture(scope="session")
def vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the processor of a Qwen2.5-VL and a ChatML template."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    folder = tmp_path_factory.mktemp("vl")
    parts = Qwen2VLImageProcessor(), _tokenizer(), Qwen2VLVideoProcessor()
    Qwen2_5_VLProcessor(*parts, chat_template=CHATML_VL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer only, and a template that rewrites thoughts."""
    folder = tmp_path_factory.mktemp("text")
    made = _tokenizer()
    made.chat_template = THINKING
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def processor(vl_dir: Path) -> Any:
    """transformers' own processor of `vl_dir`."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(vl_dir)


@pytest.fixture(scope="session")
def tokenizer(text_dir: Path) -> Any:
    """transformers' own tokenizer of `text_dir`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(text_dir)


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    """Three images of different sizes in `tmp_path`, by their relative paths."""
    names = ["a.png", "b.png", "c.jpg"]
    for name, size, colour in zip(names, [(28, 28), (84, 56), (40, 120)], ["red", "green", "blue"], strict=True):
        Image.new("RGB", size, colour).save(tmp_path / name)
    return names


@pytest.fixture
def param(tmp_path: Path, vl_dir: Path) -> Callable[..., dict[str, Any]]:
    """`param(rows or file name, **basic)` writes the rows and returns `dataset_param`, in messages/role/content form.

    `attr` and `preprocess` add to these sections; `model` names another directory.
    """

    def make(rows: Any, attr: Any = None, preprocess: Any = None, model: Path = vl_dir, **basic: Any) -> dict[str, Any]:
        if not isinstance(rows, str):
            (tmp_path / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
            rows = "rows.json"
        names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
        return {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset_dir": str(tmp_path), "dataset": rows, **basic},
            "preprocess_parameters": {"model_name_or_path": str(model), **(preprocess or {})},
            "attr": {**names, "assistant_tag": "assistant", "images": "images", **(attr or {})},
        }

    return make
