"""Positions made on the host are those that transformers' models compute for themselves in a forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.configs.data_config import CollateParam
from mindspeed_mm.data.loading.collate import Collator
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.support.families import families
from tests.support.family_case import FamilyCase
from tests.support.reference import load_plain

# towers with grids, or rates of videos: the rest counts its tokens; others than the first by name (pytest -m full)
NAMES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v", "ernie4_5_vl_moe", "qwen2_5_omni", "qwen3_omni_moe")


class SeenError(Exception):
    """Positions were seen; the rest of the forward pass isn't needed."""


def positions_of_transformers(model: Any, batch: dict[str, Any]) -> torch.Tensor | None:
    """`position_ids` of the language model in a forward pass of the plain model; None: consecutive ones."""
    seen: list[torch.Tensor | None] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("position_ids"))
        raise SeenError

    hook = model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    with pytest.raises(SeenError):
        model(**batch)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n != NAMES[0] else []) for n in NAMES])
def test_padded_rows(name: str, tmp_path: Path) -> None:
    """Of images, of videos and of neither, at either end of the padding."""
    case = FamilyCase(name, tmp_path, families()[name])
    model, reference = TransformersModel({"init_from_hf_path": str(case.hf_dir)}), load_plain(case.hf_dir)
    collate = Collator(case.dataset.adapter, CollateParam(), case.dataset)
    text, image, video = (
        next(s for s in case.samples if media_of(case, s) == kinds) for kinds in (set(), {"image"}, {"video"})
    )
    longer = [s for s in case.samples if not media_of(case, s) and len(s["input_ids"]) > len(text["input_ids"])]
    pairs = [[image, text], [text, video], *([text, other] for other in longer[:1])]
    if name != "glm4v":  # transformers refuses both in one batch
        pairs.append([image, video])
    for samples in pairs:
        batch = collate(samples)
        for key in ("num_rows", "rows_left_out"):
            del batch[key]
        assert not batch["attention_mask"].all()  # rows of different lengths
        for padded in (batch, padded_on_the_left(batch)):
            rows, length = batch["input_ids"].shape
            inputs = {key: value for key, value in padded.items() if key != "labels"}
            pair = model.prepare(padded).get("position_ids"), positions_of_transformers(reference, inputs)
            found, expected = (torch.arange(length).expand(3, rows, -1) if p is None else p.float() for p in pair)
            assert torch.equal(found.float(), expected.float())


def media_of(case: FamilyCase, sample: dict[str, Any]) -> set[str]:
    """Kinds of media in a sample."""
    return {kind for kind, keys in case.dataset.adapter.media_keys.items() if keys[0] in sample}


def padded_on_the_left(batch: dict[str, Any]) -> dict[str, Any]:
    """The same rows with their padding in front."""
    mask = batch["attention_mask"]
    moved = {}
    for key, value in batch.items():
        is_row = isinstance(value, torch.Tensor) and value.shape == mask.shape
        moved[key] = torch.stack([r.roll(int((m == 0).sum())) for r, m in zip(value, mask)]) if is_row else value
    return moved
