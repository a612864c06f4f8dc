"""The devices that a run would have on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Devices of this machine, on each of which `mindspeed-mm train` starts a process.

    Attributes:
        has_devices: there are accelerators; without one a process computes on the processor.
        name: kind and model of a device.
        devices: their number, at least 1.
        memory: bytes of each.
    """

    has_devices: bool
    name: str
    devices: int
    memory: int

    def __str__(self) -> str:
        gibibytes = f"{self.memory / 2**30:.0f} GiB"
        if not self.has_devices:
            return f"the CPU ({gibibytes})"
        return f"{self.devices} × {self.name} ({gibibytes} each)" if self.devices > 1 else f"{self.name} ({gibibytes})"


def this_machine() -> Machine:
    """Look for devices, as a run would."""
    from mindspeed_mm.utils.torch_import import import_torch

    torch = import_torch()
    from mindspeed_mm import accelerator

    device = accelerator.current()
    has_devices = not device.is_host
    number = torch.accelerator.device_count() if has_devices else 1
    return Machine(has_devices, device.model_name(), number, device.total_memory())
