"""What trackers have written into their local stores: step → figures, read by other means than those that wrote it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

Figures = dict[int, dict[str, float]]


def tensorboard_figures(folder: Path) -> Figures:
    """Those of a folder of events, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: Figures = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            figures = found.setdefault(event.step, {})
            assert name not in figures, f"step {event.step} twice"
            figures[name] = event.value
    return found


def wandb_figures(folder: Path) -> list[Figures]:
    """Those of each offline part of a W&B run, in the order of the starts."""
    from wandb.proto import wandb_internal_pb2

    parts = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        found: Figures = {}
        for data in _log_records(file, header=7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row["_step"]
            assert step not in found, f"step {step} twice"
            found[step] = {name: value for name, value in row.items() if not name.startswith("_")}
        parts.append(found)
    return parts


def _log_records(file: Path, header: int) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format: blocks of 32 KiB with pieces of (crc, length, type, data).

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md

    Args:
        header: bytes before the first piece, which count as part of the first block.
    """
    content, place, parts = file.read_bytes(), header, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if kind == 0:
            return
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""
