"""Activation offload: the input of a recomputed module waits for its backward pass in host memory.

A recomputed module keeps its inputs. Of these only its first tensor, the hidden states, differs from module to module;
the others (masks, rotary tables) are shared by all and stay on the device. Copies run beside the device's queue: to
the host after the module has been called, and back while the module after it runs backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mindspeed_mm import accelerator
from mindspeed_mm.utils.errors import ConfigError, did_you_mean


def require_recompute(modules: Collection[str], recomputed: Collection[str], where: str) -> None:
    """Check that every one of `modules` is recomputed.

    Args:
        modules: paths that a key names.
        recomputed: paths of the modules that are recomputed in backward.
        where: file and key, for messages.

    Raises:
        ConfigError: one of them isn't.
    """
    kept = [path for path in modules if path not in recomputed]
    if kept:
        rest = f" and {len(kept) - 1} others" if len(kept) > 1 else ""
        raise ConfigError(
            f"{where}: '{kept[0]}'{rest} is not recomputed, but only the inputs of recomputed modules are kept till "
            f"backward by themselves; name the same modules in recompute_modules{did_you_mean(kept[0], recomputed)}"
        )


def apply_offload(modules: Mapping[str, nn.Module]) -> None:
    """Keep the first input tensor of each of `modules` in host memory between its forward and its backward pass.

    Args:
        modules: path → recomputed module; `forward` is replaced.
    """
    inputs = OffloadedInputs()
    for module in modules.values():
        module.forward = _offloaded(module, module.forward, inputs)  # type: ignore[method-assign]


def _offloaded(module: nn.Module, forward: Callable[..., Any], inputs: OffloadedInputs) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = next((x for x in tree_leaves((args, kwargs)) if _is_activation(x)), None)
        if hidden is None or not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        # not the tensor itself: autograd keeps this function, and hands over another object for the same memory
        memory, shape = hidden.data_ptr(), hidden.shape

        def pack(tensor: torch.Tensor) -> torch.Tensor | KeptInput:
            return inputs.keep(tensor) if tensor.data_ptr() == memory and tensor.shape == shape else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return forward(*args, **kwargs)

    return run


def _is_activation(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def _unpack(kept: torch.Tensor | KeptInput) -> torch.Tensor:
    return kept.take() if isinstance(kept, KeptInput) else kept


class OffloadedInputs:
    """The inputs of a model's modules in host memory, in the order in which the modules have run."""

    def __init__(self) -> None:
        self._last: weakref.ref[KeptInput] | None = None
        self._leaving: tuple[torch.Tensor, Callable[[], None]] | None = None

    def keep(self, tensor: torch.Tensor) -> KeptInput:
        """Start copying a tensor to the host; its memory on the device is free when the next one is kept."""
        self.free()
        last = self._last() if self._last is not None else None
        if last is not None:
            last.source = None
        kept = KeptInput(tensor, self)
        kept.previous = self._last
        self._leaving = tensor, kept.copied
        self._last = weakref.ref(kept)
        return kept

    def free(self) -> None:
        """Let go of the tensor whose copy was started last."""
        if self._leaving is not None:
            self._leaving[1]()  # later work of the device may take the memory only after it was copied
            self._leaving = None


class KeptInput:
    """A tensor in host memory that comes back to the device when backward needs it, or the one kept after it.

    Attributes:
        source: the tensor on the device, which the last one still is when backward begins.
        previous: what was kept before it.
    """

    def __init__(self, tensor: torch.Tensor, owner: OffloadedInputs) -> None:
        self._owner, self._device = owner, tensor.device
        self.source: torch.Tensor | None = tensor
        self.previous: weakref.ref[KeptInput] | None = None
        self._layout = torch.empty_like(tensor, device="meta")
        self._host = accelerator.current().host_memory(tensor)
        self.copied = accelerator.current().copy_beside(self._host, tensor)
        self._back: torch.Tensor | None = None
        self._arrived: Callable[[], None] | None = None

    def fetch(self) -> None:
        """Start copying the tensor back to the device, unless it is there."""
        if self.source is None and self._back is None:
            layout = self._layout
            self._back = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=self._device)
            self._arrived = accelerator.current().copy_beside(self._back, self._host)

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, and start copying the one that was kept before it."""
        if self.source is not None:
            self._owner.free()
            back, self.source = self.source, None
        else:
            self.fetch()
            assert self._back is not None and self._arrived is not None
            self._arrived()
            back, self._back = self._back, None
        before = self.previous() if self.previous is not None else None
        if before is not None:
            before.fetch()
        return back
