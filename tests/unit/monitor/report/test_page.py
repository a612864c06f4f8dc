"""The page: what it holds, and that nothing of a run can leave the place that it is shown at."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mindspeed_mm.monitor.report.metrics_file import MetricsFile
from mindspeed_mm.monitor.report.page import page_of
from mindspeed_mm.monitor.report.run_record import read_run
from tests.support.run_folders import start_of, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'"


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
    assert page(write_run(tmp_path / "run")).sections == ["run", "curves", "configuration", "environment"]
