"""The data.json of docs/data.md's section on pretraining, in the folder of docs/parallelism.md's model with experts."""

from __future__ import annotations

from pathlib import Path

from scripts.docs_runs import parallelism
from scripts.docs_runs.common import Done, expect, fences, key, start

LAUNCH = (
    "python pretrain_transformers.py --use-torch-fsdp2 --mm-model experts.json --mm-data corpus.json --seq-length 32"
    " --train-iters 1 --lr 1e-5 --micro-batch-size 1 --global-batch-size 1 --num-workers 0 --distributed-backend gloo"
)


def run(page: Path) -> Done:
    """Train a step on documents in the files that the sample names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (sample,) = fences(page, "json")
    Path("corpus.json").write_text(sample.text, encoding="utf-8")
    pq.write_table(pa.table({"text": ["What is this? A cat."] * 50}), "wiki.parquet")
    Path("books").mkdir()
    Path("books/one.txt").write_text(("What is this? A cat. " * 20 + "\n") * 50, encoding="utf-8")
    Path("ckpt/Qwen3-0.6B").symlink_to(Path(parallelism.HF).resolve())
    expect(start(LAUNCH, page), ["done: 1 iterations"], page)
    return {key(page, sample.text)}
