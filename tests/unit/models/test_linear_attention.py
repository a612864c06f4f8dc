"""Layers of linear attention: samples of packed rows run apart, or are refused; what can't be split over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.boundaries import PackedRows
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.linear_attention import run_samples_apart
from mindspeed_mm.models.common.tensor_layers import plan_tensor_layers
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.support.families import qwen3_5
from tests.support.packs import make_samples, pack


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_5.make(tmp_path_factory.mktemp("qwen3_5") / "hf")


def build(hf_dir: Path, dims: Dims | None = None) -> TransformersModel:
    """The model's structure."""
    with build_context(BuildContext(load_weights=False, defer_weights=True, dims=dims)):
        return TransformersModel({"init_from_hf_path": str(hf_dir)})


class RunningSum(nn.Module):
    """A recurrence: each token is the sum of those up to it."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        masked = hidden_states if attention_mask is None else hidden_states * attention_mask.unsqueeze(-1)
        return masked.cumsum(1)


def test_each_sample_begins_anew() -> None:
    layer = RunningSum()
    run_samples_apart(layer)
    rows = PackedRows.of(torch.tensor([[1, 1, 2, 2, 0], [1, 2, 2, 2, 2]]))
    ones = torch.ones(2, 5, 1, requires_grad=True)
    found = layer(hidden_states=ones, attention_mask=rows)
    assert found.squeeze(-1).tolist() == [[1, 2, 1, 2, 1], [1, 1, 2, 3, 4]]
    found.sum().backward()
    assert ones.grad is not None and ones.grad.squeeze(-1).tolist() == [[2, 1, 2, 1, 1], [1, 4, 3, 2, 1]]
    with pytest.raises(ConfigError, match="got a part of a packed micro-batch"):
        layer(hidden_states=ones[:1], attention_mask=rows)
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2)
    assert layer(hidden_states=torch.ones(2, 5, 1), attention_mask=mask)[0, :, 0].tolist() == [1, 2, 3, 3, 3]


def test_samples_that_would_run_on_are_refused(hf_dir: Path) -> None:
    """Without the family's masks, the layer before that of full attention would mix them in silence."""
    model = TransformersModel({"init_from_hf_path": str(hf_dir)})
    samples = make_samples(hf_dir)
    batch = pack([[samples[number] for number in (0, 1, 5)]])  # those of images and texts
    assert model(**model.prepare(batch))["loss"] > 0
    model = TransformersModel({"init_from_hf_path": str(hf_dir)})
    model.traits = replace(model.traits, packed_masks=None)
    with pytest.raises(ConfigError, match="lets the samples of a packed row see each other"):
        model(**model.prepare(batch))


def test_it_is_not_split_over_ranks(hf_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--context-parallel-size 2: Qwen3_5.* \(.*linear attention\)"):
        build(hf_dir, Dims(ulysses=2))
    model = build(hf_dir)
    with pytest.raises(ConfigError, match="linear attention is not split by tensor parallelism"):
        plan_tensor_layers(model.model, model.traits, Fsdp2Config.from_dict({}), Dims(tp=2))
