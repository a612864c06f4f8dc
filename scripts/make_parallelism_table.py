"""Write what the tests of layouts measured into the tables of docs/parallelism.md.

MM_PARITY_RECORDS=records.jsonl python -m pytest tests/parity/test_ptd_layouts.py -m "full or not full"
MM_PARITY_RECORDS=records.jsonl python -m pytest tests/parity/test_parallel_layouts.py -m "full or not full"
python scripts/make_parallelism_table.py records.jsonl

The records may be of one of the two: the other one's table stays. `--check`, without records, reports whether the
tables have the layouts and cases of the tests, within their tolerances.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "parallelism.md"
sys.path.insert(0, str(ROOT))
KINDS = ("vl", "vl tied", "text", "text tied")
HEADS = ("Qwen2.5-VL", "Qwen2.5-VL, tied", "Qwen3", "Qwen3, tied")


def main() -> int:
    """Replace the tables between their marks, or check them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("records", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check == bool(options.records):
        parser.error("give either records or --check")
    text = DOCUMENT.read_text(encoding="utf-8")
    if options.check:
        problems = [
            *faults(Marked(text, "layouts").content),
            *fsdp2_faults(Marked(text, "layouts under FSDP2").content),
        ]
        print("\n".join(problems) or f"the tables of {DOCUMENT} are those of the tests")
        return 1 if problems else 0
    records = [json.loads(line) for line in options.records.read_text(encoding="utf-8").splitlines()]
    under_fsdp2 = [record for record in records if record.get("table") == "fsdp2"]
    if under_fsdp2:
        text = Marked(text, "layouts under FSDP2").replaced_by(fsdp2_tables(under_fsdp2))
    if megatron := [record for record in records if "table" not in record]:
        text = Marked(text, "layouts").replaced_by(tables(megatron))
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


class Marked:
    """The part of a text between the marks of a table."""

    def __init__(self, text: str, name: str) -> None:
        self._begin, self._end = f"<!-- table of {name}: begin -->", f"<!-- table of {name}: end -->"
        self._before, rest = text.split(self._begin)
        self.content, self._after = rest.split(self._end)

    def replaced_by(self, content: str) -> str:
        """Return the text with `content` between the marks."""
        return f"{self._before}{self._begin}\n{content}\n{self._end}{self._after}"


def rows_of(table: str) -> dict[str, list[str]]:
    """Return the cells of each row by its first cell, without heads."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if cells[0] not in ("layout", "what else")}


def faults(table: str) -> list[str]:
    """Rows that are missing or too many, and figures that are missing or beyond the tests' tolerance."""
    from tests.parity.test_ptd_layouts import LAYOUTS, SPECIAL, TOLERANCE

    wanted = {f"{layout}{end}" for layout in LAYOUTS for end in ("", ", recompute")} | set(SPECIAL)
    rows = rows_of(table)
    problems = misnamed(rows, wanted)
    for name, cells in rows.items():
        for cell in cells if name not in SPECIAL else cells[-1:]:
            problems += figure_faults(name, cell, (TOLERANCE, TOLERANCE))
    return problems


def fsdp2_faults(table: str) -> list[str]:
    """As `faults`, of the table of FSDP2; a layout that a model refuses has the mark of its reason."""
    from tests.support.parallel_case import GRADIENT, LOSS, NORM
    from tests.support.parallel_models import LAYOUTS, MODELS

    rows = rows_of(table)
    problems = misnamed(rows, set(LAYOUTS))
    heads = "| layout | " + " | ".join(model.title for model in MODELS.values()) + " |"
    if heads not in table:
        problems.append(f"the table of FSDP2 lacks the head '{heads}'")
    for name, cells in rows.items():
        if name in LAYOUTS and len(cells) == len(MODELS):
            for model, cell in zip(MODELS.values(), cells, strict=True):
                if model.refusal(LAYOUTS[name]) is None:
                    problems += figure_faults(name, cell, (LOSS, NORM, GRADIENT))
                elif cell != "–":
                    problems.append(f"'{name}' says '{cell}', but {model.title} refuses the layout")
    return problems


def misnamed(rows: dict[str, list[str]], wanted: set[str]) -> list[str]:
    """Rows that are missing or too many."""
    problems = [f"the table lacks '{name}'" for name in sorted(wanted - rows.keys())]
    return problems + [f"no test has '{name}' any more" for name in sorted(rows.keys() - wanted)]


def figure_faults(name: str, cell: str, limits: tuple[float, ...]) -> list[str]:
    """What is wrong with a cell of figures in 1e-7, one for each limit."""
    found = re.fullmatch(" / ".join([r"([\d.]+)"] * len(limits)), cell)
    if found is None or any(float(f) * 1e-7 > limit for f, limit in zip(found.groups(), limits, strict=True)):
        return [f"'{name}' says '{cell}', which no passing test has measured"]
    return []


def tables(records: list[dict[str, Any]]) -> str:
    """Both tables of Megatron-core: every layout for every kind of model, and the special cases."""
    cells = {(r["layout"], r["recompute"], r["kind"]): shown(r) for r in records if r["special"] is None}
    rows = list(dict.fromkeys((layout, recompute) for layout, recompute, _ in cells))
    lines = ["| layout | " + " | ".join(HEADS) + " |", "|---|" + "---:|" * len(HEADS)]
    for layout, recompute in sorted(rows, key=lambda row: [r[0] for r in rows].index(row[0])):
        name = f"{layout}, recompute" if recompute else layout
        lines.append(f"| {name} | " + " | ".join(cells.get((layout, recompute, kind), "–") for kind in KINDS) + " |")
    special = [r for r in records if r["special"] is not None]
    lines += ["", "| what else | model | layout | difference |", "|---|---|---|---:|"]
    lines += [f"| {r['special']} | {HEADS[KINDS.index(r['kind'])]} | {r['layout']} | {shown(r)} |" for r in special]
    return "\n".join(lines)


def fsdp2_tables(records: list[dict[str, Any]]) -> str:
    """The table of FSDP2: every layout for every model, the larger figure of padded and packed rows."""
    from tests.support.parallel_models import LAYOUTS, MODELS, REASONS

    figures: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        figures.setdefault((record["layout"], record["model"]), []).append(record)
    lines = ["| layout | " + " | ".join(model.title for model in MODELS.values()) + " |"]
    lines.append("|---|" + "---:|" * len(MODELS))
    for layout, sizes in LAYOUTS.items():
        cells = []
        for model, described in MODELS.items():
            found = figures.get((layout, model), [])
            unknown = "?" if described.refusal(sizes) is None else "–"
            worst = [max(record[name] for record in found) for name in ("loss", "norm", "gradient")] if found else []
            cells.append(" / ".join(f"{figure * 1e7:.1f}" for figure in worst) or unknown)
        lines.append(f"| {layout} | " + " | ".join(cells) + " |")
    refused: dict[str, list[str]] = {}
    for model in MODELS.values():
        for kind in model.refused:
            refused.setdefault(REASONS[kind], []).append(model.title.split(",")[0])
    lines += ["", "– is refused: " + "; ".join(f"{', '.join(names)}: {why}" for why, names in refused.items()) + "."]
    return "\n".join(lines)


def shown(record: dict[str, Any]) -> str:
    """Largest relative difference of loss and norm, in 1e-7."""
    return f"{record['loss'] * 1e7:.1f} / {record['norm'] * 1e7:.1f}"


if __name__ == "__main__":
    sys.exit(main())
