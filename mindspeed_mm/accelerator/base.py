"""The interface of every device to the rest of the framework."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from mindspeed_mm.accelerator.attention import AttentionKernel, PlainAttention
from mindspeed_mm.accelerator.fused import FusedKernels
from mindspeed_mm.utils.log import notice

CopyT = TypeVar("CopyT")


class Accelerator(ABC):
    """A kind of device (`name`), its collective backend and its memory figures."""

    name: str
    collective_backend: str
    is_host: bool = False
    """Whether this is the host itself: no memory of its own, and no asynchronous queue."""
    sum_dtype: torch.dtype = torch.float32
    """Widest dtype in which this device sums a step's metrics."""

    @abstractmethod
    def device(self) -> torch.device:
        """Return the device of this process (chosen by LOCAL_RANK)."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """Return the bytes in use by tensors of this process now (CPU: resident set size)."""

    @abstractmethod
    def max_memory_allocated(self) -> int:
        """Return the largest number of bytes in use so far (CPU: peak resident set size)."""

    @abstractmethod
    def total_memory(self) -> int:
        """Return the bytes of this process's device (CPU: of the machine)."""

    def set_device(self) -> None:  # noqa: B027 (the host needs no binding)
        """Bind this process to its device."""

    def holds(self, where: torch.Tensor | torch.device) -> bool:
        """Whether a tensor, or data on a device, is in this device's own memory; always False on the host."""
        device = where.device if isinstance(where, torch.Tensor) else where
        return not self.is_host and device.type == self.name

    def copied(self, value: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor on a device; a copy from the host to this device isn't waited for.

        Args:
            value: a tensor anywhere.
            device: where it shall be.
            dtype: its dtype there; None: that of `value`.
        """
        if self.is_host or not self.holds(device):
            return value.to(device, dtype)
        return (value if self.holds(value) else self.pinned(value)).to(device, dtype, non_blocking=True)

    def pinned(self, value: torch.Tensor) -> torch.Tensor:
        """Return a host tensor in pinned memory, from which copies to this device are asynchronous."""
        try:
            return value.pin_memory()
        except RuntimeError as error:
            self._tell_unpinned(error)
            return value

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Return an empty host tensor of the shape and dtype of `like`; pinned if `like` is in this device's memory, so
        that it can be filled asynchronously."""
        if self.holds(like):
            try:
                return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            except RuntimeError as error:
                self._tell_unpinned(error)
        return torch.empty(like.shape, dtype=like.dtype)

    def _tell_unpinned(self, error: RuntimeError) -> None:
        reason = (str(error).splitlines() or [""])[0]
        notice(f"host memory can't be pinned, copies from and to the device take longer ({reason})")

    def read_later(self, values: torch.Tensor) -> Callable[[], list[Any]]:
        """Start copying a small tensor to the host, without waiting.

        Returns:
            a function that waits for the copy, but not for later work of the device, and returns the values as `tolist`
            does.
        """
        copy = self.host_memory(values).copy_(values, non_blocking=True)
        if not self.holds(values):
            return copy.tolist
        copied = self.record_event()

        def read() -> list[Any]:
            copied.synchronize()
            return copy.tolist()

        return read

    def ahead(self, copy: Callable[[], CopyT]) -> Callable[[], CopyT]:
        """Call a function whose copies from pinned memory to this device go beside the device's queue.

        The copies wait for nothing that the queue holds; on the host they are finished at once.

        Returns:
            a function that lets later work of the queue wait for the copies, and returns the result.
        """
        result = copy()
        return lambda: result

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Start a copy between host memory, from `host_memory`, and this device, beside the device's queue.

        It starts when the queue has reached this call; on the host it is finished at once.

        Returns:
            a function that lets later work of the queue wait for the copy.
        """
        target.copy_(source)
        return lambda: None

    def record_event(self) -> Any:
        """Record an event in the device's queue; its `synchronize()` waits until the device has reached it."""
        raise NotImplementedError(f"{self.name} has no queue")

    def synchronize(self) -> None:  # noqa: B027 (the host has no queue)
        """Wait until the device has finished all queued work."""

    def manual_seed(self, seed: int) -> None:
        """Seed the host's and the device's default generators."""
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Return the default generators' states, one uint8 tensor for each kind of device."""
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore states that `rng_state` returned; that of another kind of device is ignored."""
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])

    def why_no_float8(self) -> str | None:
        """Return why torch's products of float8 matrices (`torch._scaled_mm`) can't run here; None: they can."""
        return f"this machine computes on {self.name}"

    def why_no_inductor(self) -> str | None:
        """Return which compiler torch.compile's kernels for this device need and isn't there; None: it is."""
        from torch.utils._triton import has_triton

        return None if has_triton() else f"kernels for {self.name} are compiled by triton, which isn't installed"

    def prepare_steps(  # noqa: B027 (only the host needs it)
        self, modules: Sequence[nn.Module], *, compiles: bool = False
    ) -> None:
        """Choose for this process what computes steps of these modules fastest: what multiplies float32 matrices,
        exactly, the kernel of attention, and how memory is allocated.

        Args:
            compiles: the run compiles kernels for this machine.
        """

    def float32_products(self) -> str:
        """Return which library multiplies float32 matrices here."""
        return f"the library of {self.name}"

    def small_products(self) -> AbstractContextManager[None]:
        """Return a context of many small products, in which the library that is fastest for them multiplies."""
        return nullcontext()

    def allow_tf32(self) -> None:
        """Compute float32 matrix products and convolutions in the device's shorter format (--allow-tf32)."""
        notice(f"--allow-tf32 has no effect here: this machine computes on {self.name}, float32 stays float32")

    def supports_fused_optimizers(self) -> bool:
        """Whether torch's fused kernels of AdamW and SGD run here, and honour `grad_scale` and `found_inf`."""
        return True

    def why_no_attention(self, implementation: str) -> str | None:
        """Return why an attention implementation (by transformers' name) can't run here; None: it can."""
        if implementation in ("eager", "sdpa", "flex_attention"):
            return None
        if implementation not in self.attention_packages:
            return f"it does not run on {self.name}"
        package = self.attention_packages[implementation]
        if package is None or importlib.util.find_spec(package) is not None:
            return None
        return f"{package} is not installed"

    attention_packages: Mapping[str, str | None] = MappingProxyType({})
    """Attention implementations beyond PyTorch's own → the package that they need (None: no further one)."""

    def kernels_not_taken(self) -> dict[str, str]:
        """Return fast kernels of attention that this device doesn't take, or not always → why."""
        return {}

    def attention_kernel(self, query: torch.Tensor, value: torch.Tensor) -> AttentionKernel:
        """Return this device's kernel of attention to a block of keys.

        Args:
            query, value: tensors `[batch, tokens, heads, head size]` of the dtype and the head sizes to come.
        """
        return PlainAttention()

    def compiled_attention_kernel(self, query: torch.Tensor, value: torch.Tensor) -> AttentionKernel:
        """Return what `attention_kernel` returns in runs that compile blocks."""
        return self.attention_kernel(query, value)

    def fused_kernels(self) -> FusedKernels | None:
        """Return this device's fused kernels of norms, gated activations and rotary positions; None: it has none."""
        return None

    def why_no_fused_kernels(self) -> str:
        """Return why `fused_kernels` returns None."""
        return f"this machine computes on {self.name}, with transformers' own kernels"

    def prepare_megatron(self) -> None:  # noqa: B027 (CUDA is what megatron-core is written for)
        """Prepare this process for megatron-core on this kind of device, before its first import."""

    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        """Return the profiler activities of this device."""
        return [torch.profiler.ProfilerActivity.CPU]

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak of this device in operations per second for bf16, fp16 or fp32; None: unknown.

        MM_DEVICE_PEAK_TFLOPS in the environment overrides it (in 10^12 operations per second).
        """
        given = os.environ.get("MM_DEVICE_PEAK_TFLOPS")
        if given:
            return float(given) * 1e12
        model = self.model_name()
        for part, peak_16, peak_32 in self.peaks:
            if part in model:
                return (peak_32 if dtype == "fp32" else peak_16) * 1e12
        return None

    peaks: tuple[tuple[str, float, float], ...] = ()

    def model_name(self) -> str:
        """Return the device's product name."""
        return self.name

    def record_memory_history(self, stacks: str, max_entries: int | None) -> None:  # noqa: B027
        """Start recording the device allocator's events (tools.json: memory_profile)."""

    def dump_memory_snapshot(self, path: str) -> None:  # noqa: B027
        """Write the recorded events to `path` and stop recording."""

    def resolve_backend(self, requested: str | None, needs_cpu_tensors: bool = False) -> str:
        """See `mindspeed_mm.accelerator.resolve_backend`."""
        own = self.collective_backend
        wanted = (requested or own).strip()
        entries: dict[str, str] = {}
        for entry in wanted.split(","):
            device, colon, for_device = entry.partition(":")
            entries[device if colon else self.name] = for_device if colon else entry
        usable = {"gloo", own}
        backend = entries.get(self.name, own)
        if backend not in usable or (self.name not in entries and requested):
            notice(f"--distributed-backend {requested}: this machine computes on {self.name}, {own} is used instead")
            backend = own
        if self.is_host:
            return backend
        host = entries.get("cpu")
        if host or needs_cpu_tensors:
            return f"{self.name}:{backend},cpu:{host or 'gloo'}"
        return backend
