"""A family with rows of all its media: its directory, its data file, its samples, and runs of the entry script."""

from __future__ import annotations

import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.models.transformers.adapters import find_adapter
from tests.support.families import Family
from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import words
from tests.support.workers import RankPool


def write_rows(folder: Path, family: Family) -> Path:
    """Eight rows: without media, with one of each kind, with two of a kind, with all kinds in one row."""
    kinds = family.kinds
    rng, pixels = random.Random(7), np.random.RandomState(7)
    folder.mkdir(parents=True)
    sizes = [(56, 84), (90, 60), (64, 64), (40, 100)]
    for number, (height, width) in enumerate(sizes):
        for frame in range(4):
            array = pixels.randint(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(array).save(folder / f"{number}_{frame}.png")
    for number, samples in enumerate((8_000, 13_001, 20_480)):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes((pixels.randn(samples) * 3000).astype("<i2").tobytes())

    def medium(kind: str) -> Any:
        number = rng.randrange(4)
        if kind == "video":
            return [f"{number}_{frame}.png" for frame in range(rng.choice(family.clip_frames))]
        return f"{number}_0.png" if kind == "image" else f"{rng.randrange(3)}.wav"

    wanted = [(), *((kind,) for kind in kinds), *((kind, kind) for kind in kinds), kinds, ()]
    rows = []
    for number in range(8):
        media = wanted[number % len(wanted)]
        columns: dict[str, list[Any]] = {"images": [], "videos": [], "audios": []}
        messages = []
        for turn in range(1 + number % 2):
            question = words(rng, rng.randint(2, 6))
            for kind in media if turn == 0 else ():
                question += f"<{kind}>" + words(rng, 1)
                columns[f"{kind}s"].append(medium(kind))
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": words(rng, rng.choice([1, 4, 9]))})
        rows.append({"messages": messages, **columns})
    rows = rows if family.rows is None else family.rows(folder)
    file = folder / "data.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    return file


def data_keys(family: Family) -> dict[str, Any]:
    """What differs in data.json."""
    columns = {"images": "images", "videos": "videos", "audios": "audios"}
    keys = {f"dataset_param.attr.{column}": name for column, name in columns.items()}
    return keys | {f"dataset_param.preprocess_parameters.{name}": value for name, value in family.preprocess.items()}


class FamilyCase:
    """A family's directory, rows and samples."""

    def __init__(self, name: str, folder: Path, family: Family) -> None:
        self.name, self.family = name, family
        self.hf_dir = self.family.make(folder / "hf")
        self.data = write_rows(folder / "rows", self.family)
        self.files = write_run_files(
            folder / "files",
            self.hf_dir,
            self.data,
            model=dict(self.family.model),
            data=data_keys(self.family),
            fsdp2={"sub_modules_to_wrap": list(self.family.wrap)},
        )
        param = json.loads(self.files["data.json"].read_text())["dataset_param"]
        model = type("Model", (), {"model_id": self.family.model.get("model_id"), "init_from_hf_path": self.hf_dir})
        self.dataset = build_mm_dataset(DatasetParam.from_dict(param), adapter=find_adapter(model))
        self.samples = [self.dataset[number] for number in range(len(self.dataset))]

    def inputs(self) -> list[dict[str, torch.Tensor]]:
        """Each row alone, as the transformers model takes it."""
        per_token = {"input_ids", "labels", *self.dataset.adapter.token_keys}
        return [
            {
                **{key: value[None] if key in per_token else value for key, value in sample.items()},
                "attention_mask": torch.ones_like(sample["input_ids"])[None],
            }
            for sample in self.samples
        ]

    def run(self, pool: RankPool, folder: Path, steps: int, **flags: Any) -> tuple[list[float], list[float]]:
        """Run the entry script; losses and gradient norms."""
        settings = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": steps, "save": folder}
        words = launch_flags(self.files, **{**settings, "no_save_optim": True, **self.family.flags, **flags})
        pool.run(run_entry, words, timeout=180)
        return metrics_of(folder)
