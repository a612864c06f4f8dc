"""The page: what it holds, and that nothing of a run can leave the place that it is shown at."""

from __future__ import annotations

import base64
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.monitor.report.heat_maps import lengths_of, rank_maps
from mindspeed_mm.monitor.report.metrics_file import MetricsFile
from mindspeed_mm.monitor.report.page import page_of
from mindspeed_mm.monitor.report.run_record import read_run
from tests.support.run_folders import start_of, step_line, write_lines, write_recorded, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'"

#: an object with keys of the files of a run, and other values
OTHER = b'{"iteration": 1, "index": 1, "pieces": 3, "media": [4], "starts": [7], "histogram": 1, "layers": {"a": 1}}\n'


class Page(HTMLParser):
    """The elements of a page, and their texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.setdefault(self._open[-1], []).append(data)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    @property
    def data(self) -> dict[str, Any]:
        """What the script draws."""
        return json.loads(self.texts["script"][0])

    @property
    def sections(self) -> list[str]:
        return [attributes["id"] or "" for tag, attributes in self.elements if tag == "section" and "id" in attributes]


def page(*folders: Path) -> Page:
    return Page(text_of(*folders))


def text_of(*folders: Path) -> str:
    return page_of([read_run(folder, MetricsFile(folder)) for folder in folders])


def test_a_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    """No element refers to another file, and no style or script loads one."""
    text = text_of(write_run(tmp_path / "run"))
    found = Page(text)
    for tag, attributes in found.elements:
        assert tag not in ("iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
    styles = "".join(found.texts["style"])
    assert "@import" not in styles and "url(" not in styles
    assert not re.search(r"\b(fetch|XMLHttpRequest|importScripts|import)\s*\(", "".join(found.texts["script"][1:]))
    assert len(text) < 150_000


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    """Names, errors, commands, settings, figures' names: each is shown as it is, and adds no element."""
    plain = page(write_run(tmp_path / "plain"))
    start = start_of(command=["python", EVIL], facts={"model": EVIL}, versions={"torch": EVIL})
    folder = write_run(tmp_path / "run", starts=[start], settings=f"gpt_args:\n  lr: '{EVIL.replace(chr(39), '')}'\n")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 31, "loss": 1.0, EVIL: 3.0}) + "\n")
    evil = page(folder)
    count = [tag for tag, _ in evil.elements].count
    assert count("script") == 2 and count("img") == 0
    assert not any(name.startswith("on") for _, attributes in evil.elements for name in attributes)
    assert evil.texts["dd"][0].startswith("</script><script>")
    assert EVIL[1:].lower() in [chart["title"].lower()[1:] for chart in evil.data["charts"]]
    assert plain.sections == evil.sections


def test_what_a_run_has_recorded_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_recorded(folder)
    text = text_of(folder)
    found = Page(text)
    recorded = ["generated", "answers", "samples", "lengths", "ranks", "experts"]
    assert found.sections == ["curves", "run", *recorded, "configuration", "environment"]
    pictures = [attributes["src"] or "" for tag, attributes in found.elements if tag == "img"]
    original = base64.b64encode((folder / "report/generated/step-100-0.jpg").read_bytes()).decode()
    assert pictures[0] == f"data:image/jpeg;base64,{original}" and len(pictures) == 5
    assert found.texts["mark"] == ["marked text", "seven"] and "4 tokens, 1 of them trained" in text
    cells = [attributes for tag, attributes in found.elements if tag == "td" and attributes.get("class") == "right"]
    assert len(cells) == 1 and text.count(">200</td>") == 1
    assert "20 rows of 10 to 19 tokens" in text
    assert "30 rows in the data · 15 tokens fit into a packed row · 25.0 % padding" in text
    cost, memory = found.data["heats"]["ranks"]
    assert cost["frames"][0]["values"] == [[0.5, 0.5], [1.5, 1.5]] and cost["columns"] == [100, 200]
    assert memory["frames"][0]["values"] == [[1.0, 1.0], [2.0, 2.0]]
    (experts,) = found.data["heats"]["experts"]
    assert experts["frames"][1] == {"label": "step 200", "values": [[2.0, 1.0, 1.0, 0.0]]}


def test_lengths_in_bins_of_any_width_have_bars_of_the_same_one(tmp_path: Path) -> None:
    """Four bins an octave, as a run writes them; what fits into a pack is in the middle of the last bin."""
    (tmp_path / "lengths.json").write_text(
        json.dumps({"of": "read", "rows": 7, "histogram": {"edges": [1, 2, 4, 8], "counts": [4, 1, 2]}, "capacity": 6})
    )
    lengths = lengths_of(tmp_path)
    assert lengths is not None
    assert [(bar.height, bar.title) for bar in lengths.bars] == [
        (1.0, "4 rows of 1 token"),
        (0.25, "1 row of 2 to 3 tokens"),
        (0.5, "2 rows of 4 to 7 tokens"),
    ]
    assert [text for _, text in lengths.ticks] == ["1", "2", "4", "8"] and lengths.capacity == pytest.approx(2.5 / 3)
    assert lengths.notes[0] == "7 rows read by a rank so far"


def test_of_very_many_ranks_the_extremes_are_shown_with_gaps(tmp_path: Path) -> None:
    lines = [
        {"iteration": 10, "cost": [1.0, 3.0], "ranks": [5, 900]},
        {"iteration": 20, "cost": [2, 2], "ranks": [5, 7]},
    ]
    write_lines(tmp_path / "ranks.jsonl", lines)
    (cost,) = rank_maps(tmp_path)
    assert (cost["rows"], cost["columns"]) == (["5", "7", "900"], [10, 20])
    assert cost["frames"][0]["values"] == [[0.5, 1.0], [None, 1.0], [1.5, None]]


def test_texts_of_rows_are_no_markup_and_files_outside_of_the_folder_no_pictures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_recorded(folder, text=EVIL.replace("/", "|"))
    plain = write_run(tmp_path / "plain")
    write_recorded(plain)
    evil = page(folder)
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in page(plain).elements]
    outside = tmp_path / "outside.jpg"
    outside.write_bytes((folder / "report/media/a.jpg").read_bytes())
    (folder / "report/media/text.jpg").write_text("<svg onload=alert(1)>")
    names = [f"../../{outside.name}", str(outside), "media/text.jpg", "media/absent.jpg", 3, "\0"]
    medium = {"kind": "image", "thumbnails": names}
    write_lines(folder / "report/samples.jsonl", [{"pieces": [], "media": [medium]}])
    pictures = [attributes["src"] or "" for tag, attributes in page(folder).elements if tag == "img"]
    assert len(pictures) == 4 and all(picture.startswith("data:image/jpeg") for picture in pictures)


def test_a_page_of_a_long_run_with_many_pictures_is_at_most_two_megabytes(tmp_path: Path) -> None:
    """60 sheets of large pictures, 40 own figures, many experts and ranks: fewer of them are shown."""
    folder = write_run(tmp_path / "run", settings="x: " + "word " * 100_000)
    own = {f"figure_{number}": math.pi * number for number in range(40)}
    values = random.Random(0)
    write_lines(
        folder / "metrics.jsonl",
        (step_line(i, **{n: v * values.random() for n, v in own.items()}) for i in range(1, 6_001)),
    )
    write_recorded(folder, sheets=60, noise=240)
    layers = {f"layers.{number}": [values.random() for _ in range(256)] for number in range(12)}
    write_lines(folder / "report/experts.jsonl", ({"iteration": step, "layers": layers} for step in range(60)))
    ranks = {"cost": [values.random() for _ in range(64)], "memory_bytes": [2**34 + rank for rank in range(64)]}
    write_lines(folder / "report/ranks.jsonl", ({"iteration": step, **ranks} for step in range(200)))
    text = text_of(folder)
    assert 1_000_000 < len(text.encode()) < 2_000_000
    sheet = text.partition('<section id="generated">')[2].partition("</section>")[0]
    assert "of 60 steps are shown" in sheet and "step 6,000" in sheet and "step 100<" in sheet
    assert 4 <= sheet.count("<img") < 16 and "<td></td>" not in sheet


def test_a_folder_with_nothing_but_faults_still_has_a_page(tmp_path: Path) -> None:
    """Files of another form, cut in two or empty: what can't be read is as if it weren't there."""
    folder = write_run(tmp_path / "run")
    write_recorded(folder)
    for file in [*folder.glob("*.json*"), *folder.glob("report/*.json*"), folder / "run.yaml"]:
        content = file.read_bytes()
        for broken in (
            b"",
            b"[1, 2]",
            OTHER,
            b"\xff{",
        ):
            file.write_bytes(broken)
            assert "</html>" in text_of(folder)
        file.write_bytes(content[: len(content) // 2])
        assert "</html>" in text_of(folder)
    assert page(folder).sections


def test_several_runs_are_compared(tmp_path: Path) -> None:
    """Figures, with the best marked, and what differs in what they were given, but for where they write."""
    one = write_run(tmp_path / "one", 30, settings="gpt_args: {lr: 0.001, save: runs/x, seed: 3}")
    other = write_run(tmp_path / "other", 20, settings="gpt_args: {lr: 0.002, save: runs/y, seed: 3, extra: true}")
    text = text_of(one, other)
    found = Page(text)
    assert found.sections == ["comparison", "curves", "configuration", "environment"]
    rows = re.findall(r'<tr><th scope="row"[^>]*>([^<]*)</th>(.*?)</tr>', text)
    cells = {name: re.findall(r"<td(.*?)>([^<]*)</td>", cells) for name, cells in rows}
    assert cells["last loss"] == [(' class="best"', f"{5 / math.sqrt(30):.4f}"), ("", f"{5 / math.sqrt(20):.4f}")]
    assert cells["best validation loss"] == [(' class="best"', "0.1000"), ("", "0.1500")]
    assert [value for _, value in cells["gpt_args.lr"]] == ["0.001", "0.002"]
    assert [value for _, value in cells["gpt_args.extra"]] == ["", "True"] and cells.keys().isdisjoint(
        ("gpt_args.save", "gpt_args.seed")
    )
    loss = found.data["charts"][0]
    assert [(series["run"], series["label"]) for series in loss["series"]] == [
        (run, label) for run in range(2) for label in ("training", "evaluation")
    ]


def test_sections_without_data_are_absent(tmp_path: Path) -> None:
    """Of an old folder there is the curve; of a run that has logged nothing, how it was started."""
    old = tmp_path / "old"
    write_run(old)
    for name in ("launch.json", "run.yaml"):
        (old / name).unlink()
    assert page(old).sections == ["curves"]
    new = write_run(tmp_path / "new")
    (new / "metrics.jsonl").unlink()
    assert page(new).sections == ["run", "configuration", "environment"]
    assert page(write_run(tmp_path / "run")).sections == ["curves", "run", "configuration", "environment"]
