"""docs/evaluation.md and the answers of docs/inference.md: rows answered by a tiny model, trained for a step."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

from scripts.docs_runs.common import DocumentError, Done, exchange, fences, items, key, page_of, preload, shell, start

#: how the commands are made short; a directory of transformers has no checkpoints to choose from
SHORTER = {" --ckpt-step best": "", "--output": "--max-new-tokens 2 --output"}


def run() -> Done:
    """Run the commands of the first fence, the training of the next one, then those that answer."""
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
    shutil.copy("heldout.json", "speech.json")
    commands = items(fences(page, "bash")[0])
    for command in commands:
        short = command
        for written, other in SHORTER.items():
            short = short.replace(written, other)
        start(short, page, ranks=2 if "torchrun" in command else 1)
    for name, rows in (("chartqa", 5), ("mmmu", 5), ("heldout", 8), ("speech", 8)):
        found = json.loads(Path(f"results/{name}/results.json").read_text(encoding="utf-8"))
        if found["rows"] != rows:
            raise DocumentError(f"{page.name}: {name} has {found['rows']} rows, expected {rows}")
    (training,) = items(fences(page, "bash")[1])
    train(training, page)
    return {key(page, command) for command in (*commands, training)} | answers(page_of("inference.md"))


def train(command: str, page: Path) -> None:
    """Train for a step, and answer afterwards."""
    from tests.support.launch import launch_flags, write_run_files

    rows = Path("heldout.json").absolute()
    held_out = {"dataset_param.basic_parameters.val_dataset": str(rows)}
    files = write_run_files(Path("training"), Path("runs/my_run/hf").absolute(), rows, data=held_out)
    flags = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 1, "eval_iters": 1, "save": "runs/trained"}
    start(exchange(command, {" …": " " + shlex.join(launch_flags(files, **flags))}, page), page, ranks=2)
    best = json.loads(Path("runs/trained/best.json").read_text(encoding="utf-8"))
    if best["metric"] != "exact_match":
        raise DocumentError(f"{page.name}: the training has kept the best {best['metric']}")


def answers(page: Path) -> Done:
    """Answer a prompt, rows by one process and by two, in a conversation, and from Python."""
    from PIL import Image

    Image.new("RGB", (56, 56), (200, 120, 40)).save("cat.png")
    rows = json.loads(Path("heldout.json").read_text(encoding="utf-8"))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prompt, batch, shared, chat = items(fences(page, "bash")[0])
    start(f"{prompt} --max-new-tokens 2", page)
    short = batch.replace("--max-new-tokens 256", "--max-new-tokens 2")
    start(short, page)
    flags = short.partition("inference_vlm.py")[2].replace("answers.jsonl", "shared.jsonl")
    start(shared.replace(" …", flags), page, ranks=2)
    if Path("answers.jsonl").read_bytes() != Path("shared.jsonl").read_bytes():
        raise DocumentError(f"{page.name}: two processes give other answers than one")
    shell(f"printf '/image cat.png\nWhat is this?\n' | {chat} --max-new-tokens 2", page)
    python = fences(page, "python")[0]
    exec(compile(python.text.replace('"64"', '"2"'), python.place, "exec"), {"__name__": python.place})
    return {key(page, item) for item in (prompt, batch, shared, chat, python.text)}
