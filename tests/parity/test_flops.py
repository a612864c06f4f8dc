"""FLOPs of every family against torch's own counter, on its smallest model."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mm.configs.data_config import CollateParam
from mindspeed_mm.data.loading.collate import Collator
from mindspeed_mm.data.loading.counting import CountingIterator, drop_host_fields
from mindspeed_mm.models.generation.sora_model import SoRAModel
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.monitor.flops import flops_model
from tests.parity.test_families import FAMILIES, case_of
from tests.support.counted_flops import counted_flops
from tests.support.predictors import cases

#: how far the matrices may be off, where it is more than 5 %: of tiny models in which small parts weigh much
OFF = {
    "gemma4": 0.1,  # convolutions of its sound
    "llama4": 0.15,  # its experts multiply by batches, which count as attention there
    "qwen3_5": 0.25,  # linear attention's recurrence
    "qwen3_5_moe": 0.25,
    "whisper": 0.15,  # the decoder's positions
}
ALWAYS = ("qwen3_vl", "gpt_oss", "wan-t2v")
CASES = cases()


def named(names: object) -> list[object]:
    return [pytest.param(n, marks=[] if n in ALWAYS else [pytest.mark.full]) for n in names]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", named(FAMILIES))
def test_families(name: str) -> None:
    case = case_of(name)
    model = TransformersModel({"init_from_hf_path": str(case.hf_dir), **case.family.model})
    estimate = flops_model(model.model, model.traits)
    assert estimate is not None
    collate = Collator(case.dataset.adapter, CollateParam(), case.dataset)
    for sample in case.samples[:4]:
        iterator = CountingIterator(iter([collate([sample])]), 1, case.dataset.adapter)
        batch = dict(next(iterator))
        drop_host_fields(batch)
        batch, counts = model.prepare(batch), iterator.take()
        found = counted_flops(lambda batch=batch: model(**batch)["loss"].backward())
        attention = sum(estimate.attention.of(length) for length in counts.lengths)
        for kind, size in counts.media_sizes.items():
            tower = estimate.towers[kind]
            attention += tower.per_squared_patch * size.squared_patches + tower.attention_per_token * size.tokens
        assert estimate.of(counts) - attention == pytest.approx(found.matrices, rel=OFF.get(name, 0.05))


@pytest.mark.parametrize("name", named(CASES))
def test_predictors(name: str) -> None:
    """The forward pass exactly; backward, torch counts no gradient of inputs, and attention's scores once more."""
    family, case = CASES[name]
    model = SoRAModel(case.model_json(family))
    batch = model.prepare(case.batch([0, 1, 2], 0))
    with torch.no_grad():
        forward = sum(counted_flops(lambda: model(**batch)))
    assert model.take_flops() == 0
    found = counted_flops(lambda: model(**batch)["loss"].backward())
    assert model.take_flops() == 3 * forward
    assert 3 * forward == pytest.approx(found.matrices + found.attention * 6 / 7, rel=0.12)
    model(**batch)
    assert model.take_flops() == 3 * forward
