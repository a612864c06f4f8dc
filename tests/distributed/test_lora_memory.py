"""What a run with adapters keeps in memory: optimizer state and gradients of what is trained, the base in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.live_bytes import LiveBytes
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool

STEPS = 3


def resident_bytes(words: list[str]) -> dict[str, int]:
    """Run the script; bytes of live tensors on this rank.

    Of the keys, `gradients` is what is alive after the backward pass of the second step and was not before its forward
    pass, `state` what the first optimizer step leaves; `adapters` and `base` are the storages of the parameters, and
    `trained` and `frozen` numbers of values.
    """
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend

    found: dict[str, int] = {}
    forward_backward, apply = FSDP2Backend.forward_backward, FSDP2Backend.apply
    steps = 0

    def measured_pass(self: Any, *args: Any) -> None:
        nonlocal steps
        steps += 1
        with LiveBytes() as live:
            forward_backward(self, *args)
            if steps == 2:
                found["gradients"] = live.alive

    def measured_step(self: Any, *args: Any) -> None:
        if steps == 1:
            for name, param in self._root.named_parameters():
                local = param._local_tensor if isinstance(param, DTensor) else param
                kind = ("adapters", "trained") if param.requires_grad else ("base", "frozen")
                assert param.requires_grad is ("lora_" in name)
                found[kind[0]] = found.get(kind[0], 0) + local.untyped_storage().nbytes()
                found[kind[1]] = found.get(kind[1], 0) + local.numel()
        with LiveBytes() as live:
            apply(self, *args)
            if steps == 1:
                found["state"] = live.alive

    with (
        mock.patch.object(FSDP2Backend, "forward_backward", measured_pass),
        mock.patch.object(FSDP2Backend, "apply", measured_step),
    ):
        run_entry(words)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, id="2")])
def test_only_what_is_trained_has_gradients_and_state(
    world: int, ranks1: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    """Gradients 4 bytes a trained value, AdamW's state 8, within 10 %; the base 2 bytes a weight, in bf16."""
    hf_dir = wide_qwen3_dir(tmp_path / "hf")
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=5, images=False)
    files = write_run_files(
        tmp_path / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT, "param_dtype": "bf16"}
    )
    words = launch_flags(
        files,
        micro_batch_size=1,
        global_batch_size=4,
        train_iters=STEPS,
        lora_target_modules="all-linear",
        lora_r=16,
        init_model_with_meta_device=True,
    )
    for found in {1: ranks1, 2: ranks2}[world].run(resident_bytes, words, timeout=120):
        trained, frozen = found["trained"], found["frozen"]
        assert found["adapters"] == pytest.approx(4 * trained, rel=0.01)
        assert found["base"] == pytest.approx(2 * frozen, rel=0.01)
        assert 4 * trained <= found["gradients"] <= 1.1 * 4 * trained
        assert 8 * trained <= found["state"] <= 1.1 * 8 * trained


def wide_qwen3_dir(path: Path) -> Path:
    """Wide enough that adapters weigh more than what else a step keeps."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.support.tiny_text import text_dir

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False}
    return text_dir(path, Qwen3ForCausalLM, Qwen3Config, sizes)
