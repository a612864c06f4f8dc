"""Every gradient of a family against plain transformers, each row alone: padded, in packs, and with a frozen tower."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_mm.configs.data_config import CollateParam
from mindspeed_mm.data.loading.collate import Collator
from mindspeed_mm.data.loading.counting import drop_host_fields
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.parity.test_families import FAMILIES, case_of
from tests.support.reference import train_plainly

# with layers whose samples aren't kept apart by masks; the others by name (pytest -m full)
ALWAYS = ("qwen3_5",)
WITH_TOWER = tuple(name for name, family in FAMILIES.items() if "image" in family.kinds)
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
ROUNDING = 1e-5  # gradients smaller than this part of others are taken for the rounding of theirs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in WITH_TOWER]
)
def test_every_gradient_equals_transformers(name: str) -> None:
    """Loss 1e-6; each gradient within 1e-5 of its largest element."""
    case = case_of(name)
    collate = Collator(case.dataset.adapter, CollateParam(), case.dataset)
    plain = train_plainly(case.hf_dir, case.inputs(), 1, lr=0.0, clip=1e9, outputs=case.family.outputs)
    layouts = {"padded": [collate(case.samples[:3]), collate(case.samples[3:])]}
    if case.family.packs:
        packs = [case.samples[:2], case.samples[2:5]]
        layouts["packed"] = [collate.pack(packs), collate.pack([case.samples[5:]])]
    for layout, batches in layouts.items():
        loss, found = gradients(case.hf_dir, batches)
        compare(layout, loss, found, plain.losses[0], plain.gradients)
    loss, found = gradients(case.hf_dir, layouts["padded"], freeze_vision_model=True, freeze_vision_projection=True)
    frozen = frozen_paths(case.hf_dir)
    kept = {key: value for key, value in plain.gradients.items() if not key.startswith(frozen)}
    assert 0 < len(kept) < len(plain.gradients)
    compare("frozen tower", loss, found, plain.losses[0], kept)


def frozen_paths(hf_dir: Any) -> tuple[str, ...]:
    """Beginnings of the names in a vision tower and its projector; not those of other towers, or of a mark of lines."""
    with build_context(BuildContext(load_weights=False, defer_weights=True)):
        parts = TransformersModel({"init_from_hf_path": str(hf_dir)}).traits.parts
    return tuple(f"{path}." for part in ("vision_encoder", "vision_projector") for path in parts.get(part, ()))


def compare(
    layout: str,
    loss: float,
    found: dict[str, torch.Tensor],
    expected_loss: float,
    expected: dict[str, torch.Tensor],
) -> None:
    assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE), layout
    assert found.keys() == expected.keys(), layout
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max() / largest(name, expected).clamp(min=1e-7)
        assert difference < GRADIENT_TOLERANCE, f"{layout}: {name}"


def largest(name: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """The largest element of a gradient, by which its error is measured.

    Softmax takes away a bias of keys without positions: its gradient is zero but for the rounding of sums as large as
    its weight's gradient, which is the measure then.
    """
    size = gradients[name].abs().max()
    if not name.endswith("k_proj.bias"):
        return size
    of_weight = gradients[name.removesuffix("bias") + "weight"].abs().max()
    return of_weight if size < ROUNDING * of_weight else size


def gradients(hf_dir: Any, batches: list[dict[str, Any]], **model: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the package's model over micro-batches as they are collated."""
    whole = TransformersModel({"init_from_hf_path": str(hf_dir), **model})
    outputs = []
    for batch in batches:
        batch = dict(batch)
        drop_host_fields(batch)
        outputs.append(whole(**whole.prepare(batch)))
    loss = sum(o["loss"] for o in outputs) / sum(o["denominator"] for o in outputs)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in whole.model.named_parameters() if p.grad is not None}
