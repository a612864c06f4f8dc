"""Hugging Face directories and data sets small enough for a test, real in every other respect.

Directories are built once per process and copied to where a test wants them.
"""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

VOCAB_SIZE = 384
WORDS = tuple(
    "red green blue small large round square digit image line left right above below first second answer question "  # noqa: SIM905
    "where what which how many the a is are in of on and it there shows picture two three four seven".split()
)


# enough layers and heads for four pipeline stages and four tensor-parallel ranks
_DEEP_TEXT = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
_DEEP_VISION = {"depth": 4, "num_heads": 4, "fullatt_block_indexes": [1, 3]}


def tiny_qwen2_5_vl_dir(
    path: str | Path, seed: int = 0, tie: bool = False, weights: bool = True, deep: bool = False
) -> Path:
    """Make a Qwen2.5-VL directory: processor, tokenizer, configuration (hidden 64, 2 + 2 layers), fp32 weights.

    Args:
        path: the directory to make; it may exist.
        seed: of the random weights.
        tie: whether the output layer is the input embedding.
        weights: False leaves the weight file out.
        deep: 4 + 4 layers, 8 heads in 4 groups and 4 vision heads.
    """
    return _copy(_qwen2_5_vl(seed if weights else None, tie, deep), path)


def tiny_qwen3_dir(path: str | Path, seed: int = 0, tie: bool = True, weights: bool = True, deep: bool = False) -> Path:
    """Make a Qwen3 (text) directory with a tokenizer and no processor; arguments as for `tiny_qwen2_5_vl_dir`."""
    return _copy(_qwen3(seed if weights else None, tie, deep), path)


def tiny_qwen2_dir(path: str | Path, seed: int = 0, tie: bool = True, weights: bool = True, deep: bool = False) -> Path:
    """Make a Qwen2 (text) directory, its biases random too; arguments as for `tiny_qwen2_5_vl_dir`."""
    return _copy(_qwen2(seed if weights else None, tie, deep), path)


def write_mixed_dataset(path: str | Path, rows: int = 16, seed: int = 0, images: bool = True) -> Path:
    """Write sharegpt rows with 0, 1 and 2 images, 1 to 3 turns and answers of 1 to 30 words; return the JSON file.

    Args:
        path: folder that receives `data.json` and `images/`.
        rows: number of rows. Of every three consecutive ones, one has no image, one has one, one has two.
        seed: the same seed and number give the same bytes.
        images: False makes every row text-only.

    Each row is `{"messages": [{"role", "content"}, …], "images": [paths relative to `path`]}`.
    """
    folder = Path(path)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    made = []
    counts: list[int] = []
    for index in range(rows):
        if not counts:
            counts = rng.sample([0, 1, 2], 3)
        made.append(_row(folder, index, counts.pop() if images else 0, rng))
    file = folder / "data.json"
    file.write_text(json.dumps(made, indent=1), encoding="utf-8")
    return file


def words(rng: random.Random, count: int) -> str:
    """Return `count` words that the tiny vocabulary knows."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def _row(folder: Path, index: int, num_images: int, rng: random.Random) -> dict[str, Any]:
    files = []
    for number in range(num_images):
        name = f"images/{index:04d}_{number}.png"
        height, width = rng.choice([(28, 28), (28, 56), (56, 28), (56, 56)])
        pixels = np.random.RandomState(rng.randrange(2**31)).randint(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
        files.append(name)
    turns = rng.randint(1, 3)
    # Each image goes into the question of a turn of its own choosing, before or after the words.
    holders = sorted(rng.randrange(turns) for _ in files)
    messages = []
    for turn in range(turns):
        question = words(rng, rng.randint(2, 8))
        for holder in holders:
            if holder == turn:
                question = f"<image>{question}" if rng.random() < 0.5 else f"{question}<image>"
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": words(rng, rng.choice([1, 2, 5, 12, 30]))})
    return {"messages": messages, "images": files}


@functools.cache
def _cache() -> Path:
    folder = tempfile.mkdtemp(prefix="tiny-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _copy(source: Path, path: str | Path) -> Path:
    shutil.copytree(source, path, dirs_exist_ok=True)
    return Path(path)


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from mindspeed_mm.tools.tiny_models import build_byte_bpe_tokenizer

    rng = random.Random(0)
    return build_byte_bpe_tokenizer([words(rng, 12) for _ in range(200)], VOCAB_SIZE, folder)


@functools.cache
def _qwen2_5_vl(seed: int | None, tie: bool, deep: bool) -> Path:
    from mindspeed_mm.tools.tiny_models import build_qwen2_5_vl_processor, qwen2_5_vl_config, save_model_dir

    folder = _cache() / f"qwen2_5_vl-{seed}-{tie}-{deep}"
    tokenizer = _tokenizer(_cache() / "tokenizer")
    build_qwen2_5_vl_processor(tokenizer, folder)
    text, vision = (_DEEP_TEXT, _DEEP_VISION) if deep else ({}, {})
    config = qwen2_5_vl_config(tokenizer, text=text, vision=vision, tie_word_embeddings=tie)
    save_model_dir(config, tokenizer, folder, seed)
    return folder


@functools.cache
def _qwen3(seed: int | None, tie: bool, deep: bool) -> Path:
    from mindspeed_mm.tools.tiny_models import qwen3_config, save_model_dir

    folder = _cache() / f"qwen3-{seed}-{tie}-{deep}"
    tokenizer = _tokenizer(_cache() / "tokenizer")
    tokenizer.save_pretrained(folder)
    config = qwen3_config(tokenizer, text=_DEEP_TEXT if deep else {}, tie_word_embeddings=tie)
    save_model_dir(config, tokenizer, folder, seed)
    return folder


@functools.cache
def _qwen2(seed: int | None, tie: bool, deep: bool) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = _cache() / f"qwen2-{seed}-{tie}-{deep}"
    like = Path(_qwen3(None, tie, deep))
    _copy(like, folder)
    fields = json.loads((like / "config.json").read_text())
    dropped = ("architectures", "attention_bias", "head_dim", "layer_types", "model_type", "transformers_version")
    config = Qwen2Config(**{name: value for name, value in fields.items() if name not in dropped})
    config.architectures = ["Qwen2ForCausalLM"]
    if seed is None:
        config.save_pretrained(folder)
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    return folder
