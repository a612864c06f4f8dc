"""Load what the run exported, with torch alone, and let it read the held-out digits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from my_model import WORDS, CustomModel
from safetensors.torch import load_file


def main() -> None:
    """Print the share of digits that are named right; exit with status 1 if it is below `--at-least`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/custom_model"))
    parser.add_argument("--at-least", type=float, default=0.0)
    options = parser.parse_args()

    model = CustomModel(json.loads((options.run / "hf" / "config.json").read_text(encoding="utf-8")))
    missing, unexpected = model.load_state_dict(load_file(options.run / "hf" / "model.safetensors"), strict=False)
    assert missing == ["head.weight"] and not unexpected  # it is the embedding, which is written once

    held = np.load(options.run / "data" / "heldout.npz")
    pixels = torch.from_numpy(held["pixels"]).float() / 16
    right = {}
    for language, words in WORDS.items():
        found = model.eval().read(pixels, language)
        right[language] = sum(a == words[b] for a, b in zip(found, held["labels"], strict=True)) / len(found)
    accuracy = sum(right.values()) / len(right)
    shown = ", ".join(f"{language} {share:.3f}" for language, share in right.items())
    print(f"held-out accuracy {accuracy:.4f} ({shown})")
    if accuracy < options.at_least:
        raise SystemExit(f"held-out accuracy {accuracy:.4f}: expected at least {options.at_least}")


if __name__ == "__main__":
    main()
