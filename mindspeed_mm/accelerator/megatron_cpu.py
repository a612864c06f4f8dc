"""Let megatron-core run on the host: CPU implementations of the part of `torch.cuda` that it uses.

It is the counterpart of `mindspeed.megatron_adaptor` for machines with neither an NPU nor a GPU. It must be applied
before the first import of megatron (some names are imported by value), and never with a real `torch.cuda`.
`torch.cuda.is_available()` stays False, so that every other library still sees a machine without an accelerator.

Each patch names the megatron-core 0.16.1 code that needs it.
"""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.utils.errors import ConfigError

_CPU = torch.device("cpu")
_applied = False


def apply_cpu_adaptor() -> None:
    """Patch this process, once.

    Raises:
        ConfigError: there is a CUDA device, or megatron-core has been imported already.
    """
    global _applied
    if _applied:
        return
    if torch.cuda.is_available():
        raise ConfigError("the CPU adaptor for megatron-core must not be applied where there is a CUDA device")
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "megatron.core was imported before mindspeed_mm prepared this process for it; import mindspeed_mm first"
        )
    _applied = True
    _patch_cuda_module()
    _patch_factories()
    _patch_moves()
    _patch_type_names()
    _patch_uneven_collectives()


class _Stream:
    """Host operations are complete when they return: all streams are equal, and ordering is implied."""

    device, device_index, device_type = _CPU, 0, "cpu"
    cuda_stream = stream_id = priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return _Event() if event is None else event

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._time - self._time)


class _Generators:
    """`torch.cuda.default_generators[any index]`: the host's generator in place of the device's."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _resident_bytes(device: object = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _set_rng_state(state: torch.Tensor, device: object = "cuda") -> None:
    torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _patch_cuda_module() -> None:
    stream = _Stream()
    generator = torch.default_generator
    cuda: Any = torch.cuda
    # device=torch.cuda.current_device() in 175 places, 20 of which we call (buffers of DDP, mappings, layers, p2p)
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    # pipeline_parallel/p2p_communication.py, dist_checkpointing
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    # transformer/moe/token_dispatcher.py, distributed data parallel with overlap
    cuda.Stream = cuda.ExternalStream = _Stream
    cuda.Event = _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.set_stream = lambda stream: None
    cuda.stream = cuda.device = _nothing
    # tensor_parallel/random.py: the tracker of random states
    cuda.get_rng_state = lambda device="cuda": generator.get_state()
    cuda.set_rng_state = _set_rng_state
    cuda.manual_seed = cuda.manual_seed_all = _manual_seed
    cuda.initial_seed = generator.initial_seed
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.default_generators = _Generators()
    # tensor_parallel/random.py imports _lazy_call by name: left alone, its callbacks would wait for a device for ever
    # and the tracker would silently never restore a state
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda._lazy_init = lambda: None
    # timers, logging, utils.nvtx_range_push
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _resident_bytes)
    cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.memory_stats = lambda device=None: defaultdict(int)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    cuda.nvtx.range = _nothing


def _patch_factories() -> None:
    """Literal device="cuda" (schedules.py, clip_grads.py, optimizer.py), pin_memory=True (rope_utils.py)."""
    from torch.utils._device import _device_constructors

    constructors = _device_constructors()
    for name in dir(torch):
        function = getattr(torch, name)
        try:
            is_factory = function in constructors
        except TypeError:
            continue
        if is_factory:
            setattr(torch, name, _on_host(function))


def _patch_moves() -> None:
    """`.cuda()` (language_module.py, rope_utils.py), `.to("cuda")`, pinning, DeviceMesh.from_group(group, "cuda")."""
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    tensor.to, module.to = _to_host(tensor.to), _to_host(module.to)
    from torch.distributed.device_mesh import DeviceMesh

    from_group = DeviceMesh.from_group

    def on_host(
        group: dist.ProcessGroup | list[dist.ProcessGroup], device_type: str, *args: Any, **kwargs: Any
    ) -> DeviceMesh:
        return from_group(group, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    mesh: Any = DeviceMesh
    mesh.from_group = staticmethod(on_host)


def _patch_type_names() -> None:
    """distrib_optimizer.py, clip_grads.py compare `tensor.type()` with "torch.cuda.FloatTensor"; they alone see it."""
    original = torch.Tensor.type

    def type_name(
        self: torch.Tensor, dtype: torch.dtype | str | None = None, non_blocking: bool = False, **kwargs: Any
    ) -> str | torch.Tensor:
        if dtype is not None:
            return original(self, dtype, non_blocking, **kwargs)
        name = original(self)
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return name.replace("torch.", "torch.cuda.", 1) if asks.startswith("megatron.") else name

    tensor: Any = torch.Tensor
    tensor.type = type_name


def _patch_uneven_collectives() -> None:
    """mappings.py gathers and scatters lists of unequal tensors (experts under TP); gloo refuses them."""
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather)
    def gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | _Done | None:
        if len({t.shape for t in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, group, async_op)
        group = group or dist.group.WORLD
        tensor_list[group.rank()].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)
        return _Done() if async_op else None

    @functools.wraps(reduce_scatter)
    def scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: dist.ReduceOp = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | _Done | None:
        if len({t.shape for t in input_list}) <= 1:
            return reduce_scatter(output, input_list, op, group, async_op)
        group = group or dist.group.WORLD
        flat = torch.cat(list(input_list))
        dist.all_reduce(flat, op=op, group=group)
        sizes = [t.shape[0] for t in input_list]
        output.copy_(flat[sum(sizes[: group.rank()]) :][: sizes[group.rank()]])
        return _Done() if async_op else None

    module: Any = dist
    module.all_gather, module.reduce_scatter = gather, scatter


class _Done:
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return make


def _to_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def move(self: object, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return function(self, *args, **kwargs)

    return move
