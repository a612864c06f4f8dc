"""Models built without storage get what their own constructors would have given them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.models.common.base_model import FSDP2Mixin, adapt_class
from mindspeed_mm.models.common.diffusers_init import DiffusersInitMixin
from mindspeed_mm.models.common.meta_build import build_on_meta
from mindspeed_mm.parallel.materialize import materialize
from mindspeed_mm.utils.errors import ConfigError
from tests.support.tiny_diffusers import NAMES, build_diffusers, diffusers_class, diffusers_config

CPU = torch.device("cpu")


def drawn(name: str) -> Any:
    """A tiny model built on meta, inside another device's context, and filled at random."""
    with torch.device("meta"):
        model = build_on_meta(adapt_class(diffusers_class(name)), diffusers_config(name))
    assert all(p.is_meta for p in model.parameters())
    materialize(model, CPU, CPU)
    model.draw_weights(storage_is_empty=True)
    return model


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules hold as plain attributes."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", NAMES)
def test_initial_values_are_the_constructors(name: str) -> None:
    model, real = drawn(name), build_diffusers(name)
    own = dict(model.named_parameters())
    assert list(own) == [n for n, _ in real.named_parameters()]
    for key, wanted in real.named_parameters():
        found = own[key]
        assert not found.is_meta
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), key
        if float(wanted.detach().std(correction=0)) == 0:
            assert torch.equal(found, wanted), f"{key} is a constant in the constructor"
            continue
        # of n draws, a standard deviation is known to about 1 / sqrt(2 n), a mean to std / sqrt(n)
        spread = float(wanted.detach().std(correction=0))
        noise = spread / math.sqrt(wanted.numel())
        assert abs(float(found.detach().std(correction=0)) - spread) < 6 * noise, key
        assert abs(float(found.detach().mean() - wanted.detach().mean())) < 8 * noise, key
        assert not torch.equal(found, wanted), f"{key} is no draw of its own"


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_the_constructor_are_kept(name: str) -> None:
    model, real = drawn(name), build_diffusers(name)
    buffers = dict(model.named_buffers())
    assert list(buffers) == [n for n, _ in real.named_buffers()]
    for key, wanted in real.named_buffers():
        assert torch.equal(buffers[key], wanted), key
    tables = plain_tensors(model)
    for key, wanted in plain_tensors(real).items():
        assert torch.equal(tables[key], wanted), key
    assert dict(model.config) == dict(real.config)


def test_values_follow_the_name_and_the_seed() -> None:
    first, second = drawn("wan").state_dict(), drawn("wan").state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    one, other = (first[f"blocks.{i}.attn1.to_q.weight"] for i in (0, 1))
    assert not torch.equal(one, other)


class Unusual(nn.Module):
    """What constructors do to parameters, beside `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.zeros_(self.linear.weight)
        self.linear.bias.data.fill_(0.5)
        self.cut = nn.init.trunc_normal_(nn.Parameter(torch.empty(64, 64)), std=0.1, a=-0.1, b=0.1)
        nn.init.trunc_normal_(self.cut, std=0.1, a=-0.1, b=0.1)
        self.rows = nn.Embedding(5, 8, padding_idx=2)
        self.tied = self.rows.weight
        self.table = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        self.attention = nn.MultiheadAttention(8, 2)
        self.mixed = nn.Parameter(torch.zeros(4, 4))
        with torch.no_grad():
            self.mixed[:, 2:].copy_(torch.ones(4, 2))
        self.register_buffer("angles", torch.linspace(0, 1, 4))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Unusual:
        return cls(**config)


def test_whatever_a_constructor_does_is_done_again() -> None:
    model = build_on_meta(adapted(Unusual), {})
    assert model.tied is model.rows.weight
    materialize(model, CPU, CPU)
    model.draw_weights(storage_is_empty=True)
    real = Unusual()
    for key in ("linear.weight", "linear.bias", "table", "mixed", "attention.in_proj_bias", "angles"):
        assert torch.equal(model.state_dict()[key], real.state_dict()[key]), key
    assert not model.table.requires_grad
    assert model.tied is model.rows.weight
    assert float(model.rows.weight[2].detach().abs().sum()) == 0
    assert float(model.cut.detach().abs().max()) <= 0.1
    assert abs(float(model.cut.detach().std()) - float(real.cut.detach().std())) < 0.005
    assert (
        abs(float(model.attention.in_proj_weight.detach().std() - real.attention.in_proj_weight.detach().std())) < 0.1
    )


def adapted(model_class: type) -> Any:
    return type(model_class.__name__, (model_class, FSDP2Mixin, DiffusersInitMixin), {})


class Forgetful(Unusual):
    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.Parameter(torch.empty(3))


class Copied(Unusual):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.linear.bias.copy_(self.rows.weight[0])


@pytest.mark.parametrize(("broken", "words"), [(Forgetful, "pad.*is given no value"), (Copied, "from another one")])
def test_parameters_that_nobody_fills_are_named(broken: type, words: str) -> None:
    model = build_on_meta(adapted(broken), {})
    materialize(model, CPU, CPU)
    with pytest.raises(ConfigError, match=words):
        model.draw_weights(storage_is_empty=True)


def test_building_leaves_no_trace_outside() -> None:
    before = torch.random.get_rng_state()
    build_on_meta(adapt_class(diffusers_class("wan")), diffusers_config("wan"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not nn.Linear(2, 2).weight.is_meta
