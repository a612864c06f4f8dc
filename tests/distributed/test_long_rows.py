"""Long rows through the entry script: what four context-parallel ranks leave of one process's activations."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3Config, Qwen3ForCausalLM

from mindspeed_mm import accelerator
from mindspeed_mm.backends.engine import StepEngine
from mindspeed_mm.tasks.train import language
from tests.support.families import families
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.live_bytes import LiveBytes
from tests.support.packs import pack, run_on_batches
from tests.support.tiny import words
from tests.support.tiny_text import text_dir
from tests.support.workers import run_ranks

SHARE = 0.35
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 200_000,
}


@functools.cache
def model_dir() -> Path:
    return text_dir(Path(tempfile.mkdtemp(prefix="long-rows-")) / "hf", Qwen3ForCausalLM, Qwen3Config, SIZES)


def long_row(tokens: int) -> dict[str, Any]:
    """One document, with every tenth token a target."""
    ids = torch.randint(8, 250, (1, tokens), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(tokens) % 10 > 0, -100)}
    return {**pack([[row]]), "row_ids": torch.tensor([0]), "num_rows": 1}


@contextlib.contextmanager
def measured_steps() -> Iterator[list[tuple[int, int]]]:
    """Measure what forward and backward of a step take above the parameters and the prepared micro-batch, in bytes.

    Yields:
        for each step the most bytes of tensors that were alive at once, and the growth of the process's resident set.
    """
    forward_backward, get_batch = StepEngine.forward_backward, language.get_batch
    device, found = accelerator.current(), []

    def step(*args: Any) -> None:
        with contextlib.ExitStack() as measured:
            live, before = LiveBytes(), []

            def prepared(*of: Any) -> dict[str, Any]:
                batch = get_batch(*of)
                before.append(device.memory_allocated())
                measured.enter_context(live)
                return batch

            with mock.patch.object(language, "get_batch", prepared):
                forward_backward(*args)
        found.append((live.peak, device.max_memory_allocated() - before[0]))

    with mock.patch.object(StepEngine, "forward_backward", step):
        yield found


def train_on_batch(flags: list[str], script: str, batch: dict[str, Any]) -> tuple[int, int]:
    """Train a step on a micro-batch, and return what it took."""
    with measured_steps() as found:
        run_on_batches(flags, script, [batch])
    (step,) = found
    return step


def train(flags: list[str], script: str) -> tuple[int, int]:
    """Train a step on a data file, and return what it took."""
    with measured_steps() as found:
        run_entry(flags, script)
    (step,) = found
    return step


ONE_STEP = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1, "no_save_optim": True}


def run(
    folder: Path, batch: dict[str, Any], ranks: int, timeout: float, **flags: Any
) -> tuple[Any, list[tuple[int, int]]]:
    """A step of the text model, and of each rank the bytes that it took."""
    files = write_run_files(folder, model_dir(), folder / "unused", fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    given = launch_flags(files, **ONE_STEP, save=folder / "run", mm_data=None, **flags)
    peaks = run_ranks(train_on_batch, ranks, given, "pretrain_transformers.py", batch, timeout=timeout)
    return metrics_of(folder / "run"), peaks


@pytest.mark.parametrize(
    "tokens, timeout",
    [
        pytest.param(4_096, 60.0, id="4k"),
        pytest.param(16_384, 200.0, id="16k", marks=pytest.mark.full),
        pytest.param(100_000, 900.0, id="100k", marks=[pytest.mark.full, pytest.mark.timeout(1900)]),
    ],
)
def test_a_ring_of_four_takes_a_third_of_the_memory(tokens: int, timeout: float, tmp_path: Path) -> None:
    row = long_row(tokens)
    (loss, norm), ((alone, resident),) = run(tmp_path / "alone", row, 1, timeout)
    ring = {"context_parallel_size": 4, "context_parallel_algo": "megatron_cp_algo"}
    figures, peaks = run(tmp_path / "ring", row, 4, timeout, **ring)
    assert figures[0] == pytest.approx(loss, rel=1e-6) and figures[1] == pytest.approx(norm, rel=1e-5)
    shares = [(live / alone, grown / resident) for live, grown in peaks]
    print(f"{tokens} tokens: {alone / 2**20:.0f} MiB of tensors and {resident / 2**20:.0f} MiB in all; shares {shares}")
    assert max(live for live, _ in shares) <= SHARE
    if tokens > 50_000:  # fewer don't stand out from what the process holds anyway
        assert max(grown for _, grown in shares) <= SHARE


class Conversation:
    """A row with many images, and steps of `pretrain_vlm.py` on it.

    Each image becomes 16 patches, which the tower encodes to 4 tokens, and a word follows it; an answer ends the row.
    """

    def __init__(self, folder: Path, images: int) -> None:
        self._folder, self._rows = folder, folder / "rows" / "data.json"
        self._rows.parent.mkdir()
        self._family = families()["qwen3_vl"]
        self._hf_dir = self._family.make(folder / "hf")
        rng, pixels = random.Random(0), np.random.RandomState(0)
        names = [f"{number}.png" for number in range(min(images, 50))]
        for name in names:
            array = pixels.randint(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(array).save(self._rows.parent / name)
        question = "".join(f"<image>{words(rng, 1)}" for _ in range(images))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": words(rng, images)}]
        row = {"messages": messages, "images": [names[number % len(names)] for number in range(images)]}
        self._rows.write_text(json.dumps([row]), encoding="utf-8")

    def step(self, name: str, ranks: int, split_media: bool = True, **flags: Any) -> tuple[list[float], list[int]]:
        """Loss and gradient norm of a step, and of each rank the most bytes of tensors that were alive at once."""
        folder = self._folder / name
        keys = {"sub_modules_to_wrap": list(self._family.wrap)} | ({} if split_media else {"cp_split_media": False})
        files = write_run_files(folder, self._hf_dir, self._rows, fsdp2=keys)
        given = launch_flags(files, **ONE_STEP, save=folder / "run", **flags)
        peaks = run_ranks(train, ranks, given, "pretrain_vlm.py", timeout=600)
        (loss,), (norm,) = metrics_of(folder / "run")
        return [loss, norm], [live for live, _ in peaks]


@pytest.mark.parametrize(
    "images, ranks, limit, algorithms",
    [
        pytest.param(60, 2, 0.65, ["ulysses_cp_algo"], id="60"),
        pytest.param(
            1000,
            4,
            SHARE,
            ["ulysses_cp_algo", "megatron_cp_algo"],
            id="1000",
            marks=[pytest.mark.full, pytest.mark.timeout(1900)],
        ),
    ],
)
def test_images_are_encoded_in_parts(
    images: int, ranks: int, limit: float, algorithms: list[str], tmp_path: Path
) -> None:
    row = Conversation(tmp_path, images)
    (loss, norm), (alone,) = row.step("alone", 1)
    for algorithm in algorithms:
        flags = {"context_parallel_size": ranks, "context_parallel_algo": algorithm}
        figures, peaks = row.step(algorithm, ranks, **flags)
        shares = [peak / alone for peak in peaks]
        print(f"{images} images, {algorithm}: {alone / 2**20:.1f} MiB of tensors; shares {shares}", flush=True)
        assert figures[0] == pytest.approx(loss, rel=1e-6) and figures[1] == pytest.approx(norm, rel=1e-5)
        assert max(shares) <= limit
    if images == 1000:
        figures, whole = row.step("whole", ranks, split_media=False, **flags)
        print(f"each rank encodes all of them: shares {[peak / alone for peak in whole]}", flush=True)
        assert figures[0] == pytest.approx(loss, rel=1e-6) and max(peaks) < 0.7 * min(whole)
