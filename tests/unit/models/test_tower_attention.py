"""Encoders whose images are one long row: each image sees itself, and the lengths are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.accelerator.attention import Documents
from mindspeed_mm.models.common import tower_attention
from mindspeed_mm.models.common.attention_operator import Readings
from mindspeed_mm.models.common.tower_attention import IMPLEMENTATION
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.parallel.recompute import apply_recompute
from tests.support.packs import make_samples, pack

SDPA = {"image_encoder": {"vision_encoder": {"attn_implementation": "sdpa"}}}


def tower_gradients(hf_dir: Path, reentrant: bool | None = None, **model: Any) -> dict[str, torch.Tensor]:
    """Of a packed micro-batch with images and videos; two of its frames are larger than a window."""
    samples = make_samples(hf_dir)
    whole = TransformersModel({"init_from_hf_path": str(hf_dir), **model})
    if reentrant is not None:
        apply_recompute({str(n): block for n, block in enumerate(whole.model.model.visual.blocks)}, reentrant)
    whole(**whole.prepare(pack([samples[:3], samples[5:]])))["loss"].backward()
    assert (whole.model.model.visual.config._attn_implementation == IMPLEMENTATION) == (not model)
    assert whole.model.config.vision_config._attn_implementation == "sdpa"
    return {name: p.grad for name, p in whole.model.model.visual.named_parameters() if p.grad is not None}


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of a gradient's elements, as a part of its largest one; a key's bias has none to measure."""
    assert found.keys() == expected.keys() and found
    return max(
        float((found[name] - of).abs().max() / of.abs().max())
        for name, of in expected.items()
        if "qkv.bias" not in name
    )


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_images_see_themselves(reentrant: bool | None, qwen2_5_vl_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames, and windows of frames: two readings, however often layers are run."""
    read: list[list[int]] = []

    def watched(lengths: list[int]) -> Documents:
        read.append(lengths)
        return of(lengths)

    of = Documents.in_one_row
    monkeypatch.setattr(Documents, "in_one_row", watched)
    monkeypatch.setattr(tower_attention, "readings", Readings())
    found = tower_gradients(qwen2_5_vl_dir, reentrant)
    assert len(read) == 2 and len(read[0]) != len(read[1])
    assert farthest(found, tower_gradients(qwen2_5_vl_dir, **SDPA)) < 1e-5


def test_lengths_that_are_not_heeded_are_seen(qwen2_5_vl_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Documents.in_one_row
    monkeypatch.setattr(Documents, "in_one_row", lambda lengths: of([sum(lengths)]))
    assert farthest(tower_gradients(qwen2_5_vl_dir), tower_gradients(qwen2_5_vl_dir, **SDPA)) > 1e-3


def test_offsets_that_changed_are_read_again() -> None:
    readings, offsets = Readings(), torch.tensor([0, 3, 5])
    first = readings.of(offsets)
    assert readings.of(offsets.detach()) is first and first.packed.queries == (3, 2)
    offsets[1] = 4
    assert readings.of(offsets).packed.queries == (4, 1)
    del offsets
    assert readings.of(torch.tensor([0, 7])).packed.queries == (7,) and len(readings._known) == 1


def test_in_inference_mode_offsets_are_read_each_time() -> None:
    with torch.inference_mode():
        readings, offsets = Readings(), torch.tensor([0, 3, 5])
        assert readings.of(offsets).packed.queries == (3, 2)
        offsets[1] = 4
        assert readings.of(offsets).packed.queries == (4, 1)


def test_dropout_is_pytorchs_own(qwen2_5_vl_dir: Path) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 7, 4) for _ in range(3))
    layer = torch.nn.Identity()
    given: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 3, 7], dtype=torch.int32), "is_causal": False}
    attend = tower_attention.attend_within_sequences
    whole, _ = attend(layer, query, key, value, None, **given)
    dropped, _ = attend(layer, query, key, value, None, dropout=1e-9, **given)
    assert torch.allclose(whole, dropped, atol=1e-6)
    without, _ = attend(layer, query, key, value, None, is_causal=False)
    assert not torch.allclose(whole, without, atol=1e-3)
