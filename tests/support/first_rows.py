"""30 rows in each of the forms in which people have them, for `mindspeed-mm init`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SUMS = [(a, b) for a in range(6) for b in range(5)]
_SIDE = 56


def _json(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(list(rows)))
    return path


def _messages(folder: Path) -> Path:
    turns = ([("user", f"{a} + {b}"), ("assistant", str(a + b))] for a, b in SUMS)
    return _json(folder, ({"messages": [{"role": r, "content": c} for r, c in row]} for row in turns))


def _openai(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": [{"type": "text", "text": f"{a} + {b}"}]},
                {"role": "assistant", "content": str(a + b)},
            ]
        }
        for a, b in SUMS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _sharegpt(folder: Path) -> Path:
    turns = ([("human", f"{a} + {b}"), ("gpt", str(a + b))] for a, b in SUMS)
    return _json(folder, ({"conversations": [{"from": r, "value": c} for r, c in row]} for row in turns))


def _alpaca(folder: Path) -> Path:
    return _json(folder, ({"instruction": "Add.", "input": f"{a} + {b}", "output": str(a + b)} for a, b in SUMS))


def _csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["query", "response"], *([f"{a} + {b}", a + b] for a, b in SUMS)])
    return path


def _parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"instruction": f"{a} + {b}", "output": str(a + b)} for a, b in SUMS]), path)
    return path


def _text(folder: Path) -> Path:
    path = folder / "rows.txt"
    path.write_text("".join(f"{a} + {b} = {a + b}\n" for a, b in SUMS))
    return path


def _llava(folder: Path) -> Path:
    names = _pictures(folder / "images")
    return _json(
        folder,
        (
            {
                "id": name,
                "image": f"images/{name}",
                "conversations": [
                    {"from": "human", "value": "<image>\nWhich number?"},
                    {"from": "gpt", "value": str(number % 10)},
                ],
            }
            for number, name in enumerate(names)
        ),
    )


def _pictures(folder: Path) -> list[str]:
    """Save 30 pictures of like structure, and return their names."""
    folder.mkdir(parents=True)
    names = []
    rows, columns = np.mgrid[:_SIDE, :_SIDE]
    for number in range(len(SUMS)):
        name = f"{number:03}.png"
        wave = 128 + 100 * np.sin((rows * (number % 10) + columns * 3) / _SIDE)
        Image.fromarray(np.repeat(wave[..., None], 3, axis=2).astype(np.uint8)).save(folder / name)
        names.append(name)
    return names


def caption(number: int) -> str:
    """Caption of a picture."""
    return f"waves {number % 10}"


def _metadata(folder: Path) -> Path:
    """As the hub's image folders have it."""
    pictures = folder / "pictures"
    names = _pictures(pictures)
    lines = [json.dumps({"file_name": name, "text": caption(number)}) for number, name in enumerate(names)]
    (pictures / "metadata.jsonl").write_text("\n".join(lines))
    return pictures


def _beside(folder: Path) -> Path:
    pictures = folder / "pictures"
    for number, name in enumerate(_pictures(pictures)):
        (pictures / name).with_suffix(".txt").write_text(caption(number))
    return pictures


def _annotations(folder: Path) -> Path:
    names = _pictures(folder / "pictures")
    return _json(folder, ({"path": f"pictures/{n}", "caption": caption(number)} for number, n in enumerate(names)))


#: form → writes rows for a model that reads text or pictures into a folder, and returns what --data names
ROWS: Mapping[str, Callable[[Path], Path]] = {
    "messages": _messages,
    "openai": _openai,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "csv": _csv,
    "parquet": _parquet,
    "text": _text,
}
#: the same with pictures
PICTURE_ROWS: Mapping[str, Callable[[Path], Path]] = {"llava": _llava}
#: form → captions of pictures, for a model that makes them
CAPTIONS: Mapping[str, Callable[[Path], Path]] = {
    "metadata": _metadata,
    "beside": _beside,
    "annotations": _annotations,
}
