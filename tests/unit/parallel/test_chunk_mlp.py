"""MLPs on parts of the tokens: which parts run, what is refused, and that numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.build_context import BuildContext
from mindspeed_mm.models.common.memory_layers import mlps_to_chunk, run_mlps_on_parts
from mindspeed_mm.parallel.chunk_mlp import apply_chunked_mlp
from mindspeed_mm.parallel.recompute import apply_recompute
from mindspeed_mm.utils.errors import ConfigError

WIDTH = 8


class MLP(nn.Module):
    """[..., WIDTH] → the same, and a bias that the caller adds, as of Megatron-core.

    Attributes:
        parts: shapes of its inputs.
    """

    def __init__(self, returns_bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.returns_bias = nn.Dropout(0.5), returns_bias
        self.parts: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.parts.append(tuple(x.shape))
        out = self.down(self.dropout(self.up(x).sin()))
        return (out, self.down.bias) if self.returns_bias else out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = nn.ModuleList([MLP()]), MLP()


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(mlp) for mlp in mlps])


def values(module: nn.Module, shape: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, WIDTH * torch.Size(shape).numel()).view(*shape, WIDTH).requires_grad_()
    out = module(x)
    out = out[0] + out[1] if isinstance(out, tuple) else out
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """But for rounding: products of other sizes, and sums over tokens in another order."""
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 1e-6 * float(other.norm())


def made(returns_bias: bool = False, dropout: float = 0.0) -> MLP:
    torch.manual_seed(0)
    mlp = MLP(returns_bias)
    mlp.dropout.p = dropout
    return mlp


@pytest.mark.parametrize(
    ("shape", "dim", "parts"),
    [
        ((2, 10), -2, [4, 4, 2]),  # two rows: of eight tokens four in each
        ((10,), -2, [8, 2]),
        ((10, 2), 0, [4, 4, 2]),
        ((8,), -2, [8]),
        ((3, 9), -2, [2, 2, 2, 2, 1]),
    ],
)
@pytest.mark.parametrize("returns_bias", [False, True])
def test_parts(shape: tuple[int, ...], dim: int, parts: list[int], returns_bias: bool) -> None:
    mlp = made(returns_bias)
    apply_chunked_mlp({"mlp": mlp}, 8, "chunk_mlp_tokens", dim)
    found, expected = values(mlp, shape), values(made(returns_bias), shape)
    sizes = [part[dim if dim == 0 else -2] for part in mlp.parts]
    assert sizes == (parts + parts[::-1] if len(parts) > 1 else parts)  # forward, and again in backward
    assert_equal(found, expected)


def test_dropout_is_drawn_again_and_evaluation_is_whole() -> None:
    mlp = made(dropout=0.5)
    apply_chunked_mlp({"mlp": mlp}, 4, "chunk_mlp_tokens")
    out, *_ = values(mlp, (10,))
    plain = made(dropout=0.5)
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, WIDTH * 10).view(10, WIDTH).requires_grad_()
    expected = torch.cat([plain(part) for part in x.split(4)])
    assert torch.equal(out, expected)
    expected.square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mlp.get_parameter(name).grad, parameter.grad)
    mlp.parts.clear()
    mlp.eval()(x)
    assert mlp.parts == [(10, WIDTH)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_of_a_recomputed_block(use_reentrant: bool) -> None:
    block, plain = Block(made()), Block(made())
    plain.norm.load_state_dict(block.norm.state_dict())
    apply_chunked_mlp({"mlp": block.mlp}, 4, "chunk_mlp_tokens")
    apply_recompute({"block": block, "mlp": block.mlp}, use_reentrant)
    assert_equal(values(block, (10,)), values(plain, (10,)))
    assert max(part[0] for part in block.mlp.parts) == 4  # type: ignore[union-attr, operator]


def test_which_mlps() -> None:
    model = Model(MLP(), Experts(), MLP())
    context = BuildContext(chunk_mlp_tokens=4)
    assert mlps_to_chunk(model, Fsdp2Config(), BuildContext()) == {}
    assert list(mlps_to_chunk(model, Fsdp2Config(), context)) == ["layers.0.mlp", "layers.2.mlp"]
    one = Fsdp2Config(chunk_mlp_tokens=2, chunk_mlp_modules=["layers.{2}.mlp"])
    run_mlps_on_parts(model, one, context)
    values(model.layers[2], (4,))
    assert model.layers[2].mlp.parts == [(2, WIDTH)] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keys", "mlps", "refusal"),
    [
        ({"chunk_mlp_modules": ["layers.{0}.mlp"]}, [MLP()], "on all tokens at once without 'chunk_mlp_tokens'"),
        (
            {"chunk_mlp_tokens": 4},
            [Experts(), Experts()],
            "chunk_mlp_tokens: no MLP without experts was found in the blocks",
        ),
        (
            {"chunk_mlp_tokens": 4, "chunk_mlp_modules": ["layers.{1}.mlp"]},
            [MLP(), Experts()],
            r"chunk_mlp_modules: 'layers.1.mlp' \(Experts\) has experts, to which it sends tokens itself",
        ),
        (
            {"chunk_mlp_tokens": 4, "recompute_keep": ["linear"], "use_reentrant": False},
            [MLP(), MLP()],
            "'recompute_keep' keeps the outputs of linear layers, and fsdp2.yaml: chunk_mlp_tokens those of few",
        ),
    ],
)
def test_what_is_refused(keys: dict[str, Any], mlps: list[nn.Module], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        mlps_to_chunk(Model(*mlps), Fsdp2Config.from_dict(keys), BuildContext())


class TwoInputs(MLP):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + y


class Mean(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(0, keepdim=True)


def test_modules_that_dont_treat_tokens_one_by_one() -> None:
    both, mean = TwoInputs(), Mean()
    apply_chunked_mlp({"both": both, "mean": mean}, 4, "f: chunk_mlp_tokens")
    x = torch.ones(10, WIDTH)
    with pytest.raises(ConfigError, match=r"f: chunk_mlp_tokens: 'both' is called with a tensor .* and 1 further ones"):
        both(x, x)
    with pytest.raises(ConfigError, match=r"f: chunk_mlp_tokens: 'mean' returns no tensor of the shape \[4\]"):
        mean(x)
