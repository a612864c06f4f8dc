"""Run folders as runs leave them, for what reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def step_line(iteration: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, of a step of 100 ms."""
    figures: dict[str, Any] = {
        "iteration": iteration,
        "loss": 5.0 / math.sqrt(iteration),
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 1000 * iteration,
        "global_batch_size": 8,
        "step_ms": 100.0,
        "tokens_per_second": 10_000.0,
        "media_per_second": {"image": 80.0},
        "data_wait_ms": 2.0,
        "data_wait_fraction": 0.02,
        "padding_fraction": 0.1,
        "memory_bytes": 2**30,
        "skipped_iterations": 0,
    }
    return {**figures, **changes}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write JSON objects, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def start_of(**changes: Any) -> dict[str, Any]:
    """An entry of launch.json's starts."""
    facts = {"model": "Qwen3ForCausalLM, 86.4k parameters, all trained", "devices": "2 processes on the CPU"}
    start = {
        "started": "2026-01-02T03:04:05+00:00",
        "iteration": 0,
        "train_iters": 100,
        "command": ["python", "-m", "mindspeed_mm.entry.pretrain_vlm", "--lr", "1e-3"],
        "working_directory": "/work",
        "processes": 2,
        "changed": [],
        "facts": facts,
        "versions": {"python": "3.11.2", "torch": "2.14.1"},
        "git": {"commit": "0123456789abcdef", "is_changed": True},
    }
    return {**start, **changes}


def write_run(
    folder: Path,
    steps: int = 30,
    *,
    starts: Sequence[dict[str, Any]] = (),
    endings: Sequence[dict[str, Any]] = (),
    settings: str = "gpt_args:\n  lr: 0.001\n  save: runs/x\n",
) -> Path:
    """Write a run folder with an evaluation after each ten steps; returns it."""
    lines: list[dict[str, Any]] = []
    for iteration in range(1, steps + 1):
        lines.append(step_line(iteration))
        if iteration % 10 == 0:
            lines.append({"iteration": iteration, "eval_loss": 3.0 / iteration, "eval_batches": 2})
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "launch.json").write_text(json.dumps({"launch": {}, "starts": list(starts) or [start_of()]}))
    (folder / "run.yaml").write_text(settings)
    if endings:
        write_lines(folder / "report" / "endings.jsonl", endings)
    return folder


def write_recorded(folder: Path, *, text: str = "Which digit?", sheets: int = 2, noise: int = 24) -> None:
    """Write what a run records for its report, with pictures of random pixels.

    Args:
        text: of rows and prompts.
        sheets: number of steps whose samples are there.
        noise: side of a picture in pixels.
    """
    recorded = folder / "report"
    generator = np.random.default_rng(0)

    def picture(name: str) -> str:
        (recorded / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (noise, noise, 3), dtype=np.uint8)).save(recorded / name)
        return name

    pieces = [{"text": text, "is_trained": False, "tokens": 3}, {"text": "seven", "is_trained": True, "tokens": 1}]
    medium = {"kind": "image", "thumbnails": [picture("media/a.jpg")], "width": 56, "height": 28}
    sample = {"where": f"{text}.json, row 3", "tokens": 4, "trained": 1, "cut_from": None, "pieces": pieces}
    steps = [100 * number for number in range(1, sheets + 1)]
    drawn = [
        {"prompt": text, "index": i, "seed": i, "files": [picture(f"generated/step-{step}-{i}.jpg")], "iteration": step}
        for step in steps
        for i in range(2)
    ]
    lengths = {"rows": 30, "histogram": {"edges": [0, 10, 20], "counts": [10, 20]}, "capacity": 15, "padding": 0.25}
    experts = [{"iteration": step, "layers": {text: [0.5, 0.25, 0.25, 0.0]}} for step in steps]
    ranks = [{"iteration": step, "cost": [1.0, 3.0], "memory_bytes": [2**30, 2**31]} for step in steps]
    answers = [
        {"iteration": step, "index": 0, "prompt": text, "answer": str(step), "reference": "200"} for step in steps
    ]
    write_lines(recorded / "samples.jsonl", [{**sample, "media": [medium]}])
    write_lines(recorded / "generated.jsonl", drawn)
    write_lines(recorded / "experts.jsonl", experts)
    write_lines(recorded / "ranks.jsonl", ranks)
    write_lines(folder / "eval_answers.jsonl", answers)
    (recorded / "lengths.json").write_text(json.dumps(lengths))
