"""Write the data of both parts of the example: scikit-learn's digits, and sums in words with a small OLMo 2."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from my_model import WORDS
from sklearn.datasets import load_digits

HELD_OUT = 360


def main() -> None:
    """Write `<out>/data` and `<out>/olmo2`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/custom_model"))
    out: Path = parser.parse_args().out
    (out / "data").mkdir(parents=True, exist_ok=True)
    write_digits(out / "data")
    write_sums(out / "data" / "sums.json", out / "olmo2")


def write_digits(folder: Path) -> None:
    """Write train.npz and heldout.npz."""
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    for name, part in (("train", order[:-HELD_OUT]), ("heldout", order[-HELD_OUT:])):
        np.savez(folder / f"{name}.npz", pixels=digits.images[part].astype(np.uint8), labels=digits.target[part])
    print(f"prepared {len(order) - HELD_OUT} digits to train on and {HELD_OUT} held out, in {folder}")


def write_sums(file: Path, model: Path) -> None:
    """Write chat rows such as "two plus three" → "five", and a tokenizer and configuration, without weights."""
    from transformers import Olmo2Config

    from mindspeed_mm.tools.tiny_models import build_byte_bpe_tokenizer

    names = WORDS["en"]
    pairs = [(a, b) for a in range(10) for b in range(10 - a)] * 4
    random.Random(0).shuffle(pairs)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{names[a]} plus {names[b]}"},
                {"role": "assistant", "content": names[a + b]},
            ]
        }
        for a, b in pairs
    ]
    file.write_text(json.dumps(rows, indent=0), encoding="utf-8")
    texts = [message["content"] for row in rows for message in row["messages"]]
    tokenizer = build_byte_bpe_tokenizer(texts, 384, model, default_system=None)
    config = Olmo2Config(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    config.architectures = ["Olmo2ForCausalLM"]
    config.save_pretrained(model)
    print(f"prepared {len(rows)} sums in words, {file}, and {model}")


if __name__ == "__main__":
    main()
