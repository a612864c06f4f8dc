"""Activation offload: what a module keeps for its backward pass waits for it in host memory.

A module keeps the tensors that autograd saves inside of it; a recomputed one keeps its inputs only. Of these go to the
host those that belong to this call of the module. On the device stay parameters and buffers, whatever else a module is
given that is the same for all (masks, rotary tables), and what is too small to be worth a copy. Copies run beside the
device's queue: to the host as soon as a tensor is saved, and back while the module after it runs backward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from mindspeed_mm import accelerator

#: of the bytes of the hidden states; a tensor that is smaller stays on the device, as a copy is not worth its launch
SMALLEST_SHARE = 1 / 64

_OFFLOADED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def apply_offload(modules: Mapping[str, nn.Module]) -> None:
    """Keep what each of `modules` saves for its backward pass in host memory until then.

    Args:
        modules: path → module, none of which is inside of another one; `forward` is replaced.
    """
    calls = OffloadedCalls()
    for module in modules.values():
        module.forward = _offloaded(module, module.forward, calls)  # type: ignore[method-assign]
        _OFFLOADED.add(module)


def is_offloaded(module: nn.Module) -> bool:
    """Whether `apply_offload` was called for a module."""
    return module in _OFFLOADED


def _offloaded(module: nn.Module, forward: Callable[..., Any], calls: OffloadedCalls) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        call = calls.begin(module, given)
        if call is None:
            return forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(call.keep, _unpack):
            return forward(*args, **kwargs)

    return run


def _unpack(kept: torch.Tensor | KeptView) -> torch.Tensor:
    return kept.take() if isinstance(kept, KeptView) else kept


class OffloadedCalls:
    """The calls of a model's modules, in the order in which the modules have run."""

    def __init__(self) -> None:
        self._last: weakref.ref[OffloadedCall] | None = None
        self._given: set[StorageWeakRef] = set()

    def begin(self, module: nn.Module, given: list[torch.Tensor]) -> OffloadedCall | None:
        """Begin a call.

        Args:
            module: the called one.
            given: the tensors of its arguments.

        Returns:
            None if no argument is an activation.
        """
        hidden = next((x for x in given if x.is_floating_point() and x.numel()), None)
        if hidden is None:
            return None
        # what the module before it was given as well belongs to neither; what needs no gradient is a table or a mask
        others = [x for x in given if x is not hidden]
        shared = {s for x in others if (s := _storage(x)) in self._given or not x.requires_grad} - {_storage(hidden)}
        self._given = {_storage(x) for x in others}
        return OffloadedCall(module, hidden, shared, self)

    def follow(self, call: OffloadedCall) -> weakref.ref[OffloadedCall] | None:
        """Note that a call keeps something, and free what the one before it has on the device; returned is that one."""
        before = self._last
        self._last = weakref.ref(call)
        if before is not None and (found := before()) is not None:
            found.free()
        return before


class OffloadedCall:
    """What one call of a module keeps in host memory.

    Autograd holds it as long as it may run the call's backward pass; it holds no activation itself.

    Attributes:
        device: of the activations.
    """

    def __init__(
        self,
        module: nn.Module,
        hidden: torch.Tensor,
        shared: set[StorageWeakRef],
        calls: OffloadedCalls,
    ) -> None:
        """
        Args:
            module: the called one.
            hidden: its hidden states.
            shared: memory of arguments that stay on the device.
            calls: those of the model.
        """
        self.device = hidden.device
        self._smallest = SMALLEST_SHARE * hidden.numel() * hidden.element_size()
        self._module, self._shared, self._calls = module, shared, calls
        self._previous: weakref.ref[OffloadedCall] | None = None
        self._own = {_storage(x) for x in _weights(module)}
        self._has_units = any(isinstance(m, FSDPModule) for m in module.modules() if m is not module)
        self._kept: dict[tuple[Any, ...], weakref.ref[KeptTensor]] = {}
        self._is_fetched = False

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | KeptView:
        """Start copying a tensor that autograd saves to the host; returned is what autograd holds instead."""
        if not self._leaves(tensor):
            return tensor
        if not self._kept:
            self._previous = self._calls.follow(self)
        storage, size = tensor.untyped_storage(), tensor.element_size()
        first, extent = tensor.storage_offset(), _extent(tensor)
        is_whole = not storage.nbytes() % size and 8 * extent * size >= 7 * storage.nbytes()
        # all parts of a tensor, as queries, keys and values are of one product, go in one copy
        start, length = (0, storage.nbytes() // size) if is_whole else (first, extent)
        key = (StorageWeakRef(storage), tensor._version, tensor.dtype, start, length)
        found = self._kept.get(key)
        kept = found() if found is not None else None
        if kept is None:
            kept = KeptTensor(tensor.as_strided((length,), (1,), start), self)
            self._kept[key] = weakref.ref(kept)
        return KeptView(kept, tensor.shape, tensor.stride(), first - start)

    def _leaves(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is saved goes to the host."""
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided or tensor.device != self.device:
            return False
        if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            return False
        if _extent(tensor) * tensor.element_size() < self._smallest:
            return False
        storage = _storage(tensor)
        if storage in self._shared or storage in self._own:
            return False
        # the weights of a unit inside of the module are gathered while it runs
        return not (self._has_units and any(_storage(x) == storage for x in _weights(self._module)))

    def free(self) -> None:
        """Let go of what is still on the device, as soon as it has been copied."""
        for kept in self._alive():
            kept.free()

    def fetch(self) -> None:
        """Start copying everything back to the device, what was saved last first; done once."""
        if self._is_fetched:
            return
        self._is_fetched = True
        for kept in reversed(list(self._alive())):
            kept.fetch()

    def fetch_before(self) -> None:
        """Start copying back what the call before this one has kept."""
        before = self._previous() if self._previous is not None else None
        self._previous = None
        if before is not None:
            before.fetch()

    def _alive(self) -> Iterator[KeptTensor]:
        return (kept for found in self._kept.values() if (kept := found()) is not None)


class KeptTensor:
    """A tensor in host memory that comes back to the device when backward needs it, or what was kept after it."""

    def __init__(self, flat: torch.Tensor, call: OffloadedCall) -> None:
        """
        Args:
            flat: contiguous, `[elements]`; on the device.
            call: that saved it.
        """
        self.call = call
        self.views = 0
        self._source: torch.Tensor | None = flat
        self._version, self._is_changed = flat._version, False
        self._host = accelerator.current().host_memory(flat)
        self._copied = accelerator.current().copy_beside(self._host, flat)
        self._back: torch.Tensor | None = None
        self._arrived: Callable[[], None] | None = None
        self._taken = 0

    def free(self) -> None:
        """Let go of the tensor on the device, which later work may overwrite only after it was copied."""
        if self._source is not None:
            self._copied()
            self._note_change()
            self._source = None

    def _note_change(self) -> None:
        if self._source is not None and self._source._version != self._version:
            self._is_changed = True

    def fetch(self) -> None:
        """Start copying the tensor back to the device, unless it is there."""
        if self._source is None and self._back is None:
            self._back = torch.empty(self._host.shape, dtype=self._host.dtype, device=self.call.device)
            self._arrived = accelerator.current().copy_beside(self._back, self._host)

    def take(self) -> torch.Tensor:
        """Return the tensor on the device for one of its views, the last of which lets go of it.

        Raises:
            RuntimeError: it was changed in place after it was saved, which autograd refuses without offload as well.
        """
        self._note_change()
        if self._is_changed:
            raise RuntimeError(
                f"a tensor of {self._host.numel()} elements ({self._host.dtype}) that backward needs was modified by "
                "an inplace operation after it was saved, while it was being copied to host memory"
            )
        found = self._source
        if found is not None:
            if self._taken + 1 == self.views:
                self.free()
        else:
            self.call.fetch()
            self.fetch()
            if self._arrived is not None:
                self._arrived()
                self._arrived = None
            found = self._back
            assert found is not None
        self._taken += 1
        if self._taken == self.views:
            self._taken, self._back = 0, None
        self.call.fetch_before()
        return found


class KeptView:
    """A view of a tensor in host memory; autograd holds it in the place of the tensor that it has saved."""

    def __init__(self, kept: KeptTensor, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._kept, self._size, self._stride, self._offset = kept, size, stride, offset
        kept.views += 1

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, and start copying back what the module before has kept."""
        found = self._kept.take()
        return found.as_strided(self._size, self._stride, found.storage_offset() + self._offset)


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, as they are gathered now, and buffers."""
    return itertools.chain(module.parameters(), module.buffers())


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return StorageWeakRef(tensor.untyped_storage())


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first one of a tensor in memory to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
