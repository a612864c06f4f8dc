"""Ask the exported model about the held-out digits, by transformers alone, and write `report.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mindspeed_mm.tasks.evaluation.scores import exact_match


def main() -> None:
    """Print and write the accuracy; exit with status 1 if it is below `--at-least`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--data", type=Path, help="folder of heldout.json; absent: <run>/data")
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--at-least", type=float, default=0.0)
    options = parser.parse_args()
    run: Path = options.run
    data: Path = options.data or run / "data"

    rows = json.loads((data / "heldout.json").read_text(encoding="utf-8"))
    answers = ask(run / "hf", rows, data, options.batch_size)
    right = sum(exact_match(answer, row["messages"][1]["content"]) for answer, row in zip(answers, rows, strict=True))
    report = {"heldout_accuracy": right / len(rows)} | training_figures(run / "metrics.jsonl")
    (run / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"held-out accuracy {report['heldout_accuracy']:.4f} ({right} of {len(rows)} digits)")
    print(json.dumps(report))
    if report["heldout_accuracy"] < options.at_least:
        raise SystemExit(f"held-out accuracy {report['heldout_accuracy']:.4f}: expected at least {options.at_least}")


@torch.inference_mode()
def ask(model_dir: Path, rows: list[dict[str, Any]], media_dir: Path, batch_size: int) -> list[str]:
    """Return the model's greedy answer to the first question of each row."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir).eval()
    processor = AutoProcessor.from_pretrained(model_dir)
    processor.tokenizer.padding_side = "left"
    answers: list[str] = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        prompts = [
            processor.apply_chat_template([question(row)], tokenize=False, add_generation_prompt=True) for row in batch
        ]
        images = [Image.open(media_dir / name).convert("RGB") for row in batch for name in row["images"]]
        inputs = processor(text=prompts, images=images, padding=True, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        new = made[:, inputs["input_ids"].shape[1] :]
        answers += [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]
    return answers


def question(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row's first message with its images as parts of their own."""
    text = row["messages"][0]["content"].replace("<image>", "")
    parts: list[dict[str, str]] = [{"type": "image"} for _ in row["images"]]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def training_figures(metrics: Path) -> dict[str, float | int]:
    """Return first and last loss, number of iterations and seconds spent in them, as the run recorded them."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    steps = [line for line in lines if "loss" in line]
    numbers = [0, *(line["iteration"] for line in steps)]
    seconds = [  # each line has the mean time of the steps since the line before
        line["step_ms"] / 1000 * (number - before)
        for line, before, number in zip(steps, numbers, numbers[1:], strict=False)
    ]
    return {
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "iterations": steps[-1]["iteration"],
        "seconds": round(sum(seconds), 1),
    }


if __name__ == "__main__":
    main()
