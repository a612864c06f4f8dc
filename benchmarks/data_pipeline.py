"""What the data room costs: images a second, padding, balance, memory, and the time to the first batch.

    OMP_NUM_THREADS=1 python benchmarks/data_pipeline.py                  all of it
    OMP_NUM_THREADS=1 python benchmarks/data_pipeline.py images padding   parts

Ratios are against a baseline in the same run. Pictures are cut from two photographs that scikit-learn brings along.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import WORDS, add_smallest, alternate, data_param, median, photographs
from PIL import Image


@dataclass
class Sizes:
    """How much is measured.

    Attributes:
        rounds: of every comparison.
        images: of each size that are decoded.
        rows: of the file with many rows.
        texts: of the long-tailed mix.
        steps: planned with and without balance.
        ranks: for which they are planned.
    """

    rounds: int = 5
    images: int = 60
    rows: int = 100_000
    texts: int = 2000
    steps: int = 20
    ranks: tuple[int, ...] = (8, 64)


SMALLEST = Sizes(rounds=1, images=2, rows=2_000, texts=40, steps=1, ranks=(8,))


def main() -> None:
    """Run the parts that are named, all without a name; print their figures."""
    parts: dict[str, Callable[[Path, Sizes], None]] = {
        "images": images,
        "padding": padding,
        "balance": balance,
        "memory": memory,
        "start": start,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="which; none = all")
    add_smallest(parser)
    options = parser.parse_args()
    sizes = SMALLEST if options.smallest else Sizes()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.parts or parts:
            print(f"== {name}", flush=True)
            parts[name](Path(folder), sizes)


def model_dir(folder: Path) -> Path:
    """A Qwen2.5-VL directory without weights, whose processor has the published limits of pixels."""
    from mindspeed_mm.tools.tiny_models import (
        build_byte_bpe_tokenizer,
        build_qwen2_5_vl_processor,
        qwen2_5_vl_config,
        save_model_dir,
    )

    path = folder / "model"
    if not path.exists():
        rng = random.Random(0)
        texts = [" ".join(rng.choices(WORDS, k=20)) for _ in range(200)]
        tokenizer = build_byte_bpe_tokenizer(texts, 384, path)
        build_qwen2_5_vl_processor(tokenizer, path, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
        save_model_dir(qwen2_5_vl_config(tokenizer), tokenizer, path, None)
    return path


def dataset_of(folder: Path, rows: list[dict[str, Any]], preprocess: dict[str, Any] | None = None, **basic: Any) -> Any:
    """The package's data set of rows."""
    from mindspeed_mm.data import build_mm_dataset

    file = folder / f"rows{len(list(folder.glob('rows*')))}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    param = data_param(model_dir(folder), file)["dataset_param"]
    param["basic_parameters"].update(basic)
    param["preprocess_parameters"].update(preprocess or {})
    return build_mm_dataset(param)


def row_of(image: Path | str) -> dict[str, Any]:
    """A row with one image."""
    turns = [{"role": "user", "content": "<image>what is there"}, {"role": "assistant", "content": "red and green"}]
    return {"messages": turns, "images": [str(image)]}


def images(folder: Path, sizes: Sizes) -> None:
    """Images a second of one core: whole samples of ours against a plain loop with the same processor, same pixels."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model_dir(folder))
    text = processor.apply_chat_template(
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is there"}]},
            {"role": "assistant", "content": "red and green"},
        ]
    )

    def timed(make: Callable[[int], Any], count: int) -> list[float]:
        started = time.perf_counter()
        for index in range(count):
            make(index)
        return [count / (time.perf_counter() - started)]

    for size, count, limits in (
        ((512, 384), sizes.images, {}),
        ((4000, 3000), sizes.images // 10 or 1, {"image_max_pixels": 589_824}),
    ):
        files = photographs(folder / "photographs", count, size)
        rows = [row_of(file) for file in files]
        ours, fast = (dataset_of(folder, rows, {**limits, "image_decoder": way}) for way in ("pil", "fast"))

        def opened(index: int, files: list[Path] = files, limits: dict[str, Any] = limits) -> Image.Image:
            with Image.open(files[index]) as picture:
                rgb = picture.convert("RGB")
            if limits:
                scale = (limits["image_max_pixels"] / (rgb.width * rgb.height)) ** 0.5
                rgb = rgb.resize((int(rgb.width * scale), int(rgb.height * scale)))
            return rgb

        def whole(index: int, opened: Callable[[int], Image.Image] = opened) -> Any:
            return processor(text=[text], images=[opened(index)], return_tensors="pt")

        def pixels(index: int, opened: Callable[[int], Image.Image] = opened) -> Any:
            return processor.image_processor([opened(index)], return_tensors="pt")

        for index in range(count):
            mine, plain = ours[index], whole(index)
            assert torch.equal(mine["pixel_values"], plain["pixel_values"]) and (
                torch.equal(mine["input_ids"], plain["input_ids"][0])
            ), "other pixels or ids"
        fast[0]
        speeds = alternate(
            {
                "plain": lambda n=count, w=whole: timed(w, n),
                "pixels": lambda n=count, p=pixels: timed(p, n),
                "ours": lambda n=count, d=ours: timed(d.__getitem__, n),
                "fast": lambda n=count, d=fast: timed(d.__getitem__, n),
                "decode": lambda n=count, o=opened: timed(o, n),
            },
            sizes.rounds,
        )
        rate = {name: median(values) for name, values in speeds.items()}
        print(
            f"{size[0]}×{size[1]} JPEG: ours {rate['ours']:.0f} images/s a core (whole samples with labels), plain "
            f"loop of PIL and the same processor {rate['plain']:.0f}, its image processor alone {rate['pixels']:.0f}, "
            f"PIL alone {rate['decode']:.0f}; ours ÷ plain {rate['ours'] / rate['plain']:.2f}, ÷ image processor alone "
            f"{rate['ours'] / rate['pixels']:.2f}; image_decoder fast ÷ ours {rate['fast'] / rate['ours']:.2f}"
        )


def long_tailed(rng: random.Random, most: int) -> int:
    """A number of words as conversations have them: many short ones, few very long ones."""
    return max(1, min(most, int(rng.lognormvariate(3.6, 1.1))))


def padding(folder: Path, sizes: Sizes) -> None:
    """Share of padding over two epochs of a long-tailed mix of lengths, with and without packing."""
    from mindspeed_mm.data import build_mm_dataloader

    rng = random.Random(2)
    rows = []
    for _ in range(sizes.texts):
        question = " ".join(rng.choices(WORDS, k=long_tailed(rng, 500)))
        answer = " ".join(rng.choices(WORDS, k=long_tailed(rng, 400)))
        rows.append(
            {
                "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
                "images": [],
            }
        )
    for name, basic in (("padded", {}), ("packed", {"packing": True})):
        for micro in (1, 4):
            dataset = dataset_of(folder, rows, cutoff_len=2048, **basic)
            loader = build_mm_dataloader(dataset, {}, micro_batch_size=micro, global_batch_size=8, num_workers=0)
            seen = tokens = positions = 0
            started = time.perf_counter()
            for batch in loader:
                mask = batch["documents"] if "documents" in batch else batch["attention_mask"]
                tokens += int((mask > 0).sum())
                positions += mask.numel()
                seen += int(batch["num_rows"])
                if seen >= 2 * len(rows):
                    break
            loader.close()
            print(
                f"{name}, {micro} row(s) a micro-batch: {1 - tokens / positions:.2%} padding over {seen} samples, "
                f"{seen / (time.perf_counter() - started):.0f} samples/s"
            )


class SizedRows:
    """Rows of a mixed data set of which only the sizes are known: long texts, one picture to several, short clips."""

    def __init__(self, rows: int) -> None:
        from mindspeed_mm.data.media.media import SampleSize

        rng = random.Random(3)
        self._sizes = []
        for _ in range(rows):
            text = long_tailed(rng, 3000)
            pictures = [rng.choice([256, 1024, 2304, 4096]) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
            frames = [1024] * rng.choice([0] * 9 + [8])
            patches = [*pictures, *frames]
            size = SampleSize(text + sum(patches) // 4, sum(patches), sum(p * p for p in patches))
            self._sizes.append(size)

    def __len__(self) -> int:
        return len(self._sizes)

    def measure(self, index: int) -> list[Any]:
        return [self._sizes[index]]


def balance(folder: Path, sizes: Sizes) -> None:
    """Largest ÷ mean cost over ranks, with and without balance, on a mix of text, pictures and clips.

    The cost of Qwen2.5-VL 3B, from the numbers of its config.json.
    """
    from transformers import Qwen2_5_VLConfig

    from mindspeed_mm.data.plan.cost import CostModel
    from mindspeed_mm.data.plan.fixed_plan import Balance, FixedPlanner
    from mindspeed_mm.data.plan.measuring import Measurer
    from mindspeed_mm.data.plan.order import FixedOrder
    from mindspeed_mm.data.plan.pack_plan import PackPlanner
    from mindspeed_mm.data.plan.plan import BatchLayout

    text = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    text |= {"num_key_value_heads": 2, "vocab_size": 151936}
    Qwen2_5_VLConfig(text_config=text).save_pretrained(folder / "cost")
    costs = CostModel.from_config(folder / "cost")
    data = SizedRows(40_000)
    micro_batches = 4
    for ranks in sizes.ranks:
        layout = BatchLayout(2, 2 * micro_batches * ranks, ranks)
        packs = BatchLayout(1, micro_batches * ranks, ranks)

        def measurer() -> Any:
            return Measurer(data, 0, lambda: len(data))

        def order() -> Any:
            return FixedOrder(len(data), True, 1)

        planners = {
            "rows in order": FixedPlanner(order(), layout, True),
            "rows balanced": FixedPlanner(order(), layout, True, measurer(), balance=Balance(ranks=True), costs=costs),
            "packs of 8192 balanced": PackPlanner(order(), packs, 8192, measurer(), costs),
        }
        for name, planner in planners.items():
            step, micro = [], []
            for batch, _ in zip(planner.batches(), range(sizes.steps), strict=False):
                cost = np.array(
                    [
                        [
                            sum(costs.cost(data.measure(row)[piece]) for pack in rows for row, piece in pack)
                            for rows in rank
                        ]
                        for rank in batch.micro_batches
                    ]
                )
                step.append(cost.sum(1).max() / cost.sum(1).mean())
                micro.append((cost.max(0) / cost.mean(0)).mean())
            print(
                f"{ranks} ranks, {name}: max ÷ mean over ranks of a step {np.mean(step):.3f} (worst of {sizes.steps}: "
                f"{max(step):.3f}), of a micro-step {np.mean(micro):.3f}"
            )


_MEMORY = """
import os, sys, time, torch
sys.path.insert(0, "benchmarks")
from mindspeed_mm.data import build_mm_dataset, build_mm_dataloader
from common import data_param
from pathlib import Path
torch.set_num_threads(1)

def private(pid):
    lines = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024

def children():
    return [int(p) for p in open(f"/proc/self/task/{os.getpid()}/children").read().split()]

model, file = Path(sys.argv[1]), Path(sys.argv[2])
param = data_param(model, file)["dataset_param"]
param["preprocess_parameters"]["image_max_pixels"] = 56 * 56
dataset = build_mm_dataset(param)
loader = build_mm_dataloader(dataset, {}, micro_batch_size=8, global_batch_size=8, num_workers=2)
rows, started = len(dataset), time.perf_counter()
for number, batch in enumerate(loader, start=1):
    if number * 8 % (rows // 10) < 8:
        used = [private(os.getpid())] + [private(pid) for pid in children()]
        print(f"{number * 8} {' '.join(f'{u:.0f}' for u in used)} {time.perf_counter() - started:.0f}", flush=True)
    if number * 8 >= rows:
        break
loader.close()
"""


def memory(folder: Path, sizes: Sizes) -> None:
    """Private memory of the run's process and its two workers over one epoch of many rows with an image each."""
    files = photographs(folder / "photographs", 200, (64, 64))
    file = folder / "many.jsonl"
    with open(file, "w", encoding="utf-8") as out:
        for index in range(sizes.rows):
            row = row_of(files[index % len(files)])
            row["messages"][1]["content"] = f"picture {index}"
            out.write(json.dumps(row) + "\n")
    command = [sys.executable, "-c", _MEMORY, str(model_dir(folder)), str(file)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in printed.strip().splitlines():
        rows, *used, seconds = line.split()
        print(f"after {rows} rows ({seconds} s): {', '.join(used)} MB (training process, workers)")


_START = """
import sys, time
sys.path.insert(0, "benchmarks")
# what a run has imported by then: the model's classes, and with them those of the processor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers import Qwen2TokenizerFast, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
from mindspeed_mm.data import build_mm_dataset, build_mm_dataloader
from mindspeed_mm.data.loading import loader as _loader
from common import data_param
from pathlib import Path

started = time.perf_counter()
param = data_param(Path(sys.argv[1]), Path(sys.argv[2]))["dataset_param"]
param["basic_parameters"].update({"cutoff_len": 2048, "packing": sys.argv[4] == "True"})
loader = build_mm_dataloader(
    build_mm_dataset(param), {}, micro_batch_size=1, global_batch_size=8, num_workers=int(sys.argv[3])
)
next(iter(loader))
print(time.perf_counter() - started)
loader.close()
"""


def start(folder: Path, sizes: Sizes) -> None:
    """Seconds to the first batch of many rows with images, after imports."""
    file = folder / "many.jsonl"
    if not file.exists():
        files = photographs(folder / "photographs", 200, (64, 64))
        file.write_text("".join(json.dumps(row_of(files[i % 200])) + "\n" for i in range(sizes.rows)), encoding="utf-8")
    for packed in (False, True):
        for workers in (0, 2):
            words = [sys.executable, "-c", _START, str(model_dir(folder)), str(file), str(workers), str(packed)]
            taken = [
                float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])
                for _ in range(min(3, sizes.rounds))
            ]
            print(f"{'packed' if packed else 'padded'}, {workers} workers: first batch after {median(taken):.2f} s")


if __name__ == "__main__":
    np.random.seed(0)
    main()
