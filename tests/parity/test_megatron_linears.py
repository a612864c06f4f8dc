"""Linear layers of tensor-parallel ranks in bf16: outputs are rounded as often as those of torch's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.megatron import start
from tests.support.workers import RankPool

ROWS, INNER, OUTER = 6, 8, 12


def layers_of(ranks: int, sequence_parallel: bool, frozen: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What a rank's layers compute, and what torch's layers compute of its part: name → (found, expected)."""
    start(ranks)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed_mm.models.megatron.layers import ColumnLinear, RowLinear

    sizes: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": INNER,
        "num_attention_heads": 2,
        "params_dtype": torch.bfloat16,
    }
    config = TransformerConfig(
        **sizes, tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel, bf16=True
    )
    rank = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weights = {"column": drawn(OUTER, INNER), "row": drawn(INNER, OUTER)}
    biases = {"column": drawn(OUTER), "row": drawn(INNER)}
    inputs, grads = {"column": drawn(ROWS, 1, INNER), "row": drawn(ROWS, 1, OUTER)}, {"row": drawn(ROWS, 1, INNER)}
    grads["column"] = drawn(ROWS, 1, OUTER)
    common: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.zeros_,
        "bias": True,
        "skip_bias_add": True,
    }
    column = ColumnLinear(INNER, OUTER, gather_output=False, **common)
    row = RowLinear(OUTER, INNER, input_is_parallel=True, **common)
    column.weight.data, column.bias.data = weights["column"].chunk(ranks)[rank], biases["column"].chunk(ranks)[rank]
    row.weight.data, row.bias.data = weights["row"].chunk(ranks, dim=1)[rank], biases["row"].clone()
    for layer in (column, row):
        layer.weight.requires_grad_(not frozen)
    part = inputs["column"].chunk(ranks)[rank] if sequence_parallel else inputs["column"]
    of_column = part.clone().requires_grad_()
    output, left = column(of_column)
    assert left is None
    output.backward(grads["column"].chunk(ranks, dim=2)[rank])

    expected = [inputs["column"].requires_grad_(), *(t.requires_grad_() for t in (weights["column"], biases["column"]))]
    whole = F.linear(*expected)
    found = {"column": (output.detach(), whole.detach().chunk(ranks, dim=2)[rank])}
    whole.backward(grads["column"])
    found["column bias"] = (column.bias.grad, biases["column"].grad.chunk(ranks)[rank])
    if not frozen:
        found["column weight"] = (column.weight.grad, weights["column"].grad.chunk(ranks)[rank])

    output, left = row(inputs["row"].chunk(ranks, dim=2)[rank].contiguous())
    assert left is None
    parts = zip(inputs["row"].chunk(ranks, dim=2), weights["row"].chunk(ranks, dim=1), strict=True)
    sums = [F.linear(x.contiguous(), w, biases["row"] if not number else None) for number, (x, w) in enumerate(parts)]
    total = sum(sums[1:], sums[0])
    found["row"] = (output.detach(), total.chunk(ranks)[rank] if sequence_parallel else total)
    output.backward(grads["row"].chunk(ranks)[rank] if sequence_parallel else grads["row"])
    gradient = row.bias.grad
    if sequence_parallel:  # as Megatron-core does once a step
        gradient = tensor_parallel.reduce_from_tensor_model_parallel_region(gradient)
    found["row bias"] = (gradient, grads["row"].sum((0, 1)))
    return found


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["TP1", "TP2", "TP2 SP"]
)
def test_biases_are_added_before_outputs_are_rounded(
    ranks: int, sequence_parallel: bool, frozen: bool, megatron_pools: dict[int, RankPool]
) -> None:
    for found in megatron_pools[ranks].run(layers_of, ranks, sequence_parallel, frozen):
        for name, (ours, expected) in found.items():
            assert ours.dtype == torch.bfloat16
            exact = {"rtol": 0.0, "atol": 0.0} if name in ("column", "row") else {"rtol": 0.02, "atol": 0.02}
            torch.testing.assert_close(ours, expected, **exact, msg=lambda said, name=name: f"{name}: {said}")
