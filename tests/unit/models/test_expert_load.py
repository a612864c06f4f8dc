"""The tokens that are sent to each expert, and the figures that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_mm.models.common.expert_load import ExpertLoad, load_figures
from tests.unit.parallel.test_experts import model as meta_model


def model() -> Any:
    built = meta_model().to_empty(device="cpu")
    for number, parameter in enumerate(built.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    built.model.rotary_emb.inv_freq.zero_()
    return built


IDS = torch.arange(14).view(2, 7)


def expected(built: Any, is_token: torch.Tensor) -> torch.Tensor:
    logits = built(IDS, output_router_logits=True).router_logits
    chosen = [layer.topk(2).indices[is_token.flatten()] for layer in logits]
    return torch.cat([layer.flatten().bincount(minlength=6) for layer in chosen])


def test_padding_does_not_count() -> None:
    built = model()
    load, mask = ExpertLoad(built), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    for is_token in (mask, None):
        load.expect(is_token)
        built(IDS)
        routed = load.take()
        assert routed is not None
        whole = torch.ones_like(mask) if is_token is None else is_token
        assert routed.counts.tolist() == expected(built, whole).tolist()
        assert routed.counts.sum() == 3 * 2 * whole.sum()


def test_nothing_is_counted_unless_a_forward_pass_is_expected() -> None:
    built = model()
    load = ExpertLoad(built)
    built(IDS)
    assert load.take() is None
    load.expect(torch.ones(1, 3, dtype=torch.bool))  # of other positions than the experts run on
    built(IDS)
    assert load.take() is None


def test_a_model_without_experts_has_no_load() -> None:
    dense = torch.nn.Linear(2, 2)
    load = ExpertLoad(dense)
    assert not load.has_experts and not dense._forward_pre_hooks
    load.expect(None)
    assert load.take() is None


@pytest.mark.parametrize(
    ("counts", "figures"), [([2, 0, 4, 0, 0], [4, 1.2, 3, 1]), ([3, 3], [3, 3, 0, 1]), ([0, 0], [0, 0, 2, 1])]
)
def test_figures(counts: list[int], figures: list[float]) -> None:
    assert load_figures(torch.tensor(counts, dtype=torch.float64)).tolist() == pytest.approx(figures)
