"""Compiled modules: what is compiled, when, and for how many kinds of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.compiled import modules_to_compile
from mindspeed_mm.parallel import compile as compiled
from mindspeed_mm.parallel.compile import apply_compile
from mindspeed_mm.utils.errors import ConfigError

WHERE = "fsdp2.yaml: compile"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, extra: Any = None) -> torch.Tensor:
        if extra is not None and not torch.compiler.is_compiling():
            extra.plain += 1
        return hidden + torch.relu(self.inner(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled_model() -> Model:
    """A model after its first pass."""
    model = Model()
    apply_compile(model, blocks(model), "aot_eager", WHERE)
    model(torch.randn(2, 3, 4))
    assert graphs() == 0
    return model


def blocks(model: nn.Module, **keys: Any) -> dict[str, nn.Module]:
    return modules_to_compile(model, Fsdp2Config.from_dict({"compile": True, **keys}))


def test_all_blocks_share_a_function_for_rows_of_any_length() -> None:
    torch.manual_seed(0)
    model, plain = compiled_model(), Model()
    plain.load_state_dict(model.state_dict())
    assert model.state_dict().keys() == plain.state_dict().keys()
    for rows, tokens in ((3, 3), (5, 7), (2, 3), (4, 4), (7, 4)):  # at first, two sizes that are equal by chance
        hidden = torch.randn(rows, tokens, 4, requires_grad=True)
        results = [each(hidden) for each in (model, plain)]
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
    assert graphs() == 1
    model(torch.randn(1, 8, 4, requires_grad=True))  # a size of one is a kind of its own
    assert graphs() == 2


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_view_is_no_kind_of_its_own(is_trained: bool) -> None:
    """Nor would the size of what it is a view of be."""
    model = compiled_model()
    for rows in (5, 3, 1):  # what the first block is given is a view, unlike that of the others
        model(torch.randn(rows, 6, 8, 4, requires_grad=is_trained).mul(2).flatten(0, 1))
    assert graphs() == (1 if is_trained else 2)  # without a gradient the first block has a kind of its own


def test_in_evaluation_blocks_compute_as_they_are() -> None:
    model = compiled_model()
    model.layers.eval()  # a frozen part may be kept in evaluation mode while its model is trained
    model(torch.randn(2, 3, 4, requires_grad=True))
    assert graphs() == 1
    model.eval()
    for rows in (2, 1):
        model(torch.randn(rows, 3, 4, requires_grad=True))
    assert graphs() == 1


class Extra:
    """An argument that keeps out of graphs at first."""

    def __init__(self, enters: bool) -> None:
        self.enters, self.plain = enters, 0

    def enter_graph(self, ready: Any) -> bool:
        return self.enters


def test_an_argument_may_keep_a_call_out_of_graphs() -> None:
    model = compiled_model()
    watched, entering = Extra(False), Extra(True)
    model(torch.randn(2, 3, 4))
    counters.clear()
    for extra in (watched, entering, Extra(True)):
        model.layers[0](torch.randn(2, 3, 4), extra=extra)
    assert (watched.plain, entering.plain, graphs()) == (1, 0, 1)


def test_too_many_kinds_of_inputs_are_said(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(compiled, "MOST_KINDS", 2)
    with torch._dynamo.config.patch(recompile_limit=2):
        model = compiled_model()
        model(torch.randn(2, 4))
        for shape in ((2, 3, 4), (2, 3, 3, 4), (2, 4)):
            assert model.layers[0](torch.randn(*shape)).shape == shape
    (line,) = [line for line in said if "uncompiled" in line]
    assert "'layers.0'" in line and "TORCH_LOGS=recompiles" in line and graphs() == 2


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "current", CPUAccelerator)
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"fsdp2.yaml: compile: .*g\+\+.*leave the key out"),
    ):
        apply_compile(Model(), {}, "inductor", WHERE)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["layer.{*}"], r"matches nothing.*did you mean 'layers\.\{\*\}'"),
        (["layers"], r"'layers' holds blocks, .* write 'layers\.\{\*\}'"),
        ([""], r"'' holds blocks, .* write 'layers\.\{\*\}'"),
        (["layers.{*}", "layers.0.inner"], r"'layers\.0\.inner' is in 'layers\.0'"),
    ],
)
def test_paths_that_name_no_module_to_compile(entries: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"fsdp2.yaml: compile: .*{message}"):
        blocks(Model(), compile=entries)


def test_modules_are_named_by_paths() -> None:
    assert list(blocks(Model(), compile=["layers.{0,2}.inner", "head"])) == ["layers.0.inner", "layers.2.inner", "head"]
    assert list(blocks(Model())) == ["layers.0", "layers.1", "layers.2"]
    assert blocks(Model(), compile=False) == {}
    with pytest.raises(ConfigError, match="Linear has no list of blocks"):
        blocks(nn.Linear(2, 2))


def test_the_plan_names_them() -> None:
    model = adapt_class(Model)()
    config = Fsdp2Config.from_dict({"compile": ["layers.{1}"]})
    model.fsdp2_overrides = {"compile": config.compile}
    assert model.plan_sharding(1).compiled == ("layers.1",)
