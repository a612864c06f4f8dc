"""Figures of one step from its chrome trace, as `torch.profiler` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "benchmark step"
"""Name of the span that the figures are of."""
_COLLECTIVE = re.compile(r"nccl|hccl|hcom|rccl", re.IGNORECASE)
_KERNELS = ("kernel", "gpu_kernel")
_RUNTIME = ("cuda_runtime", "cuda_driver", "privateuse1_runtime")
_WAITS = re.compile(r"(stream|device|ctx)_?synchronize$|^(cuda|cu|aclrt)memcpy(dtoh|htod)?(_v2)?$", re.IGNORECASE)
_WAITS_FOR_EVENT = re.compile(r"event_?synchronize$", re.IGNORECASE)
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
_SHORTEST_WAIT = 20.0
"""Microseconds: asking for an event that has passed takes less, and nobody has waited."""

Span = tuple[float, float]


@dataclass(frozen=True)
class StepFigures:
    """What a trace says of a step.

    Attributes:
        hidden: share of the time of collectives during which another kernel was computing; None: there were none.
        busy: share of the time from the step's begin to the end of its last kernel during which a kernel was running;
            None: the trace, which is of this step alone, has no kernels.
        waits: places where the host waited for the device; without a device, operators that read a value.
    """

    hidden: float | None
    busy: float | None
    waits: int


def read_trace(path: Path) -> StepFigures:
    """Return the figures of the step that is marked in a trace.

    Args:
        path: a chrome trace, with a span called `STEP`.

    Raises:
        ValueError: the trace has no such span.
    """
    content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return step_figures(content["traceEvents"] if isinstance(content, dict) else content)


def step_figures(events: Sequence[dict[str, Any]]) -> StepFigures:
    """Return the figures of the step that is marked among the events of a trace; times are in microseconds."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [_span(event) for event in complete if event["name"] == STEP and event.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"the trace has no span called {STEP!r}")
    step = steps[0]
    kernels = [event for event in complete if event.get("cat") in _KERNELS]
    computing = merged(_span(event) for event in kernels if not _COLLECTIVE.search(event["name"]))
    sending = merged(_span(event) for event in kernels if _COLLECTIVE.search(event["name"]))
    running = merged([*computing, *sending])
    end = max(step[1], running[-1][1]) if running else step[1]  # the device is behind the host that launches
    return StepFigures(
        hidden=length(common(sending, computing)) / length(sending) if sending else None,
        busy=length(running) / (end - step[0]) if running else None,
        waits=_waits(complete, step, has_device=bool(kernels)),
    )


def _waits(events: Iterable[dict[str, Any]], step: Span, *, has_device: bool) -> int:
    inside = [event for event in events if step[0] <= event["ts"] < step[1]]
    if not has_device:
        return sum(event["name"] in _READS for event in inside)
    calls = [event for event in inside if event.get("cat") in _RUNTIME]
    waits = sum(bool(_WAITS.search(event["name"])) for event in calls)
    return waits + sum(
        bool(_WAITS_FOR_EVENT.search(event["name"])) and event["dur"] >= _SHORTEST_WAIT for event in calls
    )


def _span(event: dict[str, Any]) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans as spans that don't touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """Return what two unions of spans, as `merged` returns them, have in common."""
    found: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> float:
    """Return the length of a union of spans."""
    return sum(end - begin for begin, end in spans)
