"""Every key of fsdp2.yaml, by what it does to a sharded model; each test fails when its key is ignored.

A toy model is sharded in the workers as a user's own model is: through `fully_shard` and a file. Its language part is
registered before its vision part and runs after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from mindspeed_mm.backends import fsdp2 as backend_module
from mindspeed_mm.backends.fsdp2 import FSDP2Backend
from mindspeed_mm.configs.flags.model import PrecisionArguments
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common import base_model
from mindspeed_mm.models.common.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.optimizer.clip import sum_plain_gradients
from mindspeed_mm.parallel import fsdp2
from mindspeed_mm.parallel.meshes import ParameterMeshes
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import logger
from tests.support.runs import run_of
from tests.support.tiny_steps import TinySteps
from tests.support.workers import RankPool

SIZE = 8
BLOCKS = ["language.blocks.{*}", "vision.blocks.{*}"]
IN_ORDER_OF_EXECUTION = ["vision.blocks.0", "vision.blocks.1", "language.blocks.0", "language.blocks.1"]

COVERED: set[str] = set()


def covers(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Name the keys that a test would miss."""
    COVERED.update(keys)
    return lambda test: test


def test_every_key_has_a_test() -> None:
    assert set(Fsdp2Config.model_fields) == COVERED


class Scale(nn.Module):
    """x [n] → x * weight; notes the types that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.weight.dtype))
        return x * self.weight


class Part(nn.Module):
    """Two blocks after something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Scale()
        self.blocks = nn.ModuleList([Scale(), Scale()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Toy(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """Registered: language, vision; run: vision, language."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Part()
        self.vision = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.language(self.vision(x))


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """Write an fsdp2.yaml of these keys; its path."""

    def write(**content: Any) -> str:
        path = tmp_path / "fsdp2.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def sharded(path: str) -> Toy:
    model = Toy()
    assert model.fully_shard(fsdp2_config_path=path) is True
    return model


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- how many ranks share a copy


def shards(path: str) -> tuple[tuple[int, ...], list[float]]:
    """Shape of the mesh, and what this rank holds of a parameter with the values 0 to 7."""
    model = Toy()
    with torch.no_grad():
        model.vision.stem.weight.copy_(torch.arange(SIZE))
    model.fully_shard(fsdp2_config_path=path)
    return tuple(model.device_mesh.shape), local(model.vision.stem.weight).tolist()


@covers("sharding_size")
@pytest.mark.parametrize(
    "content, mesh, first",
    [({}, (2, 1), 8), ({"sharding_size": 1}, (2, 1), 8), ({"sharding_size": 2}, (2,), 4), ({"sharding_size": "auto"},
    (2,), 4)],
    ids=["default", "1", "2", "auto"],
)  # fmt: skip
def test_sharding_size(
    ranks2: RankPool, written: Callable[..., str], content: dict[str, Any], mesh: tuple[int, ...], first: int
) -> None:
    zero, one = ranks2.run(shards, written(**content))
    assert zero[0] == one[0] == mesh
    assert zero[1] == list(range(first))
    assert one[1] == list(range(SIZE))[-first:]


@covers("sharding_size")
def test_sharding_size_of_half_the_ranks(ranks4: RankPool, written: Callable[..., str]) -> None:
    """Neighbours share a copy; ranks 0 and 2 hold the same part."""
    found = ranks4.run(shards, written(sharding_size=2))
    assert [mesh for mesh, _ in found] == [(2, 2)] * 4
    assert [values for _, values in found] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as error:
        sharded(path)
    return str(error.value)


@covers("sharding_size")
def test_sharding_size_that_does_not_divide(ranks4: RankPool, written: Callable[..., str]) -> None:
    for message in ranks4.run(refusal, written(sharding_size=3)):
        assert "sharding_size is 3" in message
        assert "valid here: auto, 1, 2, 4" in message


# --- which modules are units, ignored, recomputed


def units(path: str) -> dict[str, list[str]]:
    """Name of each unit → names of the parameters that it gathers."""
    model = sharded(path)
    gathered = {}
    plain = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
            now_plain = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
            gathered[name] = sorted(now_plain - plain)
            unit.reshard()
    return gathered


@covers("sub_modules_to_wrap")
def test_sub_modules_to_wrap(ranks2: RankPool, written: Callable[..., str]) -> None:
    """The units are those named and the root; a parent that is named before its children leaves them theirs."""
    every = sorted(name for name, _ in Toy().named_parameters())
    assert ranks2.run(units, written(sharding_size="auto"))[0] == {"": every}
    found = ranks2.run(units, written(sharding_size="auto", sub_modules_to_wrap=["vision", "vision.blocks.{*}"]))[0]
    assert found == {
        "": [n for n in every if n.startswith("language")],
        "vision": ["vision.stem.weight"],
        "vision.blocks.0": ["vision.blocks.0.weight"],
        "vision.blocks.1": ["vision.blocks.1.weight"],
    }


def parameters(path: str) -> dict[str, int | None]:
    """Name of each parameter → elements on this rank, or None where FSDP does not manage it and it is whole."""
    found = {}
    for name, param in sharded(path).named_parameters():
        assert isinstance(param, DTensor) or tuple(param.shape) == (SIZE,)
        found[name] = local(param).numel() if isinstance(param, DTensor) else None
    return found


@covers("ignored_modules")
def test_ignored_modules(ranks2: RankPool, written: Callable[..., str]) -> None:
    """Parameters of an ignored module stay plain and whole, the others are sharded."""
    assert set(ranks2.run(parameters, written(sharding_size="auto"))[0].values()) == {4}
    path = written(sharding_size="auto", sub_modules_to_wrap=BLOCKS, ignored_modules=["vision.stem"])
    for found in ranks2.run(parameters, path):
        assert found.pop("vision.stem.weight") is None
        assert set(found.values()) == {4}


IGNORED = ["vision.stem", "language.blocks"]  # the second is a list: its elements are called


def bf16_step(path: str, frozen: bool) -> tuple[set[Any], list[torch.Tensor | None], list[torch.Tensor]]:
    """After two micro-batches: what computed with the ignored modules, their summed gradients, their weights."""
    model = Toy()
    ignored = [model.vision.stem, *model.language.blocks]
    for module in ignored:
        module.requires_grad_(not frozen)
        nn.init.constant_(module.weight, 1.003)  # no number of bfloat16
    model.fully_shard(fsdp2_config_path=path)
    for last, seed in ((False, 0), (True, 1)):
        fsdp2.set_gradient_sync(fsdp2.sharded_units(model), last, defer=False)
        draws = torch.Generator().manual_seed(2 * seed + dist.get_rank())
        model(torch.rand(SIZE, generator=draws)).sum().backward()
    weights = [module.weight for module in ignored]
    sum_plain_gradients(model.parameters(), None)
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    seen = {types for module in ignored for types in module.seen}
    return seen, [None if w.grad is None else whole(w.grad) for w in weights], [whole(w.detach()) for w in weights]


@covers("ignored_modules")
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("pool, sharding_size", [("ranks1", 1), ("ranks2", 1), ("ranks2", 2)])
def test_ignored_modules_compute_and_train_as_the_others_do(
    request: pytest.FixtureRequest, written: Callable[..., str], pool: str, sharding_size: int, frozen: bool
) -> None:
    """In bf16 over whole float32 weights, with the gradients of a run that ignores nothing."""
    ranks = request.getfixturevalue(pool)
    bf16 = {"param_dtype": "bf16", "sharding_size": sharding_size, "sub_modules_to_wrap": BLOCKS}
    expected = ranks.run(bf16_step, written(**bf16), frozen)
    found = ranks.run(bf16_step, written(**bf16, ignored_modules=IGNORED), frozen)
    if sharding_size == 2:
        found += ranks.run(bf16_step, written(**bf16, ignored_modules=[""]), frozen)  # the whole model
        expected += expected
    for (seen, gradients, weights), (_, expected_gradients, _) in zip(found, expected, strict=True):
        assert seen == {(torch.bfloat16, torch.bfloat16)}
        assert all(w.dtype == torch.float32 and bool((w == 1.003).all()) for w in weights)
        if frozen:
            assert gradients == [None] * 3
        else:
            torch.testing.assert_close(gradients, expected_gradients, rtol=1e-6, atol=0)


def runs_in_a_step(path: str) -> dict[str, int]:
    model = sharded(path)
    model(torch.ones(SIZE)).sum().backward()
    return {name: len(module.seen) for name, module in model.named_modules() if isinstance(module, Scale)}


@covers("recompute_modules")
def test_recompute_modules(ranks2: RankPool, written: Callable[..., str]) -> None:
    """A named block runs twice a step, the others once."""
    assert set(ranks2.run(runs_in_a_step, written(sub_modules_to_wrap=BLOCKS))[0].values()) == {1}
    found = ranks2.run(runs_in_a_step, written(sub_modules_to_wrap=BLOCKS, recompute_modules=["vision.blocks.{*}"]))[0]
    assert {name for name, runs in found.items() if runs == 2} == {"vision.blocks.0", "vision.blocks.1"}
    assert {name for name, runs in found.items() if runs == 1} == set(found) - {"vision.blocks.0", "vision.blocks.1"}


def made_by(path: str) -> list[str]:
    """Names of the autograd functions that made the outputs of recomputed blocks."""
    model = sharded(path)
    names = []
    for block in model.vision.blocks:
        block.register_forward_hook(lambda module, args, output: names.append(type(output.grad_fn).__name__))
    model(torch.ones(SIZE)).sum().backward()
    return names


@covers("use_reentrant")
def test_use_reentrant(ranks2: RankPool, written: Callable[..., str]) -> None:
    """Each value takes the other one of torch's two implementations."""
    content = {"sub_modules_to_wrap": BLOCKS, "recompute_modules": BLOCKS}
    reentrant = "CheckpointFunctionBackward"
    assert ranks2.run(made_by, written(**content))[0] == [reentrant] * 2
    assert ranks2.run(made_by, written(**content, use_reentrant=True))[0] == [reentrant] * 2
    found = ranks2.run(made_by, written(**content, use_reentrant=False))[0]
    assert len(found) == 2 and reentrant not in found


def gradients_above_a_frozen_stem(path: str) -> tuple[dict[str, torch.Tensor | None], list[str]]:
    model = Toy()
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    model.vision.stem.requires_grad_(False)
    model.fully_shard(fsdp2_config_path=path)
    with heard() as lines:
        for _ in range(2):
            model(torch.arange(SIZE).float()).sum().backward()
    return {name: None if p.grad is None else local(p.grad).clone() for name, p in model.named_parameters()}, lines


@covers("use_reentrant")
def test_r01_reentrant_recompute_above_a_frozen_module(ranks2: RankPool, written: Callable[..., str]) -> None:
    """R01: the first block's inputs need no gradient; its parameters get theirs all the same, and one notice says
    how."""
    content = {"sharding_size": "auto", "sub_modules_to_wrap": BLOCKS}
    expected, silence = ranks2.run(gradients_above_a_frozen_stem, written(**content))[0]
    found, lines = ranks2.run(
        gradients_above_a_frozen_stem, written(**content, recompute_modules=BLOCKS, use_reentrant=True)
    )[0]
    assert silence == []
    assert expected.pop("vision.stem.weight") is None and found.pop("vision.stem.weight") is None
    for name, gradient in expected.items():
        assert gradient is not None and gradient.abs().sum() > 0
        assert torch.equal(found[name], gradient), name
    (line,) = lines
    assert "use_reentrant: true" in line and "vision.blocks.0" in line


# --- types


def dtypes(path: str) -> dict[str, torch.dtype]:
    """Types inside a block, of the output, and of what the optimizer gets."""
    model = sharded(path)
    output = model(torch.ones(SIZE))
    output.sum().backward()
    block = model.language.blocks[1]
    ((inputs, weights),) = block.seen
    return {
        "inputs": inputs,
        "weights": weights,
        "output": output.dtype,
        "parameter": block.weight.dtype,
        "gradient": block.weight.grad.dtype,
    }


@covers("param_dtype")
def test_param_dtype(ranks2: RankPool, written: Callable[..., str]) -> None:
    """Blocks compute in it; parameters and gradients that the optimizer sees stay float32."""
    whole = ranks2.run(dtypes, written(sub_modules_to_wrap=BLOCKS))[0]
    assert set(whole.values()) == {torch.float32}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = ranks2.run(dtypes, written(sub_modules_to_wrap=BLOCKS, param_dtype=name))[0]
        assert found["weights"] == found["inputs"] == found["output"] == dtype
        assert found["parameter"] == found["gradient"] == torch.float32


@covers("output_dtype")
def test_output_dtype(ranks2: RankPool, written: Callable[..., str]) -> None:
    assert ranks2.run(dtypes, written(param_dtype="bf16"))[0]["output"] == torch.bfloat16
    found = ranks2.run(dtypes, written(param_dtype="bf16", output_dtype="fp32"))[0]
    assert found["output"] == torch.float32
    assert found["weights"] == torch.bfloat16


@covers("cast_forward_inputs")
def test_cast_forward_inputs(ranks2: RankPool, written: Callable[..., str]) -> None:
    content = {"sub_modules_to_wrap": BLOCKS, "param_dtype": "bf16"}
    assert ranks2.run(dtypes, written(**content))[0]["inputs"] == torch.bfloat16
    assert ranks2.run(dtypes, written(**content, cast_forward_inputs=True))[0]["inputs"] == torch.bfloat16
    found = ranks2.run(dtypes, written(**content, cast_forward_inputs=False))[0]
    assert found["inputs"] == torch.float32
    assert found["weights"] == torch.bfloat16


def gradient_of_256_and_1(path: str) -> float:
    """Rank 0 contributes 256 to the gradient, rank 1 contributes 1: bf16 can't hold the sum 257."""
    model = sharded(path)
    model(torch.full((SIZE,), 256.0 if dist.get_rank() == 0 else 1.0)).sum().backward()
    gradient = model.vision.stem.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32
    return float(gradient.full_tensor()[0])  # type: ignore[attr-defined]


@covers("reduce_dtype")
@pytest.mark.parametrize(
    "content, exact",
    [
        ({}, True),
        ({"reduce_dtype": "bf16"}, False),
        ({"param_dtype": "bf16"}, True),
        ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, True),
        ({"param_dtype": "bf16", "reduce_dtype": "bf16"}, False),
    ],
    ids=["fp32", "reduced in bf16", "bf16", "bf16, reduced in fp32", "bf16, reduced in bf16"],
)
@pytest.mark.parametrize("sharding_size", [1, 2])
def test_reduce_dtype(
    ranks2: RankPool, written: Callable[..., str], content: dict[str, Any], exact: bool, sharding_size: int
) -> None:
    for gradient in ranks2.run(gradient_of_256_and_1, written(sharding_size=sharding_size, **content)):
        assert (gradient == 257) == exact
        assert gradient in (256, 257, 258)


def norms_over_micro_batches(path: str) -> tuple[float, float]:
    """Norm of a gradient after 32 micro-batches, and of the sum in float64 of the gradients that bf16 makes of each."""
    model, plain = sharded(path), Toy().bfloat16()
    weight, draws = model.vision.stem.weight, torch.Generator().manual_seed(dist.get_rank())
    exact = torch.zeros(SIZE, dtype=torch.float64)
    for i, batch in enumerate(torch.rand(32, SIZE, generator=draws)):
        fsdp2.set_gradient_sync(fsdp2.sharded_units(model), i == 31, model.fsdp2_config.defer_gradient_sync)
        model(batch).sum().backward()
        plain(batch.bfloat16()).sum().backward()
        exact += plain.vision.stem.weight.grad
        plain.zero_grad()
    dist.all_reduce(exact)
    return float(weight.grad.full_tensor().norm()), float(exact.norm())


@covers("reduce_dtype", "defer_gradient_sync")
@pytest.mark.parametrize(
    "content",
    [
        {"sharding_size": 1},
        {"sharding_size": 2, "defer_gradient_sync": True},
        {"sharding_size": 2, "defer_gradient_sync": True, "reduce_dtype": "bf16"},
    ],
    ids=["HSDP", "deferred", "deferred, summed in bf16 as the file says"],
)
def test_gradients_of_micro_batches_are_summed_in_fp32(
    ranks2: RankPool, written: Callable[..., str], content: dict[str, Any]
) -> None:
    norm, exact = ranks2.run(norms_over_micro_batches, written(param_dtype="bf16", **content))[0]
    found = abs(norm / exact - 1)
    assert found < 1e-6 if "reduce_dtype" not in content else 1e-4 < found < 1e-2


@covers("reduce_dtype")
def test_the_flag_for_fp32_gradients_refuses_another_reduce_dtype() -> None:
    flags = PrecisionArguments(bf16=True, accumulate_allreduce_grads_in_fp32=True)
    for fits in (None, "fp32"):
        assert backend_module.with_precision(Fsdp2Config(reduce_dtype=fits), flags).param_dtype == "bf16"
    with pytest.raises(ConfigError, match=r"in-fp32: fsdp2.yaml's reduce_dtype is bf16; write reduce_dtype: fp32, or"):
        backend_module.with_precision(Fsdp2Config(reduce_dtype="bf16"), flags)


# --- memory


def kept_after_forward(path: str) -> tuple[int, int, int]:
    """Elements of a block's parameter that this rank holds before forward, after forward, after backward."""
    model = sharded(path)
    weight = lambda: local(model.vision.blocks[0].weight).numel()  # noqa: E731
    before = weight()
    output = model(torch.ones(SIZE))
    between = weight()
    output.sum().backward()
    return before, between, weight()


@covers("reshard_after_forward")
@pytest.mark.parametrize(
    "content, elements",
    [
        ({}, (2, 2, 2)),
        ({"reshard_after_forward": True}, (2, 2, 2)),
        ({"reshard_after_forward": False}, (2, 8, 2)),
        ({"reshard_after_forward": 2}, (2, 4, 2)),
        ({"reshard_after_forward": 4}, (2, 2, 2)),
    ],
    ids=["default", "true", "false", "2", "4"],
)
def test_reshard_after_forward(
    ranks4: RankPool, written: Callable[..., str], content: dict[str, Any], elements: tuple[int, int, int]
) -> None:
    path = written(sharding_size="auto", sub_modules_to_wrap=BLOCKS, **content)
    assert ranks4.run(kept_after_forward, path) == [elements] * 4


@covers("reshard_after_forward")
def test_reshard_after_forward_that_does_not_divide(ranks4: RankPool, written: Callable[..., str]) -> None:
    for message in ranks4.run(refusal, written(sharding_size="auto", reshard_after_forward=3)):
        assert "reshard_after_forward is 3" in message and "valid here: true, false, 2, 4" in message


def offload_policies(path: str) -> list[str]:
    """Of each unit."""
    seen = []

    def watch(module: Any, **kwargs: Any) -> Any:
        seen.append(type(kwargs["offload_policy"]).__name__)
        return real(module, **kwargs)

    real = fsdp2.fully_shard
    with mock.patch.object(fsdp2, "fully_shard", watch):
        model = sharded(path)
    model(torch.ones(SIZE)).sum().backward()
    return seen


def devices_of_a_model_from_meta(path: str) -> list[str]:
    """Where parameters and buffers would get storage, and where a model with storage would go, on a GPU."""
    with torch.device("meta"):
        model = Toy()
    model.fully_shard(fsdp2_config_path=path)
    gpu = SimpleNamespace(current=lambda: SimpleNamespace(is_host=False, device=lambda: torch.device("cuda", 0)))
    places: list[str] = []
    with (
        mock.patch.object(base_model, "accelerator", gpu),
        mock.patch.object(base_model, "materialize", lambda module, *devices: places.extend(map(str, devices))),
        mock.patch.object(base_model, "has_meta_tensors", lambda module: not places),
        mock.patch.object(model, "draw_weights", lambda **kwargs: None),
        mock.patch.object(model, "to", lambda device: places.append(str(device))),
    ):
        model._post_fully_shard()
        model._post_fully_shard()
    return places


@covers("offload_to_cpu")
def test_offload_to_cpu(ranks2: RankPool, written: Callable[..., str]) -> None:
    """Every unit gets the offload policy, and a model built on meta gets its parameters on the host."""
    off, on = {"sub_modules_to_wrap": BLOCKS}, {"sub_modules_to_wrap": BLOCKS, "offload_to_cpu": True}
    assert ranks2.run(offload_policies, written(**off))[0] == [OffloadPolicy.__name__] * 5
    assert ranks2.run(offload_policies, written(**on))[0] == [CPUOffloadPolicy.__name__] * 5
    assert ranks2.run(devices_of_a_model_from_meta, written(**off))[0] == ["cuda:0", "cuda:0", "cuda:0"]
    assert ranks2.run(devices_of_a_model_from_meta, written(**on))[0] == ["cpu", "cuda:0"]


@covers("offload_to_cpu")
@pytest.mark.parametrize("offload", [False, True])
def test_offload_to_cpu_needs_a_group_for_host_tensors(written: Callable[..., str], offload: bool) -> None:
    run = run_of(
        use_torch_fsdp2=True,
        fsdp2_config_path=written(offload_to_cpu=offload),
        distributed_backend="nccl",
        distributed_timeout_minutes=1,
    )
    with (
        mock.patch.object(backend_module, "start_world", side_effect=InterruptedError) as start,
        pytest.raises(InterruptedError),
    ):
        FSDP2Backend().setup(run)
    assert start.call_args.kwargs == {"timeout_minutes": 1, "needs_cpu_tensors": offload}


@covers("pin_memory")
def test_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned where there is an accelerator, if parameters are offloaded at all."""
    mesh: Any = SimpleNamespace(ndim=1, size=lambda dim=0: 2)
    monkeypatch.setattr(fsdp2.accelerator, "current", lambda: SimpleNamespace(is_host=False))
    for pin in (False, True):
        config = Fsdp2Config.from_dict({"offload_to_cpu": True, "pin_memory": pin})
        policy = fsdp2.build_shard_plan(config, ParameterMeshes(mesh), set()).offload_policy
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory is pin


def said(path: str) -> list[str]:
    with heard() as lines:
        sharded(path)
        sharded(path)
    return lines


@covers("pin_memory")
def test_pin_memory_without_an_accelerator(ranks2: RankPool, written: Callable[..., str]) -> None:
    for rank, lines in enumerate(ranks2.run(said, written(offload_to_cpu=True, pin_memory=True))):
        assert len(lines) == (rank == 0)
        assert all("pin_memory has no effect here" in line for line in lines)
    assert ranks2.run(said, written(offload_to_cpu=True))[0] == []


@covers("pin_memory")
def test_pin_memory_without_offload(ranks2: RankPool, written: Callable[..., str]) -> None:
    (line,) = ranks2.run(said, written(pin_memory=True))[0]
    assert "pin_memory" in line and "without offload_to_cpu: true" in line


# --- overlap


def prefetched(path: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Unit → units gathered ahead of it, forward and backward, as torch was told; then a second step works."""
    model = sharded(path)
    names = {id(module): name for name, module in model.named_modules()}
    told: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})

    def note(kind: int) -> Callable[[Any, Any], None]:
        def set_modules(unit: Any, modules: Any) -> None:
            told[kind][names[id(unit)]] = [names[id(m)] for m in modules]
            real[kind](unit, modules)

        return set_modules

    real = (FSDPModule.set_modules_to_forward_prefetch, FSDPModule.set_modules_to_backward_prefetch)
    with (
        mock.patch.object(FSDPModule, "set_modules_to_forward_prefetch", note(0)),
        mock.patch.object(FSDPModule, "set_modules_to_backward_prefetch", note(1)),
    ):
        for _ in range(2):
            model(torch.ones(SIZE)).sum().backward()
    return told


def ahead(order: list[str], number: int) -> dict[str, list[str]]:
    return {name: order[i + 1 : i + 1 + number] for i, name in enumerate(order)}


@covers("num_to_forward_prefetch", "num_to_backward_prefetch")
@pytest.mark.parametrize("forward, backward", [(None, None), (0, 0), (1, 0), (2, 0), (0, 2), (2, 3)])
def test_prefetch_follows_the_order_of_execution(
    ranks2: RankPool, written: Callable[..., str], forward: int | None, backward: int | None
) -> None:
    counts = {"num_to_forward_prefetch": forward, "num_to_backward_prefetch": backward}
    given = {key: value for key, value in counts.items() if value is not None}
    found = ranks2.run(prefetched, written(sharding_size="auto", sub_modules_to_wrap=BLOCKS, **given))[0]
    forward, backward = 0 if forward is None else forward, 1 if backward is None else backward
    assert found[0] == (ahead(IN_ORDER_OF_EXECUTION, forward) if forward else {})
    assert found[1] == (ahead(IN_ORDER_OF_EXECUTION[::-1], backward) if backward else {})


def collectives_of_a_step(path: str, micro_batches: int) -> tuple[int, int, float]:
    """Reduce-scatters and all-reduces of a step's micro-batches in the real backend, and the gradient they leave."""
    backend = TinySteps("fsdp2", Toy, fsdp2_config_path=path).backend

    def forward_step(data: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Any]:
        return model(next(data)), lambda output: (output.sum(), output.numel(), {})

    with CommDebugMode() as counted:
        backend.forward_backward(forward_step, iter([torch.ones(SIZE)] * micro_batches), micro_batches)
    calls = {str(op): number for op, number in counted.get_comm_counts().items()}
    scatters = sum(number for op, number in calls.items() if "reduce_scatter" in op)
    reduces = sum(number for op, number in calls.items() if "all_reduce" in op or "allreduce" in op)
    return scatters, reduces, float(backend.model.vision.stem.weight.grad.full_tensor()[0])


@covers("defer_gradient_sync")
@pytest.mark.parametrize("sharding_size, replicas", [("auto", 0), (2, 1)], ids=["sharded", "HSDP"])
def test_defer_gradient_sync(ranks4: RankPool, written: Callable[..., str], sharding_size: Any, replicas: int) -> None:
    """5 units and 3 micro-batches: reductions once a micro-batch, or once a step; replicas meet once a step anyway."""
    content = {"sharding_size": sharding_size, "sub_modules_to_wrap": BLOCKS}
    for deferred, times in ((None, 3), (False, 3), (True, 1)):
        given = {} if deferred is None else {"defer_gradient_sync": deferred}
        for found in ranks4.run(collectives_of_a_step, written(**content, **given), 3):
            assert found == (5 * times, 5 * replicas, 4 * 3.0)


# --- experts (what they do to a model that has some: test_experts.py)


@covers("expert_parallel_size")
def test_expert_parallel_size(ranks2: RankPool, written: Callable[..., str]) -> None:
    for message in ranks2.run(refusal, written(expert_parallel_size=2)):
        assert "expert_parallel_size is 2, but Toy has no experts" in message and "write 1" in message
    assert ranks2.run(said, written(expert_parallel_size=1))[0] == []


@covers("moe_modules", "reshard_local_experts", "ep_fsdp_size", "align_fsdp_param_groups")
@covers("tp_colwise", "tp_rowwise", "cp_split_media")
@pytest.mark.parametrize(
    "key, value",
    [
        ("moe_modules", ["language.blocks.{*}"]),
        ("reshard_local_experts", False),
        ("ep_fsdp_size", 1),
        ("align_fsdp_param_groups", True),
        ("tp_colwise", ["language.blocks.{*}"]),
        ("tp_rowwise", ["language.blocks.{*}"]),
        ("cp_split_media", False),
    ],
)
def test_keys_without_effect_are_said_once(ranks2: RankPool, written: Callable[..., str], key: str, value: Any) -> None:
    zero, one = ranks2.run(said, written(**{key: value}))
    assert one == []
    (line,) = zero
    assert f"'{key}' has no effect" in line and "fsdp2.yaml" in line


def files_read(path: str) -> tuple[list[str], str, str | None]:
    """Files that a run reads as fsdp2.yaml, and the dtypes that it and the model compute in."""
    from mindspeed_mm.configs import fsdp2_config

    read = []
    with mock.patch.object(fsdp2_config, "read_yaml", side_effect=lambda p: read.append(str(p)) or {}):
        run = TinySteps("fsdp2", fsdp2_config_path=path, bf16=True)
    return read, run.backend.compute_dtype, run.backend.model.fsdp2_config.param_dtype


def test_the_file_is_read_once_and_the_flags_dtype_is_the_models(ranks2: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "fsdp2.yaml")
    assert all(found == ([path], "bf16", "bf16") for found in ranks2.run(files_read, path))


# --- what flags ask for beside the file


class OwnDoor(nn.Module):
    """A model that shards itself without the mixin."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language = Part(), Part()

    def fully_shard(self, process_group: Any, fsdp2_config_path: str | None) -> bool:
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.language(self.vision(x))


def recomputed_by_flags(path: str | None) -> list[set[str]]:
    """Names of the modules that run twice in a step, with the mixin's door and with one of the model's own."""
    found = []
    flags = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    for kind in (Toy, OwnDoor):
        model = TinySteps("fsdp2", kind, fsdp2_config_path=path, **flags).backend.model
        model(torch.ones(SIZE)).sum().backward()
        scales = {name: module for name, module in model.named_modules() if isinstance(module, Scale)}
        found.append({name for name, module in scales.items() if len(module.seen) == 2})
    return found


@covers("recompute_modules")
def test_flags_recompute_blocks_where_the_file_names_no_modules(ranks1: RankPool, written: Callable[..., str]) -> None:
    first_blocks = {"vision.blocks.0", "language.blocks.0"}
    assert ranks1.run(recomputed_by_flags, None) == [[first_blocks, first_blocks]]
    path = written(recompute_modules=["vision.blocks.{1}"])
    assert ranks1.run(recomputed_by_flags, path) == [[{"vision.blocks.1"}, set()]]
