"""Write what the tests of Megatron layouts measured into the table of docs/parallelism.md.

MM_PARITY_RECORDS=records.jsonl python -m pytest tests/parity/test_ptd_layouts.py -m "full or not full"
python scripts/make_parallelism_table.py records.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- table of layouts: begin -->", "<!-- table of layouts: end -->"
KINDS = ("vl", "vl tied", "text", "text tied")
HEADS = ("Qwen2.5-VL", "Qwen2.5-VL, tied", "Qwen3", "Qwen3, tied")


def main() -> None:
    """Replace the table between its marks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("records", type=Path)
    records = [json.loads(line) for line in parser.parse_args().records.read_text(encoding="utf-8").splitlines()]
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{tables(records)}\n{END}{after}", encoding="utf-8")


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
    main()
