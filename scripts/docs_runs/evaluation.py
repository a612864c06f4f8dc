"""docs/evaluation.md: benchmarks of five rows, and rows of one's own, answered by a tiny model with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from scripts.docs_runs.common import DocumentError, Done, fences, items, key, page_of, preload, start

#: how the commands are made short; a directory of transformers has no checkpoints to choose from
SHORTER = {" --ckpt-step best": "", "--output": "--max-new-tokens 2 --output"}


def run() -> Done:
    """Run the commands of the first fence."""
    from tests.support import benchmark_files as files
    from tests.support.families import families
    from tests.support.family_case import write_rows

    preload("torch.distributed", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    page, family = page_of("evaluation.md"), families()["qwen2_5_vl"]
    family.make(Path("runs/my_run/hf"))
    files.chartqa_tsv(Path())
    files.mmmu_parquet(Path("MMMU"))
    shutil.copytree(write_rows(Path("rows"), family).parent, ".", dirs_exist_ok=True)
    shutil.copy(next(Path("rows").glob("*.json")), "heldout.json")
    commands = items(fences(page, "bash")[0])
    for command in commands:
        short = command
        for written, other in SHORTER.items():
            short = short.replace(written, other)
        start(short, page, ranks=2 if "torchrun" in command else 1)
    for name, rows in (("chartqa", 5), ("mmmu", 5), ("heldout", 8)):
        found = json.loads(Path(f"results/{name}/results.json").read_text(encoding="utf-8"))
        if found["rows"] != rows:
            raise DocumentError(f"{page.name}: {name} has {found['rows']} rows, expected {rows}")
    return {key(page, command) for command in commands}
