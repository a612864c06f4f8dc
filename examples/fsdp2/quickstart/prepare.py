"""Prepare the quick start of train_fsdp2.py: questions about small numbers, and a small Qwen3 without weights.

Nothing is downloaded: the questions are made up here, and the vocabulary is learnt from them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from mindspeed_mm.tools.tiny_models import build_byte_bpe_tokenizer, qwen3_config, save_model_dir

HELD_OUT = 160
VOCAB_SIZE = 320
SUMS = ("What is {a} plus {b}?", "Add {a} and {b}.", "How much are {a} and {b} together?", "{a} + {b} =")
PRODUCTS = ("What is {a} times {b}?", "Multiply {a} by {b}.", "How much are {a} groups of {b}?", "{a} x {b} =")


def main() -> None:
    """Write `<out>/data` and `<out>/model`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart_fsdp2"))
    out: Path = parser.parse_args().out

    numbers = [(a, b) for a in range(10) for b in range(10)]
    asked = [("sums", form.format(a=a, b=b), str(a + b)) for form in SUMS for a, b in numbers]
    asked += [("products", form.format(a=a, b=b), str(a * b)) for form in PRODUCTS for a, b in numbers]
    random.Random(0).shuffle(asked)
    held_out, trained = asked[:HELD_OUT], asked[HELD_OUT:]

    write_data(out / "data", trained, held_out)
    tokenizer = build_byte_bpe_tokenizer([question for _, question, _ in asked], VOCAB_SIZE, out / "model")
    config = qwen3_config(
        tokenizer,
        text={"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCAB_SIZE},
    )
    save_model_dir(config, tokenizer, out / "model", seed=None)
    print(f"prepared {len(trained)} questions to train on and {HELD_OUT} held out, in {out}")


def write_data(folder: Path, trained: list[tuple[str, str, str]], held_out: list[tuple[str, str, str]]) -> None:
    """Write one data set in each form, dataset_info.json that names them, and the questions that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = [
        {"instruction": question, "input": "", "output": answer} for kind, question, answer in trained if kind == "sums"
    ]
    products = [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for kind, question, answer in trained
        if kind == "products"
    ]
    registry = {
        "sums": {"file_name": "sums.json"},
        "products": {
            "file_name": "products.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations"},
        },
    }
    rest = [{"question": question, "answer": answer} for _, question, answer in held_out]
    for name, content in {"sums": sums, "products": products, "dataset_info": registry, "heldout": rest}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
