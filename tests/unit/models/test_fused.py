"""Fused kernels in the layers of a model: which layers get them, and what they compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.nn.functional import rms_norm, silu

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.fused import FusedKernels, LigerKernels, NPUFusedKernels
from mindspeed_mm.configs.flags.model import FusedKernelArguments
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers import fused
from mindspeed_mm.models.transformers.meta_model import build_meta_model, config_for
from tests.support.fake_accelerator import FakeAccelerator
from tests.support.families import families
from tests.support.plain_kernels import PlainKernels

ROOT = Path(__file__).resolve().parents[3]
ALL = FusedKernelArguments(use_fused_rmsnorm=True, use_fused_swiglu=True, use_fused_rotary_pos_emb=True)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": None}


def model_of(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def results(model: Any) -> dict[str, torch.Tensor]:
    """Logits and gradients of a batch."""
    ids = torch.arange(22).view(2, 11)
    logits = model(input_ids=ids, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def fuse(model: Any, kernels: FusedKernels | None, flags: FusedKernelArguments = ALL) -> list[str]:
    """Let a model use kernels; what was noticed."""
    device = FakeAccelerator()
    with (
        mock.patch.object(accelerator, "current", lambda: device),
        mock.patch.object(device, "fused_kernels", lambda: kernels),
        mock.patch.object(fused, "notice") as notice,
    ):
        fused.use_fused_kernels(model, flags)
    return [call.args[0] for call in notice.call_args_list]


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


#: of a layer: norms, gated MLPs, rotations
CALLS = {
    "Llama": {"norm": 2 * 2 + 1, "gate": 2, "rotary": 2},
    "Qwen2": {"norm": 2 * 2 + 1, "gate": 2, "rotary": 2},
    "Qwen3": {"norm": 2 * 4 + 1, "gate": 2, "rotary": 2},
    "Mistral": {"norm": 2 * 2 + 1, "gate": 2, "rotary": 2},
}


@pytest.mark.parametrize("kind", CALLS)
def test_layers_that_compute_as_llama_do(kind: str) -> None:
    expected, model, kernels = results(model_of(kind)), model_of(kind), PlainKernels()
    names = {path: type(module).__name__ for path, module in model.named_modules()}
    assert fuse(model, kernels) == []
    found = results(model)
    assert kernels.calls == CALLS[kind]
    assert_alike(found, expected)
    assert {path: type(module).__name__ for path, module in model.named_modules()} == names
    before = kernels.calls.copy()
    results(model_of(kind))  # the classes of transformers are as they were
    assert kernels.calls == before


def test_other_layers_stay_as_they_are() -> None:
    """Gemma's norm adds one to its weight, and its activation is another."""
    model, kernels = model_of("Gemma2"), PlainKernels()
    expected = results(model_of("Gemma2"))
    noticed = fuse(model, kernels)
    found = results(model)
    assert kernels.calls.keys() <= {"rotary"}
    assert_alike(found, expected)
    assert any(
        said.startswith("--use-fused-rmsnorm: no effect here: no layer of Gemma2ForCausalLM") for said in noticed
    )


def test_a_device_without_them_says_so() -> None:
    model = model_of("Llama")
    only = FusedKernelArguments(use_fused_swiglu=True)
    assert fuse(model, None, only) == [
        "--use-fused-swiglu: no effect here: this machine computes on cpu, with transformers' own kernels"
    ]
    assert fuse(model, None, FusedKernelArguments()) == []


#: families of which no layer computes as Llama's do; the page on performance names them
WITHOUT = {"gemma4", "gemma4_moe", "gpt_oss", "llama4", "step3p7", "whisper"}


@pytest.mark.full
@pytest.mark.parametrize("name", families())
def test_families(name: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(families()[name].make(tmp_path / "hf"))
    model_class: Any = ModelHub.get(None, config)
    model, kernels = build_meta_model(model_class, config_for(model_class, config)), PlainKernels()
    noticed = fuse(model, kernels)
    assert (len(noticed) == 3) is (name in WITHOUT)


class AscendOperators:
    """torch_npu's operators, as its reference describes them."""

    def npu_rms_norm(self, x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, gamma.shape, gamma, epsilon), (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()

    def npu_swiglu(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        gate, up = x.chunk(2, dim)
        return silu(gate) * up

    def npu_rotary_mul(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        assert cos.shape[1] == 1 and cos.shape[2:] == x.shape[2:]
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


def test_the_kernels_of_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch.ops, "npu", AscendOperators(), raising=False)
    expected, model = results(model_of("Qwen3")), model_of("Qwen3")
    assert fuse(model, NPUFusedKernels()) == []
    assert_alike(results(model), expected)


def compare_liger() -> None:
    """By Triton's interpreter, with what it lacks: conversion of floats, and CUDA's library of functions."""
    import importlib

    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    def converted(x: Any) -> Any:
        if type(x) is not float:
            return convert(x)
        handle = interpreter.TensorHandle(np.array([x], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    convert, interpreter._implicit_cvt = interpreter._implicit_cvt, converted
    importlib.import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: language.math.rsqrt(x)
    expected, model = results(model_of("Qwen3")), model_of("Qwen3")
    assert fuse(model, LigerKernels()) == []
    assert_alike(results(model), expected)


@pytest.mark.full
def test_liger_computes_as_transformers() -> None:
    """In a process of its own: Triton's functions are interpreted or compiled from its first import on."""
    for package in ("triton", "liger_kernel"):
        pytest.importorskip(package)
    command = [sys.executable, "-c", f"import {__name__} as test; test.compare_liger()"]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, check=True)
