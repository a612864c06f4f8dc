"""The report in a browser: it draws everything, says nothing on the console, and its switches act.

Where no Chromium is installed (Debian's package `chromium`), node checks the script's syntax, if that is there.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import mindspeed_mm.monitor.report
from mindspeed_mm.monitor.report.metrics_file import MetricsFile
from mindspeed_mm.monitor.report.page import page_of
from mindspeed_mm.monitor.report.run_record import read_run
from tests.support.chromium import CHROMIUM, shown_page
from tests.support.run_folders import start_of, write_recorded, write_run

SCRIPT = Path(mindspeed_mm.monitor.report.__file__).parent / "assets" / "page.js"

#: what a reader does: smooths, draws logarithmically, over tokens, looks at a step by the keyboard, zooms by the mouse
ACTIONS = """
<script>
(async () => {
const told = {};
const drawn = () => new Promise(after => setTimeout(after, 50));
const legend = () => document.querySelector(".chart .legend").textContent;
const act = (id, change, event) => {
  const element = document.getElementById(id);
  change(element);
  element.dispatchEvent(new Event(event));
};
told.last = legend();
const plot = document.querySelector(".chart .plot");
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
told.first = legend();
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
told.second = legend();
act("smoothing", element => { element.value = 60; }, "input");
told.smoothed = legend();
act("smoothing", element => { element.value = 0; }, "input");
act("log", element => { element.checked = true; }, "change");
told.logarithmic = document.querySelectorAll(".chart canvas").length;
await drawn();
const over = document.querySelector(".chart .u-over"), whole = document.getElementById("whole");
const at = over.getBoundingClientRect();
const mouse = (target, name, x) => target.dispatchEvent(
  new MouseEvent(name, { clientX: at.left + x, clientY: at.top + 40, movementX: 9, bubbles: true }));
mouse(over, "mousemove", 100);
mouse(over, "mousedown", 100);
mouse(over, "mousemove", 300);
mouse(document, "mouseup", 300);
await drawn();
told.zoomed = !whole.hidden;
whole.click();
told.whole = whole.hidden;
const select = document.getElementById("axis");
told.axes = [...select.options].map(option => option.value);
act("axis", element => { element.value = "tokens"; }, "change");
await drawn();
document.querySelector(".chart .plot").dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
told.tokens = legend();
const heat = document.querySelector(".heat"), map = heat.querySelector("canvas");
const edge = map.getBoundingClientRect();
map.dispatchEvent(new MouseEvent("mousemove", { clientX: edge.right - 4, clientY: edge.top + 4 }));
told.cell = heat.querySelector(".legend").firstChild.textContent;
dispatchEvent(new Event("beforeprint"));
dispatchEvent(new Event("afterprint"));
await drawn();
document.body.dataset.told = JSON.stringify(told);
})();
</script>
"""


def write_page(folder: Path, *runs: Path, extra: str = "") -> Path:
    """Write the report of runs, with a script of a test's own at its end."""
    page = folder / "page.html"
    text = page_of([read_run(run, MetricsFile(run)) for run in runs])
    page.write_text(text.replace("</body>", f"{extra}</body>"), encoding="utf-8")
    return page


def told_by(document: str) -> dict[str, object]:
    """What the script of a test has found out."""
    found = re.search(r'data-told="([^"]*)"', document)
    assert found is not None, "the script has not come to its end"
    return json.loads(found[1].replace("&quot;", '"'))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_a_page_draws_all_and_its_switches_act(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 30, starts=[start_of(), start_of(iteration=20)])
    write_recorded(run)
    document, console = shown_page(write_page(tmp_path, run, extra=ACTIONS))
    assert console == []
    charts = document.count('<figure class="chart')
    assert charts >= 8 and document.count('class="uplot') == charts == document.count("<canvas") - 3  # three maps
    links = re.findall(r'<a class="" href="#(\w+)">|<a href="#(\w+)">', document)
    assert len(links) == document.count("<section id=")
    told = told_by(document)
    assert told["last"] == "training0.91287evaluation0.1"
    assert told["first"] == "training5evaluation0.3step 1" and "step 2" in str(told["second"])
    assert told["smoothed"] != told["last"] and told["logarithmic"] == charts
    assert told["zoomed"] and told["whole"]
    assert told["axes"] == ["step", "time", "samples", "tokens"]
    assert str(told["tokens"]).endswith("at 30k") and told["cell"] == "rank 0, step 200: 0.5"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_a_comparison_on_a_phone_says_nothing_on_the_console_and_keeps_to_its_width(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps) for name, steps in (("one", 30), ("other", 3), ("none", 0))]
    width = "<script>document.body.dataset.told = JSON.stringify([document.documentElement.scrollWidth]);</script>"
    document, console = shown_page(write_page(tmp_path, *runs, extra=width), width=500)
    assert console == [] and told_by(document) == [500]
    assert document.count('class="uplot') >= 8


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_an_error_of_a_page_would_be_seen(tmp_path: Path) -> None:
    page = write_page(tmp_path, write_run(tmp_path / "run", 3), extra="<script>nothing.is.there</script>")
    document, console = shown_page(page)
    assert "nothing is not defined" in console[0] and 'class="uplot' in document


@pytest.mark.skipif(CHROMIUM is not None or shutil.which("node") is None, reason="Chromium runs the script, or no node")
def test_the_script_is_javascript() -> None:
    subprocess.run(["node", "--check", SCRIPT], check=True)
