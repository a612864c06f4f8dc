"""Samples per second of our loop and of the HF Trainer on the same rows, whose lengths are log-normal.

    python benchmarks/samples_per_second.py                       # text alone and with images, one process and two
    python benchmarks/samples_per_second.py --rows 500 --rounds 3 --ranks 1 --media text
    python benchmarks/samples_per_second.py --trainer-python llamafactory=PYTHON ms-swift=PYTHON

Every run is processes of its own, which train on every row once after some steps that warm them up; the contenders'
runs alternate, and medians are compared. Rows are processed before: what is measured is the step, and the choice and
the joining of rows. Ours pads rows as they come, pads rows of like length, and packs them; the Trainer does so as its
default is, and grouped by length, once more with what ours sets on the host (products and memory); LLaMA-Factory and
ms-swift, where a Python is given that has them (see other_trainers.py), pack too. Ours has compiled blocks, too,
measured once they are compiled. Model, weights, optimizer, rows, and rows in a padded micro-batch are the same.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

WARM_UP = 3  # steps
MICRO_BATCH = 8  # padded rows
CAPACITY = 1024  # tokens of a pack
MEDIAN, SPREAD, LONGEST = 90, 0.7, 600  # tokens of a row: the mean is 115
COMPILED = "compiled"
OUR_SETTINGS = "with our settings"  # of the host: what multiplies float32 matrices, how memory is kept
CONTENDERS = (
    "ours padded",
    "ours padded compiled",
    "ours grouped",
    "ours packed",
    "ours packed compiled",
    "Trainer default",
    "Trainer grouped",
    f"Trainer grouped {OUR_SETTINGS}",
)
#: (contender, the one that it is compared with, the largest ratio of their times; None: there is no target)
COMPARED: tuple[tuple[str, str, float | None], ...] = (
    ("ours packed", "Trainer default", 0.8),
    ("ours packed", "Trainer grouped", 0.95),
    ("ours packed", f"Trainer grouped {OUR_SETTINGS}", None),
    ("ours packed compiled", f"Trainer grouped {OUR_SETTINGS}", None),
    ("ours packed compiled", "ours packed", 0.9),
    ("ours padded compiled", "ours padded", 0.9),
)


def main() -> None:
    """Run the contenders in turn, and print their medians and the ratios of packed steps to the Trainer's."""
    from common import add_smallest, median
    from other_trainers import WAYS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--media", choices=["text", "images"], nargs="+", default=["text", "images"])
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--trainer-python", nargs="+", default=[], metavar="TRAINER=PYTHON", type=other_trainer)
    parser.add_argument("--worker", choices=CONTENDERS)
    parser.add_argument("--folder", type=Path)
    add_smallest(parser)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options.folder, options.rows)
        return
    if options.smallest:
        options.rows, options.rounds, options.ranks, options.media = 48, 1, [1], ["images"]
        options.contenders = ("ours packed", "ours packed compiled", "Trainer grouped")
    pythons = dict(options.trainer_python)
    names = [*options.contenders, *(f"{trainer} {way}" for trainer in pythons for way in WAYS[trainer])]
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="samples-per-second-"))
    for media in options.media:
        make_rows(folder / media, options.rows, with_images=media == "images", smallest=options.smallest)
        for ranks in options.ranks:
            print(f"{media}, {ranks} process{'es' * (ranks > 1)}, {options.rows} rows:")
            found: dict[str, list[Rates]] = {name: [] for name in names}
            for _ in range(options.rounds):
                for name in list(found):
                    try:
                        found[name].append(samples_per_second(name, folder / media, options.rows, ranks, pythons))
                    except OtherTrainerError as error:
                        del found[name]
                        print(f"  {name}: not run: {error}")
            print_medians({name: Rates(*map(median, zip(*rates))) for name, rates in found.items()})


def other_trainer(word: str) -> tuple[str, str]:
    """Read a trainer and the Python that has it."""
    from other_trainers import WAYS

    trainer, _, python = word.partition("=")
    if trainer not in WAYS or not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"'{word}': expected TRAINER=PYTHON with a trainer of {', '.join(WAYS)}")
    return trainer, python


class OtherTrainerError(Exception):
    """A trainer in an environment of its own ended with an error, of which this is the last line."""


def print_medians(medians: dict[str, Rates]) -> None:
    """Print what contenders reach, and the ratios of their times."""
    for name, rate in medians.items():
        print(f"  {name}: {rate.clock:.1f} samples per second, {rate.processor:.1f} per second of the processor")
    for name, other, target in COMPARED:
        if {name, other} <= medians.keys():
            ratio = Rates(*(theirs / own for theirs, own in zip(medians[other], medians[name])))
            print(f"  time of {name} ÷ {other}: {ratio.clock:.3f}, of the processor {ratio.processor:.3f}", end="")
            print("" if target is None else f" (target <= {target})", flush=True)


class Rates(NamedTuple):
    """Samples per second of all processes, and per second of the processor, which other load changes less."""

    clock: float
    processor: float


def make_rows(folder: Path, count: int, *, with_images: bool, smallest: bool) -> None:
    """Write the model of common.py, and rows of a question, 0, 1 or 2 images, and an answer of most of the tokens."""
    from common import WORDS, prepare

    _, data_file = prepare(folder, rows=64, smallest=smallest)
    pictures = [row["images"] for row in json.loads(data_file.read_text())]
    rng, rows = random.Random(1), []
    for number in range(count):
        images = pictures[number % len(pictures)] if with_images else []
        tokens = min(LONGEST, max(8, round(rng.lognormvariate(0, SPREAD) * MEDIAN)))
        words = [rng.choice(WORDS) for _ in range(max(2, tokens // 2))]  # a word is about two tokens
        question, answer = words[: len(words) // 4], words[len(words) // 4 :]
        messages = [{"role": "user", "content": "<image>" * len(images) + " ".join(question)}]
        rows.append({"messages": [*messages, {"role": "assistant", "content": " ".join(answer)}], "images": images})
    data_file.with_name("rows.json").write_text(json.dumps(rows))


def samples_per_second(name: str, folder: Path, rows: int, ranks: int, pythons: Mapping[str, str]) -> Rates:
    """One run of a contender.

    Raises:
        OtherTrainerError: it is none of ours, or of transformers, and could not run.
    """
    trainer, way = name.split(" ", 1)
    words = [str(Path(__file__).resolve()), "--worker", name, "--folder", str(folder), "--rows", str(rows)]
    if trainer in pythons:
        sizes = {"--micro-batch": MICRO_BATCH, "--capacity": CAPACITY, "--warm-up": WARM_UP}
        words = [str(Path(__file__).with_name("other_trainers.py")), trainer, way, str(folder)]
        words += [str(word) for pair in sizes.items() for word in pair]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [pythons.get(trainer, sys.executable), *launcher, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    found = [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines() if line.startswith("found ")]
    if len(found) != ranks:
        if trainer in pythons:
            raise OtherTrainerError(last_error(done.stderr))
        raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    samples = sum(each["samples"] for each in found)
    return Rates(*(samples / max(each[of] for each in found) for of in ("seconds", "processor")))


def last_error(output: str) -> str:
    """Return the last line of a process's output that names an exception, else the last line."""
    lines = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    return next(
        (line for line in reversed(lines) if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)), lines[-1]
    )


def run_worker(name: str, folder: Path, rows: int) -> None:
    """Train as a contender does, and print what this rank has done in which time."""
    import torch

    torch.set_num_threads(1)
    whose, how, *_ = name.split(" ")
    which = partial(train_ours, how, COMPILED in name) if whose == "ours" else partial(train_trainer, how)
    run = partial(which, has_our_settings=True) if OUR_SETTINGS in name else which
    tokens, began, ended = run(folder, rows)
    dataset = dataset_of(folder)
    in_all = sum(size.tokens for number in range(rows) for size in dataset.measure(number))
    # rows of the mean length: which of them come first, and warm up, depends on the contender
    found = {"samples": tokens / in_all * rows, "seconds": ended[0] - began[0], "processor": ended[1] - began[1]}
    assert sys.__stdout__ is not None
    sys.__stdout__.write(f"found {json.dumps(found)}\n")  # at once: other ranks write to the same pipe
    sys.__stdout__.flush()


def clocks() -> tuple[float, float]:
    """Seconds of the clock and of the processor."""
    return time.perf_counter(), time.process_time()


def dataset_of(folder: Path, **basic: Any) -> Any:
    """The package's data set of the rows."""
    from common import data_param

    from mindspeed_mm.data import build_mm_dataset

    param = data_param(folder / "hf", folder / "data" / "rows.json")["dataset_param"]
    param["basic_parameters"].update({"cutoff_len": CAPACITY, **basic})
    return build_mm_dataset(param)


Result = tuple[int, tuple[float, float], tuple[float, float]]


def train_ours(how: str, is_compiled: bool, folder: Path, rows: int) -> Result:
    """Our loop, over the micro-batches that our loader makes of the rows.

    A compiled model goes through all of them once before, so that what is measured is no compilation.

    Returns:
        tokens of this rank's rows after those that warmed up, and `clocks()` before and after them.
    """
    from common import launch_words, write_files
    from our_loop import OurLoop

    from mindspeed_mm.data import build_mm_dataloader
    from mindspeed_mm.data.adapter import DefaultAdapter

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    size = 1 if how == "packed" else MICRO_BATCH
    loaders = [
        build_mm_dataloader(
            dataset_of(folder, packing=how == "packed"),
            {"sampler_type": "LengthGroupedSampler"} if how == "grouped" else {},
            micro_batch_size=size,
            global_batch_size=size * ranks,
            dp_rank=each,
            dp_size=ranks,
        )
        for each in range(ranks)
    ]
    batches = [dict(each[rank]) for each in epoch(loaders, rows)]
    with tempfile.TemporaryDirectory(prefix="run-") as own:
        # whole on each rank, as under the Trainer
        files = write_files(Path(own), folder / "hf", folder / "data" / "rows.json", sharding="1")
        flags = {"torch_compile": is_compiled}
        words = launch_words(
            files, None, micro_batch_size=size, global_batch_size=size * ranks, train_iters=100_000, **flags
        )
        loop = OurLoop("pretrain_transformers.py", words, batches, size, DefaultAdapter())
    began = ended = clocks()
    before = len(batches) * is_compiled

    def before_step(done: int) -> bool:
        nonlocal began, ended
        if done == before + WARM_UP:
            began = clocks()
        ended = clocks()
        return done < before + len(batches)

    loop.train(before_step)
    of_tokens = "documents" if how == "packed" else "attention_mask"
    return sum(int((batch[of_tokens] > 0).sum()) for batch in batches[WARM_UP:]), began, ended


def epoch(loaders: list[Any], rows: int) -> Iterator[tuple[Any, ...]]:
    """Micro-batches of all ranks until every row was there, but for a last few; as many on each rank."""
    taken = 0
    for batches in zip(*loaders):
        taken += sum(int(batch["num_rows"]) for batch in batches)
        yield batches
        if taken >= rows - MICRO_BATCH * len(loaders):
            return


def train_trainer(how: str, folder: Path, rows: int, *, has_our_settings: bool = False) -> Result:
    """The HF Trainer over the processed rows, padded to the longest of a micro-batch.

    Args:
        how: "grouped": by length.
        folder: of the rows.
        rows: their number.
        has_our_settings: what our loop chooses on the host: which library multiplies, and that freed memory is kept.

    Returns:
        see `train_ours`.
    """
    import torch
    from step_overhead import trainer_arguments
    from transformers import Qwen2_5_VLForConditionalGeneration, Trainer, TrainerCallback

    from mindspeed_mm import accelerator

    dataset = dataset_of(folder)
    samples = [dict(dataset[number]) for number in range(rows)]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    steps = rows // (MICRO_BATCH * ranks)
    times: list[tuple[float, float]] = []

    tokens: list[int] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = padded(rows)
        tokens.append(int(batch["attention_mask"].sum()))
        return batch

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(clocks())

    arguments = trainer_arguments(folder, 1, steps, MICRO_BATCH)
    arguments.train_sampling_strategy = "group_by_length" if how == "grouped" else "random"
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "hf", dtype=torch.float32)
    if has_our_settings:
        accelerator.current().prepare_steps([model])
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=samples,  # type: ignore[arg-type]
        data_collator=collate,
        callbacks=[Clock()],
    )
    with redirect_stdout(io.StringIO()):
        trainer.train()
    return sum(tokens[WARM_UP:steps]), times[WARM_UP - 1], times[-1]


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A micro-batch of processed rows."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    batch = {
        key: pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=value)
        for key, value in (("input_ids", 0), ("labels", -100), ("mm_token_type_ids", 0))
        if key in samples[0]
    }
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    for key in ("pixel_values", "image_grid_thw"):
        if held := [sample[key] for sample in samples if key in sample]:
            batch[key] = torch.cat(held)
    return batch


if __name__ == "__main__":
    main()
