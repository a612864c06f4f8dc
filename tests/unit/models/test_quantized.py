"""Linear layers in 4 bits: values as bitsandbytes has them, gradients, memory, and what is left as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_mm.models.common.family import TEXT_TRAITS
from mindspeed_mm.models.common.quantized import NF4Linear, quantize, quantize_base, refuse_experts, restore
from mindspeed_mm.monitor.flops import flops_model
from mindspeed_mm.utils.errors import ConfigError
from tests.support.live_bytes import LiveBytes

#: what bitsandbytes 0.50.2 has for `weight()`: quantize_4bit(weight, blocksize=64, quant_type="nf4")
CODES = (
    "78976795445a766b989c567b5325c674dcacd394e6227e2c1deeec0e1ed67ee0d26cdc52d29ecde62d5179518a62beea1b4e21103f1e115413f0"
    "dd425f92be1014e4a2ceeea1e1cecce72d515731c6b16cb31e1e9213db1cd1004f2c0cfff60f17eeed277d11104e1f30111ba43fedfd0e0dfdef"
    "43bb01102f0f20100ca42ffe"
)
SCALES = [0.0720137432217598, 0.1318613737821579, 0.19962197542190552, 0.25226759910583496]
SUM, SQUARES = 0.09367503924295306, 3.486286886994842


def weight() -> torch.Tensor:
    n = torch.arange(2 * 128, dtype=torch.float64)
    return (torch.sin(n * n * 0.37) * (0.01 + n / 1000)).view(2, 128).float()


def test_equals_bitsandbytes() -> None:
    packed = quantize(weight())
    assert packed[:, :64].flatten().numpy().tobytes().hex() == CODES
    assert packed[:, 64:].contiguous().view(torch.float32).flatten().tolist() == pytest.approx(SCALES, rel=1e-7)
    found = restore(packed, 128, torch.float32).double()
    assert (found.sum().item(), found.square().sum().item()) == pytest.approx((SUM, SQUARES), rel=1e-9)


@pytest.mark.parametrize("width", [64, 65, 100, 127, 3420])
def test_rows_that_end_within_a_block(width: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(5, width)
    packed = quantize(whole)
    assert packed.nbytes / whole.numel() <= (0.6 if width != 65 else 0.65)
    expected = torch.cat([restore(quantize(b), b.shape[1], torch.float32) for b in whole.split(64, dim=1)], dim=1)
    assert torch.equal(restore(packed, width, torch.float32), expected)
    assert torch.equal(torch.cat([quantize(whole[:2]), quantize(whole[2:])]), packed)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(
        restore(quantize(torch.zeros(2, 64)), 64, torch.bfloat16), torch.zeros(2, 64, dtype=torch.bfloat16)
    )


def frozen(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).requires_grad_(False)


def test_layer_equals_a_linear_layer_of_the_restored_weight() -> None:
    torch.manual_seed(0)
    model = frozen(nn.Linear(96, 5))
    quantize_base(model, torch.float32)
    layer = model[0]
    assert isinstance(layer, NF4Linear) and not layer.weight.requires_grad
    plain = nn.Linear(96, 5)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    ours, theirs = (torch.ones(2, 3, 96, requires_grad=True) for _ in range(2))
    found, expected = layer(ours), plain(theirs)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_backward_restores_weights_again() -> None:
    """Between forward and backward, no restored weight is kept."""
    model = frozen(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    quantize_base(model, torch.float32)
    x = torch.ones(1, 512, requires_grad=True)
    with LiveBytes() as bytes_alive:
        model(x).sum().backward()
    assert bytes_alive.peak < 4 * 4 * 512 * 512


def test_left_as_they_are() -> None:
    narrow, trained, tied = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
    other = nn.Linear(64, 64, bias=False)
    other.weight = tied.weight
    model = frozen(nn.Embedding(4, 64), nn.Linear(64, 64), narrow, trained, tied, other, nn.LayerNorm(64))
    trained.bias.requires_grad_(True)
    quantize_base(model, torch.float32)
    assert [type(m) is NF4Linear for m in model] == [False, True, False, False, False, False, False]
    with pytest.raises(ConfigError, match="--lora-quantize nf4: Sequential has no frozen linear layer of 64 inputs"):
        quantize_base(frozen(nn.Linear(32, 64)), torch.float32)


def test_operations_are_counted_as_of_the_weights() -> None:
    """The figures of a step don't depend on how weights are stored."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=64))
    model.requires_grad_(False)
    before = flops_model(model, TEXT_TRAITS)
    quantize_base(model, torch.float32)
    assert before is not None and flops_model(model, TEXT_TRAITS) == before
    assert isinstance(model.model.layers[0].mlp.up_proj, NF4Linear) and type(model.lm_head) is nn.Linear


def test_experts_are_refused() -> None:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 64, 64))
    with pytest.raises(ConfigError, match=r"the experts of Module are stacked in .* \(experts.gate_up_proj\)"):
        refuse_experts(model)
