"""What the benchmarks share: a model of about 5 M parameters, a data set, and plain loops to compare with."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

WRAP = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]
WORDS = "red green blue small large round square picture left right above below what where".split()  # noqa: SIM905


def prepare(
    folder: Path, rows: int = 64, seed: int = 0, smallest: bool = False, layers: int | None = None
) -> tuple[Path, Path]:
    """Make a Qwen2.5-VL of 4.9 M parameters with weights, and a sharegpt file with 0, 1 and 2 images a row.

    Args:
        folder: what is in it already stays as it is.
        smallest: a model of 0.2 M parameters instead.
        layers: of its language model, and blocks of its vision tower.

    Returns:
        (HF directory, data file).
    """
    from mindspeed_mm.tools.tiny_models import (
        build_byte_bpe_tokenizer,
        build_qwen2_5_vl_processor,
        qwen2_5_vl_config,
        save_model_dir,
    )

    rng = random.Random(seed)
    hf_dir, data_dir = folder / "hf", folder / "data"
    data_file = data_dir / "data.json"
    if data_file.exists():
        return hf_dir, data_file
    tokenizer = build_byte_bpe_tokenizer([" ".join(rng.choices(WORDS, k=20)) for _ in range(200)], 384, hf_dir)
    build_qwen2_5_vl_processor(tokenizer, hf_dir)
    text = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
    vision = {"hidden_size": 96, "intermediate_size": 256, "depth": 4, "num_heads": 4, "out_hidden_size": 256}
    if smallest:
        text |= {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
        vision |= {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "out_hidden_size": 64}
    if layers is not None:
        text["num_hidden_layers"] = vision["depth"] = layers
    save_model_dir(qwen2_5_vl_config(tokenizer, text=text, vision=vision), tokenizer, hf_dir, seed)
    (data_dir / "images").mkdir(parents=True)
    content = []
    for index in range(rows):
        images = []
        for number in range(index % 3):
            images.append(f"images/{index}_{number}.png")
            pixels = np.random.RandomState(rng.randrange(2**31)).randint(0, 256, (112, 112, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(data_dir / images[-1])
        question = "<image>" * len(images) + " ".join(rng.choices(WORDS, k=rng.randint(4, 30)))
        answer = " ".join(rng.choices(WORDS, k=rng.choice([1, 4, 16, 40])))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        content.append({"messages": messages, "images": images})
    data_file.write_text(json.dumps(content))
    return hf_dir, data_file


def collated_batches(hf_dir: Path, data_file: Path, micro_batch_size: int) -> list[dict[str, torch.Tensor]]:
    """The data set as micro-batches, made once with the package's own data room; the loops only cycle through them."""
    from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset

    dataset = build_mm_dataset(data_param(hf_dir, data_file)["dataset_param"])
    rows = len(dataset)
    loader = build_mm_dataloader(
        dataset, {"shuffle": False}, micro_batch_size=micro_batch_size, global_batch_size=micro_batch_size, train=False
    )
    batches, iterator = [], iter(loader)
    for _ in range(rows // micro_batch_size):
        batches.append(dict(next(iterator)))
    return batches


def data_param(hf_dir: Path, data_file: Path) -> dict[str, Any]:
    """data.json's content."""
    return {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": str(data_file), "dataset_dir": str(data_file.parent)},
            "preprocess_parameters": {"model_name_or_path": str(hf_dir)},
            "attr": {
                "images": "images",
                "messages": "messages",
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
            },
        },
        "dataloader_param": {"sampler_type": "SequentialSampler", "collate_param": {"model_name": "qwen2vl"}},
    }


def write_files(
    folder: Path, hf_dir: Path, data_file: Path, model: dict[str, Any] | None = None, sharding: str = "auto"
) -> dict[str, Path]:
    """Write model.json (with further keys from `model`), data.json, tools.json and fsdp2.yaml (`sharding_size`)."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "mm_model": (folder / "model.json", json.dumps({"init_from_hf_path": str(hf_dir), **(model or {})})),
        "mm_data": (folder / "data.json", json.dumps(data_param(hf_dir, data_file))),
        "mm_tool": (folder / "tools.json", "{}"),
        "fsdp2_config_path": (
            folder / "fsdp2.yaml",
            f"sharding_size: {sharding}\nsub_modules_to_wrap:\n" + "".join(f'  - "{p}"\n' for p in WRAP),
        ),
    }
    for path, content in files.values():
        path.write_text(content)
    return {name: path for name, (path, _) in files.items()}


def photographs(folder: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """JPEG files cut from real photographs, at random places and scales, of one size."""
    from sklearn.datasets import load_sample_images

    sources = [Image.fromarray(image) for image in load_sample_images().images]
    rng = random.Random(1)
    folder.mkdir(exist_ok=True)
    made = []
    for number in range(count):
        source = rng.choice(sources)
        width = rng.randint(source.width // 2, source.width)
        height = min(source.height, width * size[1] // size[0])
        left, top = rng.randint(0, source.width - width), rng.randint(0, source.height - height)
        path = folder / f"{size[0]}x{size[1]}_{number}.jpg"
        source.resize(size, box=(left, top, left + width, top + height)).save(path, quality=90)
        made.append(path)
    return made


def add_smallest(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark its smallest form, which CI runs: it takes seconds and proves that the benchmark still works."""
    parser.add_argument("--smallest", action="store_true", help="as little as runs every part once; says nothing")


def launch_words(files: dict[str, Path], save: Path | None, **flags: Any) -> list[str]:
    """Command-line words of a run; True is a bare flag."""
    settings: dict[str, Any] = {
        "use_torch_fsdp2": True,
        **files,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "num_workers": 0,
        "log_interval": 1,
        "distributed_backend": "gloo",
        "save": save,
        **flags,
    }
    words = []
    for name, value in settings.items():
        if value is not None and value is not False:
            words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


class BlockServer:
    """A process that runs a block of steps whenever it is asked to.

    It reads a line for each block, and writes one that begins with "times ".
    """

    def __init__(self, words: Sequence[str], errors: Path) -> None:
        """
        Args:
            words: script and arguments.
            errors: file of its standard error.
        """
        self._errors = errors
        with open(errors, "w") as opened:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=opened,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def block(self) -> list[float]:
        """The times that it answers: seconds of each step of a block."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("times "):
                return json.loads(line.removeprefix("times "))
        raise RuntimeError(f"{self.process.args} ended:\n{self._errors.read_text()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def alternate(contenders: dict[str, Callable[[], Sequence[float]]], rounds: int) -> dict[str, list[float]]:
    """Run the contenders in turn `rounds` times, each returning its times; slow spells of the machine hit all of
    them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name] += list(run())
    return times


def timed(run: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of `times` calls."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return taken


def median(values: Sequence[float]) -> float:
    """Median."""
    return statistics.median(values)
