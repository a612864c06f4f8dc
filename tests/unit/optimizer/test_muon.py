"""Muon on one process: beside torch's own, and which parameters it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.optimizer.build import build_optimizer
from mindspeed_mm.optimizer.muon import Muon, matrix_names, orthogonalize
from mindspeed_mm.utils.errors import ConfigError
from tests.support.runs import run_of

SHAPES = ((8, 16), (16, 8), (12, 12), (1, 5))


def trained(kind: str, steps: int = 4, **options: Any) -> list[torch.Tensor]:
    """Weights after steps with random gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "ns_steps": 5}
    if kind == "torch":
        optimizer: Any = torch.optim.Muon(
            params, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **settings, **options
        )
    else:
        group = {"params": params, "orthogonalized": True, "weight_decay": 0.1}
        optimizer = Muon([group], **settings, **options)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return [param.detach() for param in params]


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_a_matrix_moves_as_torchs_own_muon_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes in bfloat16 whatever the parameters are; told not to, it shows the same to the last digits."""
    found, expected = trained("ours"), trained("torch")
    assert distance(found, expected) < 5e-3 and distance(found, trained("ours", steps=1)) > 5e-2
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    exact = trained("torch")
    assert distance(expected, exact) > 1e-4
    assert distance(trained("ours", dtype=torch.float32), exact) < 2e-6


def test_stacked_matrices_are_orthogonalised_one_by_one() -> None:
    stack = torch.randn(3, 6, 4)
    stack[1] = 0  # an expert without tokens
    found = orthogonalize(stack, 5, torch.float32)
    torch.testing.assert_close(found, torch.stack([orthogonalize(m, 5, torch.float32) for m in stack]))
    assert not found[1].any()
    singular = torch.linalg.svdvals(found[[0, 2]])
    assert float(singular.min()) > 0.6 and float(singular.max()) < 1.3


class Parts(nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(4, 4)})
        self.conv = nn.Conv1d(4, 4, 2)
        self.layer, self.frozen = nn.Linear(4, 6), nn.Linear(4, 4).requires_grad_(False)
        self.norm, self.scale_shift_table = nn.LayerNorm(4), nn.Parameter(torch.zeros(2, 4))
        self.experts = Experts()
        self.out, self.lm_head = nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)
        self.first, self.tied = nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embed_tokens.weight


class Experts(nn.Module):
    """Stacked experts, marked as transformers' decorator marks them."""

    def __init__(self) -> None:
        super().__init__()
        self._is_expert_parallel = True
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 6))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(2, 6))


def test_which_parameters_are_matrices() -> None:
    model = Parts()
    inner = {"layer.weight", "experts.gate_up_proj", "first.weight"}
    assert matrix_names(model) == inner | {"out.weight"}
    assert matrix_names(model, model.out) == inner


def test_groups_keep_decay_and_rates(said: list[str]) -> None:
    flags = {"lr_scale_modules": ["layer"], "lr_mult": 0.5, "weight_decay_exclude_modules": ["experts"]}
    optimizer = build_optimizer(Parts(), run_of(use_torch_fsdp2=True, optimizer="muon", **flags).optimizer)
    found = {
        name: (group["orthogonalized"], group["wd_mult"], group["lr_mult"])
        for group in optimizer.param_groups
        for name in group["names"]
    }
    assert found["layer.weight"] == (True, 1.0, 0.5) and found["layer.bias"] == (False, 0.0, 0.5)
    assert found["experts.gate_up_proj"] == (True, 0.0, 1.0) and found["lm_head.weight"] == (False, 1.0, 1.0)
    assert "--optimizer muon: 4 weights are orthogonalised, 11 other parameters use AdamW" in said


def test_the_megatron_backend_names_what_it_has() -> None:
    with pytest.raises(ConfigError, match="steps adam, adam8bit and sgd; write one of them, or add --use-torch-fsdp2"):
        run_of(optimizer="muon")
