"""Log-probabilities of target tokens beside the loss, against transformers' logits and log_softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mindspeed_mm.models.transformers_model import TransformersModel
from tests.support.tiny import tiny_qwen3_dir


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 300, (3, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :7], labels[1, 2:5] = -100, -100
    return ids, labels


def expected(hf_dir: Path, each: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities by plain transformers, and the gradients of their sum, weighted with `each`."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    ids, labels = batch()
    found = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)[labels[:, 1:] != -100]
    (found * each).sum().backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss_type", ["default", "square_loss"])
@pytest.mark.parametrize("mode", [{}, {"compute_mode": "chunk", "chunk_size": 2}, {"max_logits_mib": 1e-2}])
def test_equal_transformers(mode: dict[str, Any], loss_type: str, tmp_path: Path) -> None:
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=1)
    ids, labels = batch()
    each = torch.linspace(-1, 2, int((labels[:, 1:] != -100).sum()))
    values, gradients = expected(hf_dir, each)

    model = TransformersModel({"init_from_hf_path": str(hf_dir), "loss_cfg": {"loss_type": loss_type, **mode}})
    plain = model(ids, labels)
    assert isinstance(plain, dict) and "log_probabilities" not in plain
    output = model(ids, labels, outputs=True)
    assert isinstance(output, dict)
    found = output["log_probabilities"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output["loss"], plain["loss"], rtol=1e-6, atol=0)
    (found * each).sum().backward()
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        output = model(ids, labels, outputs=True)
    assert isinstance(output, dict) and not output["log_probabilities"].requires_grad
