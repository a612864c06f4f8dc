"""Environment variables whose values are known to slow a run down, and what to write instead.

`mindspeed-mm doctor` and the start of every run report them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from mindspeed_mm.utils.launch import this_launch

_EVERY_DEVICE = ("cpu", "cuda", "npu")
_YES = ("1", "true", "yes", "on")


class _Setting(NamedTuple):
    """A variable that slows down any training.

    Attributes:
        values: the harmful ones, in lower case.
        devices: kinds of devices on which it is harmful.
        why: the consequence and what to write instead, after `NAME=value`.
    """

    name: str
    values: tuple[str, ...]
    devices: tuple[str, ...]
    why: str


_SETTINGS = (
    _Setting("CUDA_LAUNCH_BLOCKING", _YES, ("cuda",), "lets the host wait for every kernel, to find faults; unset it"),
    _Setting(
        "ASCEND_LAUNCH_BLOCKING",
        ("1",),
        ("npu",),
        "lets the host wait for every operator, to find faults; export ASCEND_LAUNCH_BLOCKING=0",
    ),
    _Setting(
        "TASK_QUEUE_ENABLE",
        ("0",),
        ("npu",),
        "launches operators from Python's own thread; export TASK_QUEUE_ENABLE=2",
    ),
    _Setting(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _YES, ("cuda",), "asks the driver for the memory of every tensor; unset it"
    ),
    _Setting(
        "PYTORCH_NO_NPU_MEMORY_CACHING", ("1",), ("npu",), "asks the driver for the memory of every tensor; unset it"
    ),
    _Setting("TORCH_NCCL_BLOCKING_WAIT", _YES, ("cuda",), "lets the host wait for every collective; unset it"),
    _Setting(
        "TORCH_DISTRIBUTED_DEBUG",
        ("detail",),
        _EVERY_DEVICE,
        "checks every collective by further ones; unset it unless ranks hang",
    ),
    _Setting(
        "TOKENIZERS_PARALLELISM",
        _YES,
        _EVERY_DEVICE,
        "lets each loader worker start a thread for every core; export TOKENIZERS_PARALLELISM=false",
    ),
)


def harmful_settings(
    device: str,
    *,
    backend: str | None = None,
    tensor_parallel_size: int = 1,
    environment: Mapping[str, str] | None = None,
    cores: int | None = None,
    processes: int | None = None,
) -> list[str]:
    """Return a sentence for each variable whose value is harmful here.

    Args:
        device: cpu, cuda or npu.
        backend: "fsdp2" or "ptd" (Megatron-core); None: not known yet.
        tensor_parallel_size: ranks that share a layer.
        environment: None: this process's.
        cores: of this machine; None: those that this process may use.
        processes: of the launch on this machine; None: that of this process's launch.
    """
    found = os.environ if environment is None else environment
    sentences = [_connections(found.get("CUDA_DEVICE_MAX_CONNECTIONS"), device, backend, tensor_parallel_size)]
    for setting in _SETTINGS:
        value = found.get(setting.name, "")
        if device in setting.devices and value.strip().lower() in setting.values:
            sentences.append(f"{setting.name}={value} {setting.why}")
    if device == "cpu":
        processes = processes or this_launch().local_world_size
        sentences.append(_threads(found.get("OMP_NUM_THREADS"), processes, cores or usable_cores()))
    return [sentence for sentence in sentences if sentence is not None]


def _connections(value: str | None, device: str, backend: str | None, tensor_parallel_size: int) -> str | None:
    """Check CUDA_DEVICE_MAX_CONNECTIONS, for which the two backends need different values."""
    if backend != "ptd" and value == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 keeps FSDP2 from overlapping communication with computation; export "
            "CUDA_DEVICE_MAX_CONNECTIONS=2 or leave it unset"
        )
    if backend == "ptd" and tensor_parallel_size > 1 and value != "1" and device == "cuda":
        return (
            "tensor parallelism overlaps communication with computation only where kernels run in the order of their "
            "launch; export CUDA_DEVICE_MAX_CONNECTIONS=1"
        )
    return None


def _threads(word: str | None, processes: int, cores: int) -> str | None:
    threads = int(word) if word and word.strip().isdecimal() else 1
    if threads <= 1 or threads * processes <= cores:
        return None
    return (
        f"OMP_NUM_THREADS={threads} in {processes} process(es) starts more threads than the {cores} cores of this "
        f"machine; export OMP_NUM_THREADS={max(1, cores // processes)}"
    )


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
