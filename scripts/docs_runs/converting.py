"""The commands of docs/data.md that convert data sets, on as many rows as fit on a page."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.docs_runs.common import Done, expect, fences, items, key, start

IMAGES = Path("coco/train2017")


def run(page: Path) -> Done:
    """Convert rows of LLaVA and captions of COCO about the same images."""
    from PIL import Image

    (snippet,) = (found for found in fences(page, "bash") if "data convert" in found.text)
    IMAGES.mkdir(parents=True)
    Path("coco/annotations").mkdir()
    described = [{"id": number, "file_name": f"{number:012}.jpg", "width": 64, "height": 48} for number in range(4)]
    for image in described:
        Image.new("RGB", (64, 48)).save(IMAGES / str(image["file_name"]))
    turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A cat."}]
    rows = [{"id": image["id"], "image": image["file_name"], "conversations": turns} for image in described]
    Path("llava_instruct_80k.json").write_text(json.dumps(rows), encoding="utf-8")
    captions = [{"image_id": number % 4, "caption": "A cat."} for number in range(8)]
    coco = {"images": described, "annotations": captions}
    Path("coco/annotations/captions_train2017.json").write_text(json.dumps(coco), encoding="utf-8")
    said = (
        ["3 rows to data/llava/train.jsonl", "1 rows to data/llava/validation"],
        ["4 rows to data/coco/train.jsonl"],
    )
    commands = items(snippet)
    for command, lines in zip(commands, said, strict=True):
        expect(start(command, page), lines, page)
    return {key(page, command) for command in commands}
