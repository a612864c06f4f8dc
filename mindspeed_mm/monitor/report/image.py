"""The curve of the loss as a picture, for places that show no pages."""

from __future__ import annotations

import io
import os

from mindspeed_mm.checkpoint.run_folder import LOSS_PICTURE
from mindspeed_mm.monitor.report.run_record import RunRecord
from mindspeed_mm.utils.extras import has_extra
from mindspeed_mm.utils.files import working_file

_TRAINING, _EVALUATION = "#2563eb", "#d9730d"
_MOST = 400


def draw_loss(run: RunRecord) -> bool:
    """Write loss.png into a run folder; returns whether it could: it needs matplotlib, and a loss.

    Raises:
        OSError: it can't be written.
    """
    loss = run.metrics.curves.get("loss")
    if loss is None or not loss.count or not has_extra("plots"):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = loss.points(_MOST)
    many = points.mean_x is not points.x
    axes.plot(points.x, points.y, color=_TRAINING, linewidth=0.8 if many else 1.4, alpha=0.35 if many else 1)
    axes.plot(points.mean_x, points.mean_y, color=_TRAINING, linewidth=1.4, label="training")
    evaluation = run.metrics.curves.get("eval_loss")
    if evaluation is not None and evaluation.count:
        found = evaluation.points(_MOST)
        axes.plot(found.x, found.y, color=_EVALUATION, linewidth=1.4, marker="o", markersize=3.5, label="evaluation")
        axes.legend(frameon=False)
    axes.grid(color="#dfe3e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="step", ylabel="loss", title=run.name)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path = run.folder / LOSS_PICTURE
    working = working_file(path)
    working.write_bytes(picture.getvalue())
    os.replace(working, path)
    return True
