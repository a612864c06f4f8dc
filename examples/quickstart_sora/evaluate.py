"""Let a classifier that has seen real digits only read the generated ones, and write `report.json`."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import numpy as np
from PIL import Image
from prepare import HELD_OUT
from sklearn.datasets import load_digits
from sklearn.svm import SVC


def main() -> None:
    """Print and write the accuracies; exit with status 1 if the generated digits' is below `--at-least`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart_sora"))
    parser.add_argument("--samples", type=Path, help="folder of samples.jsonl; absent: <run>/samples")
    parser.add_argument("--started", type=float, help="when the whole run began, in seconds since 1970")
    parser.add_argument("--at-least", type=float, default=0.0)
    options = parser.parse_args()
    samples: Path = options.samples or options.run / "samples"

    reader, real_accuracy = fit_reader()
    rows = [json.loads(line) for line in (samples / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = [int(re.search(r"\d", row["prompt"]).group()) for row in rows]
    read = reader.predict(np.stack([pixels(samples / row["file"]) for row in rows]))
    right = int((read == np.array(asked)).sum())
    report: dict[str, float | int] = {
        "classifier_accuracy": right / len(rows),
        "real_accuracy": round(real_accuracy, 4),
        "samples": len(rows),
    }
    if options.started is not None:
        report["seconds"] = round(time.time() - options.started, 1)
    (options.run / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"the asked digit is read in {right} of {len(rows)} samples; of real held-out digits, {real_accuracy:.4f}")
    print(json.dumps(report))
    if report["classifier_accuracy"] < options.at_least:
        raise SystemExit(
            f"classifier accuracy {report['classifier_accuracy']:.4f}: expected at least {options.at_least}"
        )


def fit_reader() -> tuple[SVC, float]:
    """A support vector machine fitted on the digits that the run was trained on; its accuracy on held-out real ones."""
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    train, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    values = digits.images.reshape(-1, 64)
    reader = SVC(gamma=0.001).fit(values[train], digits.target[train])
    return reader, float(reader.score(values[held_out], digits.target[held_out]))


def pixels(file: Path) -> np.ndarray:
    """A picture as the 64 values from 0 to 16 that the classifier knows."""
    with Image.open(file) as opened:
        return np.asarray(opened.convert("L"), dtype=np.float64).reshape(-1) * (16.0 / 255.0)


if __name__ == "__main__":
    main()
