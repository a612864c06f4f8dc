"""Prepare the quick start: handwritten digits as PNG files and chat rows, and a small Qwen2.5-VL without weights.

`base.json` holds the rows without images of the digits 5 to 9: what the model that LoRA tunes is pretrained on.
Nothing is downloaded: the 1,797 digits come with scikit-learn, the vocabulary is learnt from the rows themselves.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from mindspeed_mm.tools.tiny_models import (
    build_byte_bpe_tokenizer,
    build_qwen2_5_vl_processor,
    qwen2_5_vl_config,
    save_model_dir,
)

HELD_OUT = 360
TEXT_ROWS = 718
SIDE = 28  # pixels: two patches of 14 a side, which the tower merges into one token
QUESTION = "<image>Which digit is in the image?"
VOCAB_SIZE = 512
BASE_DIGITS = "01234"


def main() -> None:
    """Write `<out>/data` and `<out>/model`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    out: Path = parser.parse_args().out

    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    train, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    pixels = np.stack([draw(image) for image in digits.images])

    train_rows = image_rows(pixels, digits.target, train, out / "data" / "images")
    train_rows += text_rows(TEXT_ROWS, seed=0)
    random.Random(0).shuffle(train_rows)
    write_rows(train_rows, out / "data" / "train.json")
    known = [r for r in train_rows if not r["images"] or r["messages"][1]["content"] in BASE_DIGITS]
    write_rows(known, out / "data" / "base.json")
    write_rows(image_rows(pixels, digits.target, held_out, out / "data" / "images"), out / "data" / "heldout.json")

    make_model(out / "model", train_rows, pixels[train] / 255.0)
    print(f"prepared {len(train_rows)} training rows ({TEXT_ROWS} without image), {HELD_OUT} held out, in {out}")


def draw(image: np.ndarray) -> np.ndarray:
    """Return an 8 by 8 digit of values 0…16 as 28 by 28 gray pixels, uint8."""
    gray = Image.fromarray((image * (255.0 / 16.0)).round().astype(np.uint8))
    return np.asarray(gray.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def image_rows(pixels: np.ndarray, labels: np.ndarray, indices: np.ndarray, folder: Path) -> list[dict[str, Any]]:
    """Save the chosen digits as RGB files and return a question and its answer for each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in indices:
        file = folder / f"{index:04d}.png"
        Image.fromarray(pixels[index]).convert("RGB").save(file)
        rows.append(row(QUESTION, str(labels[index]), [f"images/{file.name}"]))
    return rows


def text_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return questions without an image, so that some micro-batches of some ranks hold no image at all."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        question, answer = rng.choice(
            [(f"What is {a} plus {b}?", a + b), (f"What comes after {a}?", a + 1), (f"What comes before {b + 1}?", b)]
        )
        rows.append(row(question, str(answer), []))
    return rows


def row(question: str, answer: str, images: list[str]) -> dict[str, Any]:
    """Return one training row in the sharegpt form that `data.json` describes."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images}


def write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    """Write rows as one JSON list, a row a line."""
    file.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n", encoding="utf-8")


def make_model(folder: Path, rows: list[dict[str, Any]], pixels: np.ndarray) -> None:
    """Write tokenizer, processor and configuration of a Qwen2.5-VL of about 2 million parameters.

    Args:
        folder: the model directory.
        rows: the vocabulary is learnt from their texts.
        pixels: training images in 0…1; the processor normalises with their mean and deviation.
    """
    texts = [message["content"].replace("<image>", "") for r in rows for message in r["messages"]]
    tokenizer = build_byte_bpe_tokenizer(texts, VOCAB_SIZE, folder, default_system=None)
    mean, deviation = round(float(pixels.mean()), 4), round(float(pixels.std()), 4)
    build_qwen2_5_vl_processor(tokenizer, folder, image_mean=[mean] * 3, image_std=[deviation] * 3)
    rows_of_embedding = -(-len(tokenizer) // 64) * 64  # more than tokens, as in published models: divides over ranks
    config = qwen2_5_vl_config(
        tokenizer,
        text={"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": rows_of_embedding},
        vision={"hidden_size": 128, "intermediate_size": 512, "num_heads": 4},
    )
    save_model_dir(config, tokenizer, folder, seed=None)


if __name__ == "__main__":
    main()
