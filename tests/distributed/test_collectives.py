"""Collectives of activations, forward and backward, against what one process would compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.parallel import collectives
from mindspeed_mm.parallel.world import RankSet
from tests.support.workers import RankPool


def check(dim: int) -> None:
    """Rank r has `x + 100 r`, and weighs its outputs with r + 1."""
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    ranks = RankSet(rank, 2, dist.group.WORLD)
    of_rank_0 = torch.arange(48.0).view(2, 4, 6)
    x = (of_rank_0 + 100 * rank).requires_grad_()
    whole, weight = torch.cat([of_rank_0, of_rank_0 + 100], dim), rank + 1
    scale = torch.arange(float(whole.numel())).view(whole.shape)

    def gradient(output: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(output, x)[0]

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2, dim)[rank]

    joined = collectives.gather(x, ranks, dim, is_partial=True)
    assert torch.equal(joined, whole)
    assert torch.equal(gradient((joined * scale * weight).sum()), part(scale) * 3)
    joined = collectives.gather(x, ranks, dim, is_partial=False)
    assert torch.equal(gradient((joined * scale).sum()), part(scale))

    summed = 2 * of_rank_0 + 100
    of_ranks = torch.cat([torch.ones_like(t) * (i + 1) for i, t in enumerate(x.chunk(2, dim))], dim)
    scattered = collectives.reduce_scatter(x, ranks, dim)
    assert torch.equal(scattered, part(summed))
    assert torch.equal(gradient((scattered * weight).sum()), of_ranks)
    own = collectives.cut(x, ranks, dim)
    assert torch.equal(own, part(x))
    assert torch.equal(gradient((own * weight).sum()), of_ranks)

    assert torch.equal(collectives.copy(x, ranks), x)
    assert torch.equal(gradient((collectives.copy(x, ranks) * weight).sum()), torch.full_like(x, 3.0))
    assert torch.equal(collectives.total(x, ranks), summed)
    assert torch.equal(gradient((collectives.total(x, ranks) * 5).sum()), torch.full_like(x, 5.0))
    assert collectives.gather(x[:, :0], ranks, -1, is_partial=False).shape == (2, 0, 12)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_forward_and_backward(dim: int, ranks2: RankPool) -> None:
    ranks2.run(check, dim)
