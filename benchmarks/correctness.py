"""How far a step is from exact: loss and gradient norm of one global batch of 16 rows, images mixed with text.

    python benchmarks/correctness.py

Exact is a hand-written loop: the sum of target-token cross-entropies over the global batch ÷ the number of targets, and
the norm of its gradient. Ours and the HF Trainer get the same rows, at 1 row x 16 and at 4 rows x 4, one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROWS = 16


def main() -> None:
    """Print the relative distance of each from exact."""
    from common import add_smallest, prepare

    from tests.support.reference import rows_as_inputs, train_reference

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_smallest(parser)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="correctness-"))
    hf_dir, data_file = prepare(folder, rows=ROWS, smallest=options.smallest)
    splits = (4,) if options.smallest else (1, 4)
    inputs = rows_as_inputs(hf_dir, data_file)
    losses, norms, _ = train_reference(hf_dir, inputs, steps=1)
    print(f"exact: loss {losses[0]:.7f}, gradient norm {norms[0]:.7f}")
    for micro in splits:
        loss, norm = ours(folder, hf_dir, data_file, micro)
        show(f"ours, {micro} x {ROWS // micro}", loss, norm, losses[0], norms[0])
    for micro in splits:
        loss, norm = trainer(folder, hf_dir, inputs, micro)
        show(f"HF Trainer, {micro} x {ROWS // micro}", loss, norm, losses[0], norms[0])


def show(name: str, loss: float, norm: float, exact_loss: float, exact_norm: float) -> None:
    """One line: relative differences."""
    print(f"{name}: loss off by {abs(loss / exact_loss - 1):.1e}, gradient norm by {abs(norm / exact_norm - 1):.1e}")


def ours(folder: Path, hf_dir: Path, data_file: Path, micro: int) -> tuple[float, float]:
    """Loss and norm of our first step, through the entry script."""
    from common import launch_words, write_files

    save = folder / f"run{micro}"
    words = launch_words(
        write_files(folder / "files", hf_dir, data_file),
        save,
        micro_batch_size=micro,
        global_batch_size=ROWS,
        train_iters=1,
        no_save_optim=True,
    )
    command = [sys.executable, str(ROOT / "pretrain_transformers.py"), *words]
    subprocess.run(command, check=True, capture_output=True)
    record = json.loads((save / "metrics.jsonl").read_text().splitlines()[0])
    return record["loss"], record["grad_norm"]


def trainer(folder: Path, hf_dir: Path, inputs: list[dict[str, Any]], micro: int) -> tuple[float, float]:
    """Loss and norm that the HF Trainer logs for the same rows and labels."""
    import torch
    from step_overhead import trainer_arguments
    from transformers import Qwen2_5_VLForConditionalGeneration, Trainer

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        length = max(r["input_ids"].shape[1] for r in rows)
        batch: dict[str, Any] = {}
        for key, fill in (("input_ids", 0), ("attention_mask", 0), ("mm_token_type_ids", 0), ("labels", -100)):
            padded = [torch.nn.functional.pad(r[key], (0, length - r[key].shape[1]), value=fill) for r in rows]
            batch[key] = torch.cat(padded)
        for key in ("pixel_values", "image_grid_thw"):
            present = [r[key] for r in rows if key in r]
            if present:
                batch[key] = torch.cat(present)
        return batch

    run = Trainer(
        model=model,
        args=trainer_arguments(folder, ROWS // micro, 1, micro),
        train_dataset=inputs,  # type: ignore[arg-type]
        data_collator=collate,
    )
    run.train()
    logged = next(entry for entry in run.state.log_history if "loss" in entry)
    return logged["loss"], logged["grad_norm"]


if __name__ == "__main__":
    main()
