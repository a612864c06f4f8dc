"""Write what the tests of Megatron layouts measured into the table of docs/parallelism.md.

MM_PARITY_RECORDS=records.jsonl python -m pytest tests/parity/test_ptd_layouts.py -m "full or not full"
python scripts/make_parallelism_table.py records.jsonl

`--check`, without records, reports whether the table has the layouts and cases of the tests, within their tolerance.
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
BEGIN, END = "<!-- table of layouts: begin -->", "<!-- table of layouts: end -->"
KINDS = ("vl", "vl tied", "text", "text tied")
HEADS = ("Qwen2.5-VL", "Qwen2.5-VL, tied", "Qwen3", "Qwen3, tied")


def main() -> int:
    """Replace the table between its marks, or check it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("records", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check == bool(options.records):
        parser.error("give either records or --check")
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    if options.check:
        problems = faults(table)
        print("\n".join(problems) or f"the table of {DOCUMENT} is that of the tests")
        return 1 if problems else 0
    records = [json.loads(line) for line in options.records.read_text(encoding="utf-8").splitlines()]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{tables(records)}\n{END}{after}", encoding="utf-8")
    return 0


def faults(table: str) -> list[str]:
    """Rows that are missing or too many, and figures that are missing or beyond the tests' tolerance."""
    sys.path.insert(0, str(ROOT))
    from tests.parity.test_ptd_layouts import LAYOUTS, SPECIAL, TOLERANCE

    wanted = {f"{layout}{end}" for layout in LAYOUTS for end in ("", ", recompute")} | set(SPECIAL)
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    rows = {cells[0]: cells[1:] for cells in lines if cells[0] not in ("layout", "what else")}
    problems = [f"the table lacks '{name}'" for name in sorted(wanted - rows.keys())]
    problems += [f"no test has '{name}' any more" for name in sorted(rows.keys() - wanted)]
    for name, cells in rows.items():
        figures = cells if name not in SPECIAL else cells[-1:]
        for cell in figures:
            pair = re.fullmatch(r"([\d.]+) / ([\d.]+)", cell)
            if pair is None or max(float(pair[1]), float(pair[2])) * 1e-7 > TOLERANCE:
                problems.append(f"'{name}' says '{cell}', which no passing test has measured")
    return problems


def tables(records: list[dict[str, Any]]) -> str:
    """Both tables: every layout for every kind of model, and the special cases."""
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


def shown(record: dict[str, Any]) -> str:
    """Largest relative difference of loss and norm, in 1e-7."""
    return f"{record['loss'] * 1e7:.1f} / {record['norm'] * 1e7:.1f}"


if __name__ == "__main__":
    sys.exit(main())
