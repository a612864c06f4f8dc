"""Rows that ask for the label of a picture, few enough to be learnt by heart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

LABELS = ("three", "seven", "two", "four")
COLOURS = ("red", "green", "blue", "small")


def write_labelled_pictures(folder: Path, pictures: bool = True) -> Path:
    """Write train.json, contrary.json and heldout.json into a folder that isn't there, and return it.

    train.json has four pictures with their labels, contrary.json the same with another one's, heldout.json both.

    Args:
        pictures: False: words in the place of pictures, for models that read text only.
    """
    folder.mkdir(parents=True)
    rows = []
    for number in range(2 * len(LABELS)):
        shown = number % len(LABELS)
        pixels = np.random.RandomState(shown).randint(0, 256, (28, 28, 3), dtype=np.uint8)
        answer = LABELS[shown] if number < len(LABELS) else LABELS[(shown + 1) % len(LABELS)]
        question = "<image>which digit" if pictures else f"which digit {COLOURS[shown]}"
        turns = [("user", question), ("assistant", answer)]
        row: dict[str, object] = {"messages": [{"role": role, "content": text} for role, text in turns]}
        if pictures:
            Image.fromarray(pixels).save(folder / f"{number}.png")
            row["images"] = [f"{number}.png"]
        rows.append(row)
    (folder / "train.json").write_text(json.dumps(rows[: len(LABELS)]))
    (folder / "contrary.json").write_text(json.dumps(rows[len(LABELS) :]))
    (folder / "heldout.json").write_text(json.dumps(rows))
    return folder
