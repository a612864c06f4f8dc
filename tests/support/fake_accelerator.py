"""An accelerator that is the host: tensors stay where they are, and everything that asks for the device is told of one.

So the lines of a device with a queue and memory of its own run on any machine: figures are read late, the host has a
process group of its own, copies to the host go through memory that is called pinned.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator

PACKAGE = Path(accelerator.__file__).parents[1]
QUESTIONS = ("is_host", "holds", "read_later", "host_memory")

Site = tuple[str, int]
"""A file of the package and a line: where the accelerator is asked."""


class FakeAccelerator(CPUAccelerator):
    """See the module.

    Attributes:
        asked: the places of the package that asked what depends on the device, and were told of one.
        log: "record" and "wait" for each event, "pin" for each piece of pinned memory, in order; "copy" for each copy
            beside the queue, which is not done before something waits for it or for a later one, and "copied" for that;
            "tf32" where it is told to compute float32 products in TF32.
    """

    def __init__(self, *, offloads: bool = False) -> None:
        """
        Args:
            offloads: parameters are in the host's memory, as fsdp2.yaml's offload_to_cpu leaves them.
        """
        self.asked: set[Site] = set()
        self.log: list[str] = []
        self._offloads = offloads
        self._copies: list[Callable[[], object]] = []

    @property
    def is_host(self) -> bool:  # type: ignore[override]
        self._note()
        return False

    def holds(self, where: torch.Tensor | torch.device) -> bool:
        self._note()
        return not (self._offloads and isinstance(where, nn.Parameter))

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        self._note()
        return super().host_memory(like)

    def read_later(self, values: torch.Tensor) -> Any:
        self._note()
        return super().read_later(values)

    def record_event(self) -> Any:
        self.log.append("record")
        return mock.Mock(synchronize=lambda: self.log.append("wait"))

    def ahead(self, copy: Callable[[], Any]) -> Callable[[], Any]:
        self.log.append("ahead")

        def take() -> Any:
            self.log.append("taken")
            return copy()

        return take

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        self.log.append("copy")
        self._copies.append(lambda: target.copy_(source))
        copy = self._copies[-1]

        def wait() -> None:
            self.log.append("copied")
            while copy in self._copies:
                with torch.no_grad():
                    self._copies.pop(0)()

        return wait

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {**super().rng_state(), "fake": torch.arange(3, dtype=torch.uint8)}

    def allow_tf32(self) -> None:
        self.log.append("tf32")

    def record_memory_history(self, stacks: str, max_entries: int | None) -> None:
        self.log.append("history")

    def dump_memory_snapshot(self, path: str) -> None:
        self.log.append("dump")

    def _note(self) -> None:
        frame = sys._getframe(2)
        self.asked.add((frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"), frame.f_lineno))


@contextmanager
def fake_accelerator(**how: Any) -> Iterator[FakeAccelerator]:
    """Let this process believe in a `FakeAccelerator(**how)`; pinning memory does nothing meanwhile."""
    fake, empty = FakeAccelerator(**how), torch.empty

    def empty_host_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.pop("pin_memory", False):
            fake.log.append("pin")
        return empty(*args, **kwargs)

    def pinned(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        fake.log.append("pin")
        return tensor

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(accelerator, "current", lambda: fake))
        patches.enter_context(mock.patch.object(torch, "empty", empty_host_memory))
        patches.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pinned))
        yield fake


def questions() -> set[Site]:
    """Every place of the package, but for the accelerators themselves, that asks what depends on the device."""
    return {
        (str(path.relative_to(PACKAGE)), node.end_lineno or 0)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in QUESTIONS
        and not path.is_relative_to(PACKAGE / "accelerator")
    }


def stray_comparisons() -> set[Site]:
    """Every place outside of `accelerator/` that compares a device's kind with a literal."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            kinds = [s for s in sides if isinstance(s, ast.Constant) and s.value in ("cpu", "cuda", "npu")]
            asked = [s for s in sides if isinstance(s, ast.Attribute) and s.attr in ("type", "name", "device_type")]
            if kinds and asked and not path.is_relative_to(PACKAGE / "accelerator"):
                found.add((str(path.relative_to(PACKAGE)), node.lineno))
    return found
