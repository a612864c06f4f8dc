"""Tensorboard's events: what metrics.jsonl says, as scalars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord


class TensorboardSink:
    """Writes the figures of logged steps and evaluations as scalars of tensorboard."""

    def __init__(self, directory: str) -> None:
        """Open a file of events.

        Args:
            directory: its folder.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory)

    def step(self, record: StepRecord) -> None:
        """Write each number of a step; figures by kind get names such as media_per_second/image."""
        for name, value in _flat(record.line).items():
            if isinstance(value, (int, float)) and name != "iteration":
                self._writer.add_scalar(name, value, record.iteration)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write the figures of an evaluation."""
        for name, value in record.figures.items():
            self._writer.add_scalar(name, value, record.iteration)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _flat(line: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in line.items():
        flat.update({f"{name}/{kind}": v for kind, v in value.items()} if isinstance(value, Mapping) else {name: value})
    return flat
