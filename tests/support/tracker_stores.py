"""What trackers have written into their local stores: step → figures, read by other means than those that wrote it."""

from __future__ import annotations

import io
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import yaml
from PIL import Image

from mindspeed_mm.monitor.trackers.kept import KeptFile

Figures = dict[int, dict[str, float]]


def offline_variables(folder: Path) -> dict[str, str]:
    """Environment variables with which trackers write below a folder, and reach for no network."""
    return {
        "HOME": str(folder / "home"),
        "WANDB_MODE": "offline",
        **{f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "CACHE", "DATA")},
        "SWANLAB_MODE": "offline",
        "SWANLAB_ROOT": str(folder / "swanlab"),
        # what it looks at of the machine takes seconds
        **{f"SWANLAB_PROBE_{name}": "false" for name in ("GIT", "HARDWARE", "MONITOR", "REQUIREMENTS")},
        "MLFLOW_TRACKING_URI": str(folder / "mlruns"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(folder / "trackio"),  # read when trackio is imported
    }


def figures_by_tracker(save: Path, project: str, trackio: Path) -> dict[str, Callable[[], list[Figures]]]:
    """Tracker → what reads the parts of its store: of most there is one, of W&B and SwanLab one a start.

    Args:
        save: run folder.
        project: of the run in trackers.
        trackio: Trackio's folder.
    """

    def known_as(name: str) -> str:
        kept = KeptFile(save, name).read()
        assert kept is not None
        return kept.run_id

    return {
        "tensorboard": lambda: [tensorboard_figures(save / "tensorboard")],
        "wandb": lambda: wandb_figures(save),
        "swanlab": lambda: swanlab_figures(save),
        "mlflow": lambda: [mlflow_figures(known_as("mlflow"))],
        "trackio": lambda: [trackio_figures(trackio / f"{project}.db", known_as("trackio"))],
    }


def name_and_rate(tracker: str, save: Path, database: Path) -> tuple[str, float]:
    """What a tracker knows of a run: its name, and of its settings the optimizer's learning rate.

    Args:
        tracker: any but TensorBoard, which is told neither.
        save: run folder, with one part of an offline store.
        database: of Trackio's project.
    """
    if tracker == "wandb":
        from wandb.proto import wandb_internal_pb2

        for data in _log_records(next(save.glob("wandb/offline-run-*/run-*.wandb")), header=7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            settings = {item.key: item.value_json for item in record.run.config.update}
            if "optimizer" in settings:
                return record.run.display_name, json.loads(settings["optimizer"])["lr"]
    if tracker == "swanlab":
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record

        start = Record()
        start.ParseFromString(next(_log_records(next(save.glob("swanlog/run-*/run-*.swanlab")), header=7)))
        settings = yaml.safe_load(next(save.glob("swanlog/run-*/files/config.yaml")).read_text())
        return start.start.name, settings["optimizer"]["value"]["lr"]
    if tracker == "mlflow":
        from mlflow import MlflowClient

        (experiment,) = (found for found in MlflowClient().search_experiments() if found.name == save.name)
        (run,) = MlflowClient().search_runs([experiment.experiment_id])
        return run.info.run_name, float(run.data.params["optimizer.lr"])
    with closing(sqlite3.connect(database)) as store:
        ((name, config),) = store.execute("SELECT run_name, config FROM configs")
    return name, json.loads(config)["optimizer"]["lr"]


def tensorboard_figures(folder: Path) -> Figures:
    """Those of a folder of events, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: Figures = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            _add(found, event.step, name, event.value)
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
            items = [item for item in record.history.item if len(item.nested_key) <= 1]  # a picture's have more
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            step = row["_step"]
            assert step not in found, f"step {step} twice"
            found[step] = {name: value for name, value in row.items() if not name.startswith("_")}
        parts.append(found)
    return parts


def swanlab_figures(folder: Path) -> list[Figures]:
    """Those of each part of a SwanLab experiment, in the order of the starts."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    parts = []
    for file in sorted(folder.glob("swanlog/run-*/run-*.swanlab")):
        found: Figures = {}
        for data in _log_records(file, header=7):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                _add(found, record.scalar.step, record.scalar.key, record.scalar.value.number)
        parts.append(found)
    return parts


def mlflow_figures(run_id: str) -> Figures:
    """Those of a run in MLflow's store."""
    from mlflow import MlflowClient

    client, found = MlflowClient(), Figures()
    for name in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, name):
            _add(found, metric.step, name, metric.value)
    return found


def trackio_figures(file: Path, run: str) -> Figures:
    """Those of a run in the database of a Trackio project."""
    found: Figures = {}
    with closing(sqlite3.connect(file)) as store:
        for step, metrics in store.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (run,)):
            for name, value in json.loads(metrics).items():
                if isinstance(value, (int, float)):  # pictures are objects
                    _add(found, step, name, value)
    return found


def pictures_in(folder: Path) -> list[bytes]:
    """The pixels of all pictures below a folder, of TensorBoard's too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = [Image.open(file).convert("RGB").tobytes() for file in folder.rglob("*.png")]
    if any(folder.rglob("events.out.*")):
        events = EventAccumulator(str(folder)).Reload()
        for name in events.Tags()["images"]:
            shown = (Image.open(io.BytesIO(event.encoded_image_string)) for event in events.Images(name))
            found += [image.convert("RGB").tobytes() for image in shown]
    return sorted(found)


def _add(found: Figures, step: int, name: str, value: float) -> None:
    figures = found.setdefault(step, {})
    assert name not in figures, f"step {step} has {name} twice"
    figures[name] = value


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
