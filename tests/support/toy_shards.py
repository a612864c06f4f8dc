"""A toy model that is sharded as a user's own model is, through `fully_shard` and a file; what a rank sees of it.

Its language part is registered before its vision part and runs after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from mindspeed_mm import accelerator
from mindspeed_mm.models.common import base_model
from mindspeed_mm.models.common.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.optimizer.clip import sum_plain_gradients
from mindspeed_mm.parallel import fsdp2
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import logger
from tests.support.fake_accelerator import fake_accelerator
from tests.support.tiny_steps import TinySteps
from tests.support.workers import forget_globals

SIZE = 8
BLOCKS = ["language.blocks.{*}", "vision.blocks.{*}"]
_T = TypeVar("_T")


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


class OwnDoor(nn.Module):
    """A model that shards itself without the mixin."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language = Part(), Part()

    def fully_shard(self, process_group: Any, fsdp2_config_path: str | None) -> bool:
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.language(self.vision(x))


def sharded(path: str) -> Toy:
    """A toy as the file says."""
    model = Toy()
    assert model.fully_shard(fsdp2_config_path=path) is True
    return model


def each(see: Callable[..., _T], paths: Sequence[str], *args: Any) -> list[_T]:
    """What `see(path, *args)` returns for each file; none of them knows of the ones before."""
    found = []
    for path in paths:
        forget_globals()
        found.append(see(path, *args))
    return found


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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _scales(model: nn.Module) -> dict[str, Scale]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Scale)}


# --- what a rank sees: each takes the path of a file


def refusal(path: str) -> str:
    """The message that refuses the file."""
    with pytest.raises(ConfigError) as error:
        sharded(path)
    return str(error.value)


def said(path: str) -> list[str]:
    """What is logged while two models are sharded."""
    with heard() as lines:
        sharded(path)
        sharded(path)
    return lines


def shards(path: str) -> tuple[tuple[int, ...], list[float]]:
    """Shape of the mesh, and what this rank holds of a parameter with the values 0 to 7."""
    model = Toy()
    with torch.no_grad():
        model.vision.stem.weight.copy_(torch.arange(SIZE))
    model.fully_shard(fsdp2_config_path=path)
    return tuple(model.device_mesh.shape), _local(model.vision.stem.weight).tolist()


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


def parameters(path: str) -> dict[str, int | None]:
    """Name of each parameter → elements on this rank, or None where FSDP does not manage it and it is whole."""
    found = {}
    for name, param in sharded(path).named_parameters():
        assert isinstance(param, DTensor) or tuple(param.shape) == (SIZE,)
        found[name] = _local(param).numel() if isinstance(param, DTensor) else None
    return found


def bf16_step(path: str, frozen: bool) -> tuple[set[Any], list[torch.Tensor | None], list[torch.Tensor]]:
    """After two micro-batches: what computed with three modules, their summed gradients, their weights.

    Args:
        frozen: whether those modules, the vision's stem and the language's blocks, are.
    """
    model = Toy()
    watched = [model.vision.stem, *model.language.blocks]
    for module in watched:
        module.requires_grad_(not frozen)
        nn.init.constant_(module.weight, 1.003)  # no number of bfloat16
    model.fully_shard(fsdp2_config_path=path)
    for last, seed in ((False, 0), (True, 1)):
        fsdp2.set_gradient_sync(fsdp2.sharded_units(model), last, defer=False)
        draws = torch.Generator().manual_seed(2 * seed + dist.get_rank())
        model(torch.rand(SIZE, generator=draws)).sum().backward()
    weights = [module.weight for module in watched]
    sum_plain_gradients(model.parameters(), None)
    seen = {types for module in watched for types in module.seen}
    return seen, [None if w.grad is None else _whole(w.grad) for w in weights], [_whole(w.detach()) for w in weights]


def runs_in_a_step(path: str) -> dict[str, int]:
    """How often each module runs."""
    model = sharded(path)
    model(torch.ones(SIZE)).sum().backward()
    return {name: len(module.seen) for name, module in _scales(model).items()}


class Shifted(Scale):
    """x, shift [rows, n] → (x + shift) * weight."""

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + shift)


class ShiftedPart(Part):
    """The stem before each of two blocks, whose shift is another one in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shifted(), Shifted()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = x.detach().cos()
        for block in self.blocks:
            x = block(self.stem(x), shift=shift)
        return x


def memory_of_a_step(path: str, rows: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Gathers, reductions, elements copied beside the device's queue and runs of a block; loss and gradients."""
    copies: list[int] = []
    copy = type(accelerator.current()).copy_beside

    def copy_beside(self: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        copies.append(source.numel())
        return copy(self, target, source)

    model = Toy()
    model.vision = ShiftedPart()
    model.fully_shard(fsdp2_config_path=path)
    x = torch.arange(rows * SIZE).view(rows, SIZE).float()
    if model.fsdp2_config is not None and model.fsdp2_config.chunk_mbs_batch_dim == 1:
        x = torch.stack([x, x + 1])
    with CommDebugMode() as comm, mock.patch.object(type(accelerator.current()), "copy_beside", copy_beside):
        loss = model(x.requires_grad_()).square().mean()
        loss.backward()
    counts: dict[str, Any] = {str(op).rpartition(".")[2]: number for op, number in comm.get_comm_counts().items()}
    counts |= {"runs": len(model.vision.blocks[0].seen), "copies": copies}
    return counts, [loss.detach(), *(_local(p.grad) for p in model.parameters() if p.grad is not None)]


def language_of_a_step(path: str, rows: int) -> tuple[int, list[torch.Tensor]]:
    """Runs of a block of the language part in a step; loss and gradients."""
    model = sharded(path)
    loss = model(torch.arange(rows * SIZE).view(rows, SIZE).float()).square().mean()
    loss.backward()
    runs = len(model.language.blocks[0].seen)
    return runs, [loss.detach(), *(_local(p.grad) for p in model.parameters() if p.grad is not None)]


def made_by(path: str) -> list[str]:
    """Names of the autograd functions that made the outputs of the vision's blocks."""
    model = sharded(path)
    names: list[str] = []
    for block in model.vision.blocks:
        block.register_forward_hook(lambda module, args, output: names.append(type(output.grad_fn).__name__))
    model(torch.ones(SIZE)).sum().backward()
    return names


def gradients_above_a_frozen_stem(path: str) -> tuple[dict[str, torch.Tensor | None], list[str]]:
    """This rank's part of each gradient after two steps, and what was logged in them."""
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
    return {name: None if p.grad is None else _local(p.grad).clone() for name, p in model.named_parameters()}, lines


def dtypes(path: str) -> dict[str, torch.dtype]:
    """Types inside a block, of the output, and of what the optimizer gets."""
    model = sharded(path)
    output = model(torch.ones(SIZE))
    output.sum().backward()
    block: Any = model.language.blocks[1]
    ((inputs, weights),) = block.seen
    types = {"inputs": inputs, "weights": weights, "output": output.dtype}
    return {**types, "parameter": block.weight.dtype, "gradient": block.weight.grad.dtype}


def gradient_of_256_and_1(path: str) -> float:
    """Rank 0 contributes 256 to the gradient, rank 1 contributes 1: bf16 can't hold the sum 257."""
    model = sharded(path)
    model(torch.full((SIZE,), 256.0 if dist.get_rank() == 0 else 1.0)).sum().backward()
    gradient = model.vision.stem.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32
    return float(_whole(gradient)[0])


def norms_over_micro_batches(path: str) -> tuple[float, float]:
    """Norm of a gradient after 32 micro-batches, and of the sum in float64 of the gradients that bf16 makes of each."""
    model, plain = sharded(path), Toy().bfloat16()
    assert model.fsdp2_config is not None
    weight, draws = model.vision.stem.weight, torch.Generator().manual_seed(dist.get_rank())
    exact = torch.zeros(SIZE, dtype=torch.float64)
    for i, batch in enumerate(torch.rand(32, SIZE, generator=draws)):
        fsdp2.set_gradient_sync(fsdp2.sharded_units(model), i == 31, model.fsdp2_config.defer_gradient_sync)
        model(batch).sum().backward()
        plain(batch.bfloat16()).sum().backward()
        exact += plain.vision.stem.weight.grad
        plain.zero_grad()
    dist.all_reduce(exact)
    assert weight.grad is not None
    return float(_whole(weight.grad).norm()), float(exact.norm())


def kept_after_forward(path: str) -> tuple[int, int, int]:
    """Elements of a block's parameter that this rank holds before forward, after forward, after backward."""
    model = sharded(path)
    block: Any = model.vision.blocks[0]
    before = _local(block.weight).numel()
    output = model(torch.ones(SIZE))
    between = _local(block.weight).numel()
    output.sum().backward()
    return before, between, _local(block.weight).numel()


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


def gathers_in_forward(path: str) -> list[int]:
    """Gathers that a second step has begun when each unit begins to compute, on a stand-in for a device."""
    with fake_accelerator():
        model = sharded(path)
        model(torch.ones(SIZE)).sum().backward()
        found: list[int] = []
        with CommDebugMode() as counted:
            for unit in model.modules():
                if isinstance(unit, FSDPModule) and unit is not model:
                    unit.register_forward_pre_hook(lambda *_: found.append(counted.get_total_counts()))
            model(torch.ones(SIZE)).sum().backward()
    return found


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
    return scatters, reduces, float(_whole(backend.model.vision.stem.weight.grad)[0])


def files_read(path: str) -> tuple[list[str], str, str | None]:
    """Files that a run reads as fsdp2.yaml, and the dtypes that it and the model compute in."""
    from mindspeed_mm.configs import fsdp2_config

    read: list[str] = []
    with mock.patch.object(fsdp2_config, "read_yaml", side_effect=lambda p: read.append(str(p)) or {}):
        run = TinySteps("fsdp2", fsdp2_config_path=path, bf16=True)
    return read, run.backend.compute_dtype, run.backend.model.fsdp2_config.param_dtype


def recomputed_by_flags(path: str | None) -> list[set[str]]:
    """Names of the modules that run twice in a step, with the mixin's door and with one of the model's own."""
    found = []
    flags = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    for kind in (Toy, OwnDoor):
        model = TinySteps("fsdp2", kind, fsdp2_config_path=path, **flags).backend.model
        model(torch.ones(SIZE)).sum().backward()
        found.append({name for name, module in _scales(model).items() if len(module.seen) == 2})
    return found
