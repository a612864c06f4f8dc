"""Ask the exported model the questions that were held out, with transformers alone, and write `report.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print and write the accuracy; exit with status 1 if it is below `--at-least`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart_fsdp2"))
    parser.add_argument("--at-least", type=float, default=0.0)
    options = parser.parse_args()
    run: Path = options.run

    rows = json.loads((run / "data/heldout.json").read_text(encoding="utf-8"))
    answers = ask(run / "output/hf", [row["question"] for row in rows])
    right = sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True))
    accuracy = right / len(rows)
    lines = (run / "output/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    report = {
        "heldout_accuracy": accuracy,
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "iterations": steps[-1]["iteration"],
    }
    (run / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"held-out accuracy {accuracy:.4f} ({right} of {len(rows)} questions)")
    print(json.dumps(report))
    if accuracy < options.at_least:
        raise SystemExit(f"held-out accuracy {accuracy:.4f}: expected at least {options.at_least}")


@torch.inference_mode()
def ask(model_dir: Path, questions: list[str]) -> list[str]:
    """Return the model's greedy answers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    new = made[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


if __name__ == "__main__":
    main()
