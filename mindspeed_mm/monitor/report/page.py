"""The page: one HTML file that holds its styles, its script, its data and its pictures."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mindspeed_mm.monitor.report.charts import axes_of, charts_of
from mindspeed_mm.monitor.report.comparison import differences_of, outcomes_of
from mindspeed_mm.monitor.report.heat_maps import expert_map, lengths_of, rank_maps
from mindspeed_mm.monitor.report.overview import environment_of, heading_of, starts_of, tiles_of
from mindspeed_mm.monitor.report.pictures import PictureRoom
from mindspeed_mm.monitor.report.rows_shown import answers_of, generated_of, samples_of
from mindspeed_mm.monitor.report.run_record import RunRecord
from mindspeed_mm.utils.versions import installed_version

_ASSETS = Path(__file__).parent / "assets"
_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js")
#: of uPlot, which draws the curves: every copy has it
_LICENCE = "uplot/LICENSE"
#: characters of all run.yaml that are shown
_LONGEST_DESCRIPTIONS = 200_000
#: characters of data, configuration and pictures; styles, scripts and texts come on top
_LARGEST = 1_750_000


def page_of(runs: Sequence[RunRecord]) -> str:
    """Return the report of a run, or of several that are compared.

    Args:
        runs: one at least.
    """
    compared = len(runs) > 1
    charts = charts_of([run.metrics for run in runs])
    values: dict[str, Any] = {
        "title": f"{' and '.join(run.name for run in runs)} · mindspeed-mm",
        "runs": [heading_of(run) for run in runs],
        "names": [run.name for run in runs],
        "compared": compared,
        "tiles": [] if compared else tiles_of(runs[0]),
        "facts": runs[0].facts.items(),
        "starts": [] if compared else starts_of(runs[0]),
        "configurations": [
            {"name": run.name, "description": _shown(run.description, _LONGEST_DESCRIPTIONS // len(runs))}
            for run in runs
            if run.description
        ],
        "environment": environment_of(runs),
        "outcomes": outcomes_of(runs) if compared else [],
        "differences": differences_of(runs) if compared else [],
    }
    heats = {} if compared else _heats(runs[0])
    taken = len(json.dumps([charts, heats, values["configurations"]]))
    values |= {} if compared else _rows(runs[0], PictureRoom(runs[0].recorded, _LARGEST - taken))
    has = {
        "comparison": compared,
        "curves": charts,
        "overview": not compared and runs[0].facts,
        "generated": values.get("generated"),
        "answers": values.get("answers"),
        "samples": values.get("samples"),
        "lengths": values.get("lengths"),
        "ranks": heats.get("ranks"),
        "experts": heats.get("experts"),
        "starts": len(values["starts"]) > 1,
        "configuration": values["configurations"],
        "environment": values["environment"],
    }
    now = datetime.datetime.now(datetime.UTC)
    data = {
        "charts": charts,
        "heats": heats,
        "runs": [_run_data(run) for run in runs],
        "made": int(now.timestamp()),
        "waits": not compared and runs[0].state.name == "running",
    }
    template = _environment().get_template("page.html.jinja")
    return template.render(
        **values,
        sections=[name for name, content in has.items() if content],
        data=_as_json(data),
        styles=_assets(_STYLES),
        licence=_assets([_LICENCE]),
        scripts=_assets(_SCRIPTS),
        made=now.strftime("%Y-%m-%d %H:%M:%S UTC"),
        version=installed_version("mindspeed_mm") or "",
        command_folders=" ".join(str(run.folder) for run in runs),
    )


def _rows(run: RunRecord, room: PictureRoom) -> dict[str, Any]:
    """Rows and lengths of a run; what is generated has the room that pictures of samples leave."""
    samples = samples_of(run.recorded, room)
    generated = generated_of(run.recorded, room)
    lengths = lengths_of(run.recorded)
    return {"samples": samples, "generated": generated, "answers": answers_of(run.folder), "lengths": lengths}


def _heats(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    experts = expert_map(run.recorded)
    return {"ranks": rank_maps(run.recorded), "experts": [] if experts is None else [experts]}


def _run_data(run: RunRecord) -> dict[str, Any]:
    return {
        "name": run.name,
        "axes": axes_of(run.metrics),
        "resumed": [start.iteration for start in run.starts if start.iteration],
    }


def _shown(description: str, most: int) -> str:
    if len(description) <= most:
        return description
    return f"{description[:most]}\n… and {len(description) - most:,} characters more"


def _as_json(value: Mapping[str, Any]) -> Markup:
    """The text of a script element: no '<' in it can end the element, or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


@functools.cache
def _environment() -> Environment:
    loader = FileSystemLoader(_ASSETS)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, auto_reload=False)


def _assets(names: Sequence[str]) -> Markup:
    return Markup("\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in names))
