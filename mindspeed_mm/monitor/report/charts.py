"""What is drawn of a run's figures: charts in their order, as JSON values for the page's script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_mm.configs.eval_metrics import EVAL_METRICS
from mindspeed_mm.monitor.report.curves import Curve
from mindspeed_mm.monitor.report.metrics_file import TRAINING_SECONDS, MetricsFile

#: how values are written: 1234.5, 12.3k, 12.3 %, 1.5 GiB, 145 ms, 1.2e-05
ValueForm = Literal["number", "amount", "percent", "gibibytes", "milliseconds", "small"]
_DIGITS = 6
#: points of all charts of a page
_ALL_BUCKETS = 16_000
_MOST_BUCKETS, _FEWEST_BUCKETS = 700, 60


@dataclass(frozen=True)
class Chart:
    """A chart of one figure, or of a few.

    Attributes:
        title: its heading.
        figures: name in metrics.jsonl → label; a name that ends in "/" is that of all figures by kind.
        form: of its values.
        boring: the chart is left out if all its values are this one.
        is_wide: takes a row of the page.
        has_zero: begins the axis at zero.
    """

    title: str
    figures: dict[str, str]
    form: ValueForm = "number"
    boring: float | None = None
    is_wide: bool = False
    has_zero: bool = False

    @property
    def unit(self) -> float:
        """What one is in the chart."""
        return 2**30 if self.form == "gibibytes" else 1.0


CHARTS = (
    Chart("Loss", {"loss": "training", "eval_loss": "evaluation"}, is_wide=True),
    *(
        Chart(f"Evaluation: {metric.title}", {f"eval_{name}": name})
        for name, metric in EVAL_METRICS.items()
        if name != "loss"
    ),
    Chart("Gradient norm", {"grad_norm": "before clipping"}),
    Chart("Learning rate", {"learning_rate": "learning rate"}, "small", has_zero=True),
    Chart("Tokens a second", {"tokens_per_second": "all devices"}, "amount", has_zero=True),
    Chart("Media a second", {"media_per_second/": ""}, "amount", 0.0, has_zero=True),
    Chart("Time of a step", {"step_ms": "step", "data_wait_ms": "waiting for data"}, "milliseconds", has_zero=True),
    Chart("Waiting for data", {"data_wait_fraction": "share of a step"}, "percent", 0.0, has_zero=True),
    Chart("Model FLOPs utilisation", {"mfu": "of the device's peak"}, "percent", has_zero=True),
    Chart("TFLOP/s of a device", {"tflops_per_device": "model FLOPs"}, has_zero=True),
    Chart("Memory of a device", {"memory_bytes": "largest so far"}, "gibibytes", has_zero=True),
    Chart("Padding", {"padding_fraction": "share of positions"}, "percent", 0.0, has_zero=True),
    Chart("Imbalance", {"imbalance": "largest cost of a rank over the mean"}, boring=1.0),
    Chart("Loss scale", {"loss_scale": "loss scale"}, "amount", 1.0),
    Chart("Rows left out", {"rows_left_out": "so far"}, boring=0.0, has_zero=True),
    Chart(
        "Steps that changed nothing",
        {"skipped_iterations": "skipped", "nan_iterations": "NaN", "iterations_without_targets": "without targets"},
        boring=0.0,
        has_zero=True,
    ),
)
#: figures that are axes, or say nothing as a curve
_NOT_DRAWN = {TRAINING_SECONDS, "consumed_samples", "consumed_tokens", "global_batch_size"}
#: axis → the figure whose value at a step is the place on it
AXES = {"time": TRAINING_SECONDS, "samples": "consumed_samples", "tokens": "consumed_tokens"}


def charts_of(runs: Sequence[MetricsFile]) -> list[dict[str, Any]]:
    """Return the charts that have data, with a series for each figure of each run."""
    known = {name for chart in CHARTS for name in chart.figures}
    found = {name: None for run in runs for name in run.curves}
    own = [n for n in found if n not in known and n not in _NOT_DRAWN and not n.startswith("media_per_second/")]
    wanted = [*CHARTS, *(Chart(_title(name), {name: name}) for name in own)]
    drawn = [(chart, series) for chart in wanted if (series := list(_series(chart, runs)))]
    number = sum(len(series) for _, series in drawn)
    most = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, _ALL_BUCKETS // max(1, number)))
    return [
        {
            "title": chart.title,
            "form": chart.form,
            "wide": chart.is_wide,
            "zero": chart.has_zero,
            "series": [{"label": label, "run": run, **_drawn(curve, most, chart.unit)} for label, run, curve in series],
        }
        for chart, series in drawn
    ]


def axes_of(run: MetricsFile) -> dict[str, Any]:
    """Return the places of steps on other axes: axis → steps and places."""
    found: dict[str, Any] = {}
    for axis, name in AXES.items():
        curve = run.curves.get(name)
        if curve is not None and curve.high[1] > 0:
            points = curve.points(_FEWEST_BUCKETS * 2)
            found[axis] = {"x": points.x, "y": _rounded(points.y)}
    return found


def _series(chart: Chart, runs: Sequence[MetricsFile]) -> Iterator[tuple[str, int, Curve]]:
    for number, run in enumerate(runs):
        for name, label in chart.figures.items():
            for figure, curve in run.curves.items():
                is_kind = name.endswith("/") and figure.startswith(name)
                if not (figure == name or is_kind) or not curve.count or curve.low[1] == curve.high[1] == chart.boring:
                    continue
                yield figure.removeprefix(name) if is_kind else label, number, curve


def _drawn(curve: Curve, most: int, unit: float) -> dict[str, Any]:
    points = curve.points(most)
    found = {"x": points.x, "y": _rounded(points.y, unit)}
    if points.mean_x is not points.x:
        found |= {"mx": points.mean_x, "my": _rounded(points.mean_y, unit)}
    return found


def _title(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _rounded(values: Sequence[float], unit: float = 1.0) -> list[float]:
    return [float(f"{value / unit:.{_DIGITS}g}") for value in values]
