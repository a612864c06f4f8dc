"""Loss types and chunked loss against plain cross-entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

from mindspeed_mm.models.common import head_loss
from mindspeed_mm.models.common.head_loss import HeadLoss
from mindspeed_mm.models.common.loss import (
    ChunkedCrossEntropy,
    LossOptions,
    finish_loss,
    select_targets,
    weighted_cross_entropy,
)
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.support.live_bytes import LiveBytes

VOCABULARY, HIDDEN = 37, 16


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Linear]:
    torch.manual_seed(0)
    hidden = torch.randn(4, 12, HIDDEN, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (4, 12))
    for row, first in enumerate((11, 10, 4, 0)):  # 1, 2, 8 and 11 targets
        labels[row, :first] = -100
    return hidden, labels, torch.nn.Linear(HIDDEN, VOCABULARY, bias=True)


def row_losses(hidden: torch.Tensor, labels: torch.Tensor, head: torch.nn.Linear) -> list[torch.Tensor]:
    rows = []
    for h, y in zip(hidden, labels, strict=True):
        each = F.cross_entropy(head(h[:-1]), y[1:], reduction="none", ignore_index=-100)
        rows.append(each[y[1:] != -100])
    return rows


EXPECTED = {
    "per_token_loss": lambda rows: torch.cat(rows).mean(),
    "default": lambda rows: torch.cat(rows).mean(),
    "token_loss": lambda rows: torch.cat(rows).mean(),
    "per_sample_loss": lambda rows: torch.stack([r.mean() for r in rows]).mean(),
    "square_loss": lambda rows: sum(r.sum() / len(r) ** 0.5 for r in rows) / sum(len(r) ** 0.5 for r in rows),
}


@pytest.mark.parametrize("chunk", [None, 1, 5, 1000])
@pytest.mark.parametrize("loss_type", EXPECTED)
def test_loss_types(loss_type: str, chunk: int | None) -> None:
    hidden, labels, head = batch()
    expected = EXPECTED[loss_type](row_losses(hidden, labels, head))
    expected_grads = torch.autograd.grad(expected, [hidden, head.weight, head.bias])

    targets = select_targets(labels, loss_type)  # type: ignore[arg-type]
    picked = hidden.flatten(0, 1)[targets.index]
    if chunk is None:
        total = weighted_cross_entropy(head(picked), targets.tokens, targets.weights)
    else:
        total = ChunkedCrossEntropy.apply(picked, head.weight, head.bias, targets.tokens, targets.weights, chunk)
    finished = finish_loss(total, targets.denominator, loss_type)  # type: ignore[arg-type]
    loss, denominator = finished["loss"], finished["denominator"]
    said = denominator if denominator is not None else finished["metrics"]["loss"][1]
    assert said is targets.denominator  # by it a step without targets is known
    if denominator is not None:
        loss = loss / denominator
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for found, wanted in zip(torch.autograd.grad(loss, [hidden, head.weight, head.bias]), expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss_type", ["per_token_loss", "per_sample_loss", "square_loss"])
def test_a_split_batch_adds_up(loss_type: str) -> None:
    hidden, labels, head = batch()
    expected = EXPECTED[loss_type](row_losses(hidden, labels, head))
    sums, denominators = [], []
    for rows in (slice(0, 1), slice(1, 4)):
        targets = select_targets(labels[rows], loss_type)  # type: ignore[arg-type]
        picked = hidden[rows].flatten(0, 1)[targets.index]
        sums.append(weighted_cross_entropy(head(picked), targets.tokens, targets.weights))
        denominators.append(targets.denominator)
    torch.testing.assert_close(sum(sums) / sum(denominators), expected, rtol=1e-6, atol=0)


def test_no_target_at_all() -> None:
    hidden, labels, head = batch()
    targets = select_targets(torch.full_like(labels, -100), "per_token_loss")
    for chunk in (None, 4):
        picked = hidden.flatten(0, 1)[targets.index]
        if chunk is None:
            total = weighted_cross_entropy(head(picked), targets.tokens, targets.weights)
        else:
            total = ChunkedCrossEntropy.apply(picked, head.weight, head.bias, targets.tokens, None, chunk)
        assert float(total.detach()) == 0.0
        assert float(targets.denominator) == 0.0
        grads = torch.autograd.grad(total, [head.weight, hidden])
        assert all(float(g.abs().sum()) == 0.0 for g in grads)


def test_chunks_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: sizes.append(a[0].shape[0]) or linear(*a))
    hidden, labels, head = batch()
    targets = select_targets(labels, "per_token_loss")
    picked = hidden.flatten(0, 1)[targets.index]
    ChunkedCrossEntropy.apply(picked, head.weight, head.bias, targets.tokens, None, 5)
    assert max(sizes) == 5
    assert sum(sizes) == len(targets.tokens) == 22


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**30])
def test_chunks_in_half_precision_keep_gradients_in_range(scale: float) -> None:
    """fp16: a sum over thousands of targets passes its largest number, and a part of it may pass its smallest.

    Gradients are made in the forward pass times about the factor that backward brings, whatever that is.
    """
    torch.manual_seed(0)
    rows, factor = 4096, scale / 4096
    hidden, head = torch.full((rows, 8), 24.0) + torch.randn(rows, 8), torch.nn.Linear(8, 4, bias=False)
    tokens = torch.randint(0, 4, (rows,))
    half = [hidden.half().requires_grad_(), head.weight.detach().half().requires_grad_()]
    whole = [tensor.detach().float().requires_grad_() for tensor in half]
    (weighted_cross_entropy(whole[0] @ whole[1].T, tokens, None) * factor).backward()
    about = torch.tensor(factor / 2)  # known on the device, and not exactly
    (ChunkedCrossEntropy.apply(*half, None, tokens, None, 512, about) * factor).backward()
    for found, expected in zip(half, whole, strict=True):
        if expected.grad.abs().max() > 65504:
            assert not found.grad.isfinite().all()  # the loss scale is too large, and must come to know it
        else:
            error = (found.grad.float() - expected.grad).norm() / expected.grad.norm()
            assert error < 5e-3


def test_frozen_head_gets_no_gradient() -> None:
    hidden, labels, head = batch()
    head.requires_grad_(False)
    targets = select_targets(labels, "per_token_loss")
    picked = hidden.flatten(0, 1)[targets.index]
    ChunkedCrossEntropy.apply(picked, head.weight, head.bias, targets.tokens, None, 5).backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_chunk_sizes() -> None:
    assert LossOptions().positions_per_chunk(4, 2**18, 2**10) is None  # 2**18 * 2**10 * 4 bytes are 1024 MiB
    assert LossOptions().positions_per_chunk(4, 2**18 + 1, 2**10) == 2**17 + 1  # two chunks of the same size
    assert LossOptions(max_logits_mib=1).positions_per_chunk(4, 1000, 2**20) == 1
    assert LossOptions(compute_mode="chunk", chunk_size=10).positions_per_chunk(4, 90, 7) == 40
    # dynamic: the largest power of two per row that keeps rows * chunk within the bound
    assert LossOptions(compute_mode="dynamic_chunk", chunk_size=100).positions_per_chunk(3, 90, 7) == 3 * 32
    assert LossOptions(compute_mode="dynamic_chunk", chunk_size=1).positions_per_chunk(3, 90, 7) == 3


def head_loss_of(options: LossOptions, *, with_dora: bool = False, frozen: bool = False) -> dict[str, Any]:
    """The loss of 512 targets through a head of 1024 tokens, its gradients, and what the head's call costs."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 257, 64, requires_grad=True), torch.randint(0, 1024, (2, 257))
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(64, 1024, bias=False)})
    if with_dora:
        config = peft.LoraConfig(target_modules=["head"], use_dora=True)
        model = peft.inject_adapter_in_model(config, model)  # type: ignore[assignment]
    head = model["head"].requires_grad_(not frozen)
    loss, targets = HeadLoss(head, options), select_targets(labels, "per_token_loss")
    with LiveBytes() as live:
        loss.expect(targets, 2)
        found = head(hidden)
    loss.expect(targets, 2)
    with LiveBytes() as unused, torch.no_grad():
        head(hidden)
    (found / 512).backward()
    weight = head.base_layer.weight if with_dora else head.weight
    return {"loss": found.detach(), "hidden": hidden.grad, "weight": weight.grad, "peak": live.peak} | {
        "operators": live.operators,
        "peak without gradients": unused.peak,
    }


def test_logits_above_a_size_are_computed_in_chunks() -> None:
    """Values are those of all logits at once, memory is that of a chunk, and below the size nothing changes."""
    whole, below = head_loss_of(LossOptions(max_logits_mib=1e3)), head_loss_of(LossOptions(max_logits_mib=2))
    chunked = head_loss_of(LossOptions(max_logits_mib=0.25))  # 2 MiB of logits
    torch.testing.assert_close(chunked["loss"], whole["loss"], rtol=1e-6, atol=0)
    for name in ("hidden", "weight"):
        assert (chunked[name] - whole[name]).norm() <= 1e-6 * whole[name].norm(), name
        assert torch.equal(below[name], whole[name])
    assert below["operators"] == whole["operators"]
    logits, weight, hidden = 512 * 1024 * 4, 1024 * 64 * 4, 512 * 64 * 4
    assert whole["peak"] >= 2 * logits  # and the log-probabilities
    assert chunked["peak"] <= 2 * logits / 8 + 2 * weight + hidden  # logits and log-probabilities of a chunk
    assert chunked["peak without gradients"] <= chunked["peak"] - weight
    frozen = head_loss_of(LossOptions(max_logits_mib=0.25), frozen=True)
    assert frozen["weight"] is None and torch.equal(frozen["hidden"], chunked["hidden"])
    assert frozen["peak"] <= chunked["peak"] - weight


def test_logits_with_magnitudes_of_adapters_stay_whole() -> None:
    """DoRA's layers compute more than a product, which a loss in chunks would leave out."""
    whole, chunked = (head_loss_of(LossOptions(max_logits_mib=size), with_dora=True) for size in (1e3, 0.25))
    assert torch.equal(whole["loss"], chunked["loss"]) and whole["peak"] == chunked["peak"]


_SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "pad_token_id": None}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None}


def save_tiny(kind: str, path: Path, **fields: Any) -> Path:
    """A text model of a few weights, large enough that a cap of 5 matters."""
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**_SIZES, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(path)
    return path


def test_models_that_scale_their_logits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the scale would apply to the loss: by a key that is known, or in the first forward pass."""
    scaled, plain = (save_tiny("Granite", tmp_path / str(scale), logits_scaling=scale) for scale in (8.0, 1.0))
    with pytest.raises(
        ConfigError, match=r"^GraniteForCausalLM changes its logits .*\(logits_scaling 8 of config.json"
    ):
        TransformersModel({"init_from_hf_path": str(scaled)})
    monkeypatch.setattr(head_loss, "_AFTER_THE_HEAD", ())
    for folder in (plain, scaled):
        model = TransformersModel({"init_from_hf_path": str(folder)})
        batch = model.prepare({"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]})
        if folder is plain:
            assert model(**batch)["loss"] > 0
            continue
        with pytest.raises(ConfigError, match=r"^GraniteForCausalLM changes its logits .*first forward pass"):
            model(**batch)


@pytest.mark.parametrize(
    "cfg", [{}, {"compute_mode": "chunk", "chunk_size": 3}, {"max_logits_mib": 1e-3}], ids=["whole", "chunk", "large"]
)
@pytest.mark.parametrize("each", [False, True])
def test_capped_logits_are_those_of_transformers(cfg: dict[str, Any], each: bool, tmp_path: Path) -> None:
    """Loss and every gradient, of all logits and of chunks, as a sum and for each token."""
    folder = save_tiny("Gemma2", tmp_path / "hf", final_logit_softcapping=5.0, head_dim=8)
    ids = torch.arange(24).view(2, 12)
    plain = transformers.Gemma2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = plain(input_ids=ids).logits
    assert 4.9 < logits.abs().max() <= 5.0
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    expected.sum().backward()
    model = TransformersModel({"init_from_hf_path": str(folder), "loss_cfg": cfg})
    output: Any = model(**model.prepare({"input_ids": ids, "labels": ids}), outputs=each)
    assert float(output["loss"].detach()) == pytest.approx(float(expected.detach().sum()), rel=1e-6)
    if each:
        assert torch.allclose(output["log_probabilities"], -expected, rtol=1e-5)
    output["loss"].backward()
    for (name, found), wanted in zip(model.model.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert (found.grad - wanted.grad).abs().max() <= 1e-5 * wanted.grad.abs().max(), name


def test_another_cap_than_that_of_config_is_refused(tmp_path: Path) -> None:
    """A model that caps its logits in its own way would be trained with another loss."""
    folder = save_tiny("Gemma2", tmp_path / "hf", final_logit_softcapping=5.0, head_dim=8)
    model = TransformersModel({"init_from_hf_path": str(folder)})
    model.model.config.final_logit_softcapping = 7.0
    batch = model.prepare({"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]})
    with pytest.raises(ConfigError, match=r"beside final_logit_softcapping of config\.json"):
        model(**batch)
