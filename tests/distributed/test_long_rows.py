"""Long rows through the entry script: what four context-parallel ranks leave of one process's activations."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mindspeed_mm import accelerator
from mindspeed_mm.backends.engine import StepEngine
from tests.support.families import families
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, write_run_files
from tests.support.live_bytes import LiveBytes
from tests.support.packs import pack, run_on_batches
from tests.support.tiny_text import text_dir
from tests.support.workers import run_ranks

SHARE = 0.35
SIZES = {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
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


@functools.cache
def image_model_dir() -> Path:
    return families()["qwen3_vl"].make(Path(tempfile.mkdtemp(prefix="many-images-")))


def row_of_images(images: int) -> dict[str, Any]:
    """One conversation with images of 16 patches, 4 tokens each, and 3 tokens of text behind each image."""
    config = json.loads((image_model_dir() / "config.json").read_text())
    random = torch.Generator().manual_seed(0)
    text = torch.randint(8, 250, (images, 3), generator=random)
    one = torch.tensor([config["vision_start_token_id"], *[config["image_token_id"]] * 4])
    ids = torch.cat([one.expand(images, 5), text], dim=1).flatten().unsqueeze(0)
    is_text = torch.tensor([False] * 5 + [True] * 3).repeat(images)
    pixels = 3 * 2 * config["vision_config"]["patch_size"] ** 2
    row = {
        "input_ids": ids,
        "labels": ids.masked_fill(~is_text, -100),
        "mm_token_type_ids": (ids == config["image_token_id"]).long(),
        "pixel_values": torch.randn(images * 16, pixels, generator=random),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(images, 1),
    }
    return {**pack([[row]]), "row_ids": torch.tensor([0]), "num_rows": 1}


def train(words: list[str], script: str, batch: dict[str, Any]) -> tuple[int, int]:
    """Train, and return what forward and backward of a step take above the parameters, in bytes.

    Returns:
        the most bytes of tensors that were alive at once, and the growth of the process's resident set.
    """
    forward_backward, found = StepEngine.forward_backward, []

    def measured(*args: Any) -> None:
        device = accelerator.current()
        before = device.memory_allocated()
        with LiveBytes() as live:
            forward_backward(*args)
        found.append((live.peak, device.max_memory_allocated() - before))

    with mock.patch.object(StepEngine, "forward_backward", measured):
        run_on_batches(words, script, [batch])
    (peaks,) = found
    return peaks


def run(
    folder: Path, hf_dir: Path, script: str, batch: dict[str, Any], ranks: int, timeout: float, **flags: Any
) -> tuple[Any, list[tuple[int, int]]]:
    """A step, and of each rank the bytes that it took."""
    wrap = WRAP_TEXT if script == "pretrain_transformers.py" else list(families()["qwen3_vl"].wrap)
    files = write_run_files(folder, hf_dir, folder / "unused", fsdp2={"sub_modules_to_wrap": wrap})
    settings = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1, "mm_data": None}
    settings |= {"save": folder / "run", "no_save_optim": True, **flags}
    peaks = run_ranks(train, ranks, launch_flags(files, **settings), script, batch, timeout=timeout)
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
    what = (model_dir(), "pretrain_transformers.py", long_row(tokens))
    (loss, norm), ((alone, resident),) = run(tmp_path / "alone", *what, 1, timeout)
    ring = {"context_parallel_size": 4, "context_parallel_algo": "megatron_cp_algo"}
    figures, peaks = run(tmp_path / "ring", *what, 4, timeout, **ring)
    assert figures[0] == pytest.approx(loss, rel=1e-6) and figures[1] == pytest.approx(norm, rel=1e-5)
    shares = [(live / alone, grown / resident) for live, grown in peaks]
    print(f"{tokens} tokens: {alone / 2**20:.0f} MiB of tensors and {resident / 2**20:.0f} MiB in all; shares {shares}")
    assert max(live for live, _ in shares) <= SHARE
    if tokens > 50_000:  # fewer don't stand out from what the process holds anyway
        assert max(grown for _, grown in shares) <= SHARE


@pytest.mark.parametrize("algorithm", ["ulysses_cp_algo", pytest.param("megatron_cp_algo", marks=pytest.mark.full)])
@pytest.mark.parametrize("images", [pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_images_are_encoded_by_the_rank_that_has_them(images: int, algorithm: str, tmp_path: Path) -> None:
    what = (image_model_dir(), "pretrain_vlm.py", row_of_images(images))
    (loss, norm), ((alone, _),) = run(tmp_path / "alone", *what, 1, 300.0, use_torch_fsdp2=True)
    split = {"context_parallel_size": 4, "context_parallel_algo": algorithm, "use_torch_fsdp2": True}
    figures, peaks = run(tmp_path / "split", *what, 4, 300.0, **split)
    assert figures[0] == pytest.approx(loss, rel=1e-6) and figures[1] == pytest.approx(norm, rel=1e-5)
    shares = [live / alone for live, _ in peaks]
    print(f"{images} images: {alone / 2**20:.0f} MiB of tensors; shares {shares}")
    assert max(shares) <= SHARE
