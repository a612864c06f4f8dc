"""Prepare the generation quick start: captioned digits, captioned moving digits, and a small frozen text encoder.

Nothing is downloaded: the 1,797 handwritten digits come with scikit-learn, the text encoder is a UMT5 with random
weights, which tells captions apart and need not understand them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

HELD_OUT = 360
CLIPS = 400
CANVAS = 32  # pixels of a clip's side
SPRITE = 16  # pixels of a digit's side on it
FRAMES, FPS = 5, 4
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


def main() -> None:
    """Write `<out>/images`, `<out>/clips`, `<out>/text_encoder`, `<out>/tokenizer` and the files of prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart_sora"))
    out: Path = parser.parse_args().out

    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    train = order[:-HELD_OUT]
    pixels = (digits.images * (255.0 / 16.0)).round().astype(np.uint8)
    rows = write_images(pixels, digits.target, train, out / "images")
    clips = write_clips(pixels, digits.target, train, out / "clips")
    captions = sorted({row["cap"] for row in (*rows, *clips)})
    make_text_encoder(captions, out)
    (out / "prompts.txt").write_text("".join(f"{caption(i % 10)}\n" for i in range(100)), encoding="utf-8")
    moving = [moving_caption(i % 10, list(DIRECTIONS)[i % 4]) for i in range(8)]
    (out / "prompts_video.txt").write_text("".join(f"{line}\n" for line in moving), encoding="utf-8")
    print(f"prepared {len(rows)} captioned digits and {len(clips)} captioned clips in {out}")


def caption(digit: int) -> str:
    """Caption of a picture."""
    return f"A handwritten digit {digit}."


def moving_caption(digit: int, direction: str) -> str:
    """Caption of a clip."""
    return f"A handwritten digit {digit} moves {direction}."


def write_images(pixels: np.ndarray, labels: np.ndarray, indices: np.ndarray, folder: Path) -> list[dict[str, str]]:
    """Save the chosen digits, 8 by 8 pixels, and their captions; returns the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in indices:
        name = f"{index:04d}.png"
        Image.fromarray(pixels[index]).convert("RGB").save(folder / name)
        rows.append({"path": name, "cap": caption(labels[index])})
    write_rows(rows, folder / "captions.jsonl")
    return rows


def write_clips(pixels: np.ndarray, labels: np.ndarray, indices: np.ndarray, folder: Path) -> list[dict[str, str]]:
    """Save clips of digits that move over a canvas, as mp4 files, and their captions; returns the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.RandomState(0)
    rows = []
    for number in range(CLIPS):
        index, direction = rng.choice(indices), list(DIRECTIONS)[rng.randint(4)]
        sprite = Image.fromarray(pixels[index]).resize((SPRITE, SPRITE), Image.Resampling.BICUBIC)
        name = f"{number:04d}.mp4"
        write_video(move(np.asarray(sprite), DIRECTIONS[direction], (CANVAS - SPRITE) // 2), folder / name)
        rows.append({"path": name, "cap": moving_caption(labels[index], direction)})
    write_rows(rows, folder / "captions.jsonl")
    return rows


def move(sprite: np.ndarray, direction: tuple[int, int], offset: int) -> np.ndarray:
    """Return [frames, side, side, 3] uint8: the sprite goes from one edge to the other."""
    frames = np.zeros((FRAMES, CANVAS, CANVAS, 3), dtype=np.uint8)
    dx, dy = direction
    for number, frame in enumerate(frames):
        way = round(number * (CANVAS - SPRITE) / (FRAMES - 1))
        way = way if dx + dy > 0 else CANVAS - SPRITE - way
        x, y = (way, offset) if dx else (offset, way)
        frame[y : y + SPRITE, x : x + SPRITE] = sprite[..., None]
    return frames


def write_video(frames: np.ndarray, file: Path) -> None:
    """Encode frames as H.264."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width = stream.height = CANVAS
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "12"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())


def write_rows(rows: list[dict[str, str]], file: Path) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_text_encoder(captions: list[str], out: Path) -> None:
    """Write a tokenizer of the captions' words and a UMT5 encoder with random weights."""
    words = sorted({word for text in captions for word in text.replace(".", " .").split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(out / "tokenizer")
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=len(vocabulary),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    UMT5EncoderModel(config).save_pretrained(out / "text_encoder")


if __name__ == "__main__":
    main()
