"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.monitor.trackers.base import DEFAULT_PROJECT, Kept, Picture, TrackedRun
from mindspeed_mm.utils.text import shorten

#: most metrics and parameters in one request, and characters of a value
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 500
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class Mlflow:
    """A run of an MLflow experiment; what is logged is in the store when `log` returns."""

    is_durable = True
    gather_seconds = 5.0  # a request costs as much as five more records in it

    def __init__(self, client: MlflowClient, kept: Kept) -> None:
        """
        Args:
            client: an MlflowClient.
            kept: what the run folder keeps of the run.
        """
        self._client, self.kept = client, kept

    def log(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log figures in as few requests as they need; characters that MLflow's names can't have become underscores."""
        now = time.time_ns() // 1_000_000
        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", name), float(value), now, step)
            for step, figures in records
            for name, value in figures.items()
        ]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self.kept.run_id, metrics=metrics[start : start + _METRICS])

    def show(self, pictures: Mapping[str, Picture], step: int) -> None:
        """Store pictures as artifacts, without their prompts: samples/step-00000100-prompt-0.png."""
        for name, picture in pictures.items():
            folder, _, rest = name.partition("/")
            file = f"{folder}/step-{step:08d}-{rest.replace('/', '-')}.png"
            self._client.log_image(self.kept.run_id, picture.image, artifact_file=file)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self.kept.run_id, status="FAILED" if failed else "FINISHED")


def open_mlflow(run: TrackedRun, flags: TrackerArguments) -> Mlflow:
    """Begin or continue a run in the store of MLFLOW_TRACKING_URI, else in MLflow's own default.

    Settings are its parameters; those of a run that goes on can't be changed there.
    """
    client = MlflowClient()
    found = None if run.run_id is None else _existing(client, run.run_id)
    if found is not None:
        client.update_run(run.run_id, status="RUNNING")
    else:
        tags = {tag: "true" for tag in run.tags}
        name = run.name or os.environ.get("MLFLOW_RUN_NAME") or run.default_name
        found = client.create_run(_experiment(client, run.project), run_name=name, tags=tags)
        _log_parameters(client, found.info.run_id, run.config)
    uri = str(client.tracking_uri)
    if uri.startswith("http"):
        uri = f"{uri.rstrip('/')}/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}"
    return Mlflow(client, run.keep(found.info.run_id, uri))


def _existing(client: MlflowClient, run_id: str) -> Any:
    """The run; None: it isn't in this store (any more)."""
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _experiment(client: MlflowClient, project: str | None) -> str:
    """The id of the experiment, which is made where there is none."""
    identifier = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if project is None and identifier:
        return identifier
    name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)


def _log_parameters(client: MlflowClient, run_id: str, config: Mapping[str, Any]) -> None:
    parameters = [
        Param(_NOT_IN_NAMES.sub("_", name), shorten(str(value), _CHARACTERS)) for name, value in _leaves(config)
    ]
    for start in range(0, len(parameters), _PARAMETERS):
        client.log_batch(run_id, params=parameters[start : start + _PARAMETERS])


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif value is not None:
            yield path, value
