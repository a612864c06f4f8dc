"""What a prepared micro-batch leaves with a model for its next forward pass, and for no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.models.common.placeholders import PlaceMask
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.device import OnHost
from mindspeed_mm.utils.errors import DataError
from tests.support.packs import make_samples, pack


@pytest.fixture
def vl_model(qwen2_5_vl_dir: Path) -> TransformersModel:
    return TransformersModel({"init_from_hf_path": str(qwen2_5_vl_dir)})


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample as the transformers model takes it, with nothing prepared."""
    names = ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw")
    return {name: sample[name] for name in names}


@torch.no_grad()
def test_a_call_after_a_step_is_as_before_it(vl_model: TransformersModel, qwen2_5_vl_dir: Path) -> None:
    """Answers are generated with the model that is trained: grids and places of the step's rows aren't theirs."""
    samples = make_samples(qwen2_5_vl_dir)
    first, second = [s for s in samples if "pixel_values" in s and "video_grid_thw" not in s][:2]
    expected = vl_model.model(**plain(second)).logits
    ready = vl_model.prepare(pack([[first, first]]))
    assert isinstance(ready["image_grid_thw"], OnHost)
    vl_model(**ready)
    assert torch.equal(vl_model.model(**plain(second)).logits, expected)


def test_media_of_other_rows_are_refused(vl_model: TransformersModel, qwen2_5_vl_dir: Path) -> None:
    first = next(s for s in make_samples(qwen2_5_vl_dir) if "pixel_values" in s)
    ready = vl_model.prepare(pack([[first]]))
    ready["media_places"]["image"] = ready["media_places"]["image"][1:]
    with pytest.raises(DataError, match=r"placeholder tokens for \d+ features of its media"):
        vl_model(**ready)


def test_a_mask_with_places_gives_what_a_plain_one_gives() -> None:
    """Values and gradients, of embeddings that are filled and of rows that features are added to."""
    mask = torch.tensor([[True, False, True], [False, False, True]])
    known = PlaceMask.of(mask, mask.flatten().nonzero().squeeze(1))
    results = []
    for used in (mask, known):
        hidden, features = torch.arange(12.0).view(2, 3, 2), torch.arange(6.0).view(3, 2)
        hidden.requires_grad_(), features.requires_grad_()
        filled = hidden.masked_scatter(used.unsqueeze(-1)[..., 0].unsqueeze(-1), features)
        copied = hidden.clone()
        copied[used, :] = copied[used, :] + features
        (filled.square() * copied).sum().backward()
        results.append((filled, copied, hidden.grad, features.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not isinstance(known & mask, PlaceMask) and known[..., 0].shape == (2,)
