"""Counts where the host reads what is on the device, on a machine whose device is the host.

Beside a real device such a read waits for all that the device was given before. On the host it costs nothing and
looks like any other line, so it is found by what is read: tensors that went through the accelerator's move, parameters,
gradients, and whatever is computed from them. Marks are of ranges of storages; each operator hands them on from what it
reads to what it writes. Host memory that the accelerator hands out for copies carries none: it may be read once another
loss has been computed, and before that counts as a read of the device.

A dispatch mode alone sees neither `tolist`, `numpy` nor `cpu` of a tensor in host memory; a function mode alone misses
what operators read by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mindspeed_mm.accelerator.base import Accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator
from mindspeed_mm.backends.engine import StepEngine
from mindspeed_mm.models.generation.sample_encoder import SampleEncoder

TORCH = str(Path(torch.__file__).parent)
METHODS = ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__format__")
"""Methods of a tensor that read it. `to` does where it names the host."""
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "equal")
OPERATORS += ("unique_consecutive", "bincount", "masked_scatter_backward")
"""Operators whose result the host has to wait for; so is an index by a mask, and a repetition of unstated length."""
WAITING_COPIES = ("to", "tensor", "as_tensor", "asarray")
"""What copies host memory to the device and, unless it is told not to, waits for all that the device was given."""
HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)
"""The same place; its second name is the accelerator's while reads are counted."""
_IN_PLACE = ("allreduce_", "broadcast_", "reduce_", "barrier")
"""Collectives that leave each value where it is."""
_PASSED_THROUGH = ("torch/_tensor.py", "torch/functional.py", "torch/overrides.py", "torch/_jit_internal.py")
_PASSED_THROUGH += ("torch/utils/_python_dispatch.py", "torch/_ops.py", "torch/utils/_device.py", __file__)
_PASSED_THROUGH += ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "accelerator/megatron_cpu.py")


_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


@dataclass(frozen=True)
class HostRead:
    """What was read, and the line that asked for it, in which function."""

    kind: str
    file: str
    line: int
    function: str


class DeviceMarks:
    """Which bytes of which storages count as the device's."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}
        self._host: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Let what `tensor` covers be the device's."""
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if storage._cdata in self._host:
                continue
            if storage._cdata not in self._marks:  # the weak reference keeps the address from being used again
                self._marks[storage._cdata] = (StorageWeakRef(storage), [])
            own, known = _extent(part), self._marks[storage._cdata][1]
            if own not in known:
                known.append(own)

    def add_weights(self, module: nn.Module) -> None:
        """Let a model's parameters, buffers and other tensors be the device's."""
        found = [*nn.Module.parameters(module), *nn.Module.buffers(module)]  # Megatron has lists of these names
        for part in module.modules():  # and angles that are no buffers
            found += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
        for tensor in found:
            self.add(tensor)

    def add_host(self, tensor: torch.Tensor, span: int) -> None:
        """Let all of `tensor`'s storage be the host's for ever.

        Args:
            span: number of the span that it was handed out in; what is copied to it is on its way until the next one.
        """
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = StorageWeakRef(storage), span

    def is_on_its_way(self, tensor: torch.Tensor, span: int) -> bool:
        """Whether `tensor` is host memory that the device is still to fill, so that reading it waits."""
        return any(
            self._host[part.untyped_storage()._cdata][1] == span
            for part in _parts(tensor)
            if part.untyped_storage()._cdata in self._host
        )

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether any of what `tensor` covers is the device's."""
        for part in _parts(tensor):
            begin, end = _extent(part)
            known = self._marks.get(part.untyped_storage()._cdata)
            if known is not None and any(first < end and begin < last for first, last in known[1]):
                return True
        return False


class HostReads:
    """Reads found so far.

    Attributes:
        windows: of each step, from its first micro-batch to the next step's, its reads, in order.
        marks: what is the device's.
    """

    def __init__(self) -> None:
        self.windows: list[list[HostRead]] = []
        self.marks = DeviceMarks()
        self._is_open = False
        self._inside = 0

    def open(self) -> None:
        """Begin a span."""
        self.windows.append([])
        self._is_open = True

    def close(self, *_: Any) -> None:
        """End it."""
        self._is_open = False

    def note(self, kind: str) -> None:
        """A read, unless it is part of another one."""
        if self._is_open and not self._inside:
            self.windows[-1].append(HostRead(kind, *_caller()))

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Meanwhile this thread's reads are seen."""
        with _Functions(self), _Operators(self):
            yield

    @contextmanager
    def within(self) -> Iterator[None]:
        """Meanwhile reads are part of one that was noted already."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


class _Functions(TorchFunctionMode):
    """Sees methods and functions as they are called."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, marks = getattr(func, "__name__", ""), self._reads.marks
        of_device = bool(args) and isinstance(args[0], torch.Tensor) and marks.has(args[0])
        if name in METHODS and args and marks.is_on_its_way(args[0], len(self._reads.windows)):
            of_device = True
        if name == "__get__" and func.__self__.__name__ == "device" and of_device and not _is_torchs(*_caller()):
            return DEVICE  # so that a move to where another tensor is can be told from one to the host
        if of_device and (name in METHODS or (name == "to" and self._goes_to_host(args, kwargs))):
            self._reads.note(name)
            with self._reads.within():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self._goes_to_device(name, args, kwargs):
            is_weight = name == "to" and args[0].requires_grad  # gathered by a collective, which marks don't follow
            if name in WAITING_COPIES and not (of_device or is_weight or kwargs.get("non_blocking")):
                self._reads.note(f"{name} device")
            if name == "to" and not of_device and result is args[0]:
                result = result.clone()  # a device's copy is another tensor than the host's
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    marks.add(value)
        return result

    def _goes_to_device(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether `to`, or a function that makes a tensor, names the device, or a tensor that is the device's."""
        where = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        return self._reads.marks.has(where) if isinstance(where, torch.Tensor) else _is(DEVICE, where)

    def _goes_to_host(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether `to` names the host, or a tensor that is the host's."""
        where = kwargs.get("device", args[1] if len(args) > 1 else None)
        return not self._reads.marks.has(where) if isinstance(where, torch.Tensor) else _is(HOST, where)


class _Operators(TorchDispatchMode):
    """Sees operators, also those that others call, and hands marks on."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # becomes operators on its local parts, which come by here
        marks, name = self._reads.marks, func._schema.name.split("::")[-1]
        is_device = any(marks.has(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
        if is_device and (
            name in OPERATORS
            or (name.startswith("index") and self._masks(args) and not self._fills(name, args))
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        ):
            self._reads.note(name)
        result = func(*args, **kwargs)
        if is_device and name not in _IN_PLACE:
            written = [
                value
                for argument, value in zip(func._schema.arguments, [*args, *kwargs.values()], strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            views = [] if written else tree_leaves((args, kwargs))  # of what is read, whose marks say all about them
            storages = {value.untyped_storage()._cdata for value in views if isinstance(value, torch.Tensor)}
            for value in tree_leaves((result, written)):
                if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in storages:
                    marks.add(value)
        return result

    def _fills(self, name: str, args: Sequence[Any]) -> bool:
        """Whether one number of the host's is put where a mask is true, which needs no index."""
        value = args[2] if name.startswith("index_put") else None
        return isinstance(value, torch.Tensor) and value.numel() == 1 and not self._reads.marks.has(value)

    def _masks(self, args: Sequence[Any]) -> bool:
        """Whether an index is a mask of the device's."""
        indices = [value for value in tree_leaves(args[1:2]) if isinstance(value, torch.Tensor)]
        return any(value.dtype in (torch.bool, torch.uint8) and self._reads.marks.has(value) for value in indices)


@contextmanager
def counted_host_reads() -> Iterator[HostReads]:
    """Count meanwhile what the host reads of the device in the steps of a `StepEngine`, from input to update."""
    reads = HostReads()
    begin, run, step, evaluate = (
        StepEngine.__init__,
        StepEngine.forward_backward,
        StepEngine.step,
        StepEngine.evaluate,
    )
    pinned, load, root = Accelerator.host_memory, SampleEncoder.load, FSDPState._root_pre_forward

    def begin_and_watch(engine: StepEngine, *args: Any, modules: Sequence[nn.Module], **how: Any) -> None:
        begin(engine, *args, modules=modules, **how)
        for tensor in (engine._ema._steps, *engine._ema.tensors().values()) if engine._ema is not None else ():
            reads.marks.add(tensor)
        for module in modules:
            reads.marks.add_weights(module)

    def open_and_run(engine: StepEngine, *args: Any, **how: Any) -> None:
        reads.open()
        run(engine, *args, **how)

    def mark_and_step(engine: StepEngine, *args: Any, **how: Any) -> Any:
        for module in engine._modules:
            for parameter in nn.Module.parameters(module):
                if parameter.grad is not None:  # reduced by a collective
                    reads.marks.add(parameter.grad)
        return step(engine, *args, **how)

    def close_and_evaluate(engine: StepEngine, *args: Any, **how: Any) -> tuple[float, float]:
        reads.close()
        return evaluate(engine, *args, **how)

    def move_inputs(state: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As FSDP does beside a device."""
        is_root = state._state_ctx.iter_forward_root is None
        args, kwargs = root(state, module, args, kwargs)
        return tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), (args, kwargs)) if is_root else (args, kwargs)

    def host_memory(device: Accelerator, like: torch.Tensor) -> torch.Tensor:
        memory = pinned(device, like)
        reads.marks.add_host(memory, len(reads.windows))
        return memory

    def copied(device: Accelerator, value: torch.Tensor, where: torch.device, dtype: torch.dtype | None = None) -> Any:
        return value.to(where, dtype, non_blocking=_is(DEVICE, where))

    def load_encoders(encoder: SampleEncoder) -> None:
        load(encoder)  # which moves nothing where the device is the host
        for tensor, _ in encoder._on_host:
            reads.marks.add(tensor)

    with ExitStack() as stack:
        for owner, name, new in (
            (SampleEncoder, "load", load_encoders),
            (StepEngine, "__init__", begin_and_watch),
            (StepEngine, "forward_backward", open_and_run),
            (StepEngine, "step", mark_and_step),
            (StepEngine, "evaluate", close_and_evaluate),
            (FSDPState, "_root_pre_forward", move_inputs),
            (Accelerator, "host_memory", host_memory),
            (CPUAccelerator, "device", lambda device: DEVICE),
            (Accelerator, "copied", copied),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(reads.seen())
        yield reads


def _is(device: torch.device, where: Any) -> bool:
    return isinstance(where, (str, torch.device)) and torch.device(where) == device


def _is_torchs(file: str, line: int, function: str) -> bool:
    return file.startswith(TORCH)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself, or what a DTensor holds here; none of it where it has no memory."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    is_plain = part.layout is torch.strided and not part.is_meta and not is_functorch_wrapped_tensor(part)
    return [part] if is_plain and part.numel() and part.untyped_storage().nbytes() else []


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of its storage that a tensor covers, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _caller() -> tuple[str, int, str]:
    """The nearest line of a function that is neither of these modes nor a wrapper of torch's around an operator."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.endswith(_PASSED_THROUGH) or frame.f_code.co_name in _COMPREHENSIONS
    ):
        frame = frame.f_back
    return ("?", 0, "?") if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
