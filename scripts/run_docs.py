"""Run what the documents tell to write and to run, as far as a tiny model on one CPU can.

    python scripts/run_docs.py

The README's own-model section is followed in an empty folder, in English and in Chinese: its files are written as they
stand, its row of data and its command are used with the substitutions of `SMALLEST`, and its class is defined. Then the
commands of docs/checkpoints.md that need a run folder are given the one that came out. What the documents show beyond
that is read by scripts/check_docs.py: it starts long trainings or needs published weights.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.check_docs import Snippet, snippets  # noqa: E402

HF = "ckpt/Qwen2.5-VL-7B-Instruct"
#: what the documents say → what is run in its place: fewer processes, samples and steps, and the CPU's collectives
SMALLEST = {
    "--nproc_per_node 8": "--standalone --nproc_per_node 1",
    "pretrain_transformers.py": str(ROOT / "pretrain_transformers.py"),
    "--global-batch-size 64": "--global-batch-size 1",
    "--train-iters 1000": "--train-iters 2",
    "--distributed-backend nccl": "--distributed-backend gloo --num-workers 0",
    "torchrun": f"{shlex.quote(sys.executable)} -m torch.distributed.run",
}
#: words of docs/checkpoints.md's commands → what stands for them
PLACES = {"RUN": "runs/mine", "DIR": "runs/mine", "HF": HF, "OUT": "out"}
#: commands that need something that this run has not made: averaged weights, published options of another layout
LEFT_OUT = ("--averaged", "Qwen2_5_VLConverter")


def section(page: Path, language: str) -> list[Snippet]:
    """The snippets of a page in one language."""
    return [snippet for snippet in snippets(page) if snippet.language == language]


def write_model() -> None:
    """A tiny model where the README names a published one, and the picture that its row names."""
    from PIL import Image

    from mindspeed_mm.tools import tiny_models

    tokenizer = tiny_models.build_byte_bpe_tokenizer(["What is this? A cat."] * 9, 320, Path(HF))
    tiny_models.build_qwen2_5_vl_processor(tokenizer, HF)
    tiny_models.save_model_dir(tiny_models.qwen2_5_vl_config(tokenizer), tokenizer, HF, 0)
    Path("data/images").mkdir(parents=True)
    Image.new("RGB", (56, 56), (200, 120, 40)).save("data/images/0001.png")


def follow(page: Path) -> None:
    """Write the files of the section in this folder, train as it says, and define its class."""
    written = {}
    for snippet in section(page, "json"):
        content = json.loads(snippet.text)
        name = "data.json" if "dataset_param" in content else "row" if "messages" in content else "model.json"
        written[name] = snippet.text
    (fsdp2,) = section(page, "yaml")
    Path("data/train.json").write_text(json.dumps([json.loads(written.pop("row"))]), encoding="utf-8")
    for name, text in {**written, "fsdp2.yaml": fsdp2.text, "tools.json": "{}"}.items():
        Path(name).write_text(text, encoding="utf-8")
    (command,) = (snippet.text for snippet in section(page, "bash") if "model.json" in snippet.text)
    for said, instead in SMALLEST.items():
        if said not in command:
            sys.exit(f"{page.name}: the command has no '{said}' any more: change SMALLEST in scripts/run_docs.py")
        command = command.replace(said, instead)
    output = run(["bash", "-c", command], page)
    for sign in ("done: 2 iterations", "iteration        1/       2"):
        if sign not in output:
            sys.exit(f"{page.name}: the run has not said '{sign}':\n{output}")
    for snippet in section(page, "python"):
        exec(compile(snippet.text, snippet.place, "exec"), {"__name__": snippet.place})
    print(f"{page.name}: its own model trains")


def run(words: list[str], page: Path) -> str:
    """Run a command here; it ends this program if it fails. Returns what was said."""
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MM_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.exit(f"{page.name}: {words[-1]}\n{done.stdout}\nended with status {done.returncode}")
    return done.stdout


def convert(page: Path) -> None:
    """Run the commands of `mm-convert` that fit the run folder."""
    from mindspeed_mm.tools.convert import main

    for snippet in section(page, "bash"):
        for line in snippet.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["mm-convert"] or any(word in LEFT_OUT for word in words):
                continue
            shutil.rmtree("out", ignore_errors=True)
            words = [PLACES.get(word, word) for word in words]
            with redirect_stdout(io.StringIO()):
                status = main(words[1:])
            if status:
                sys.exit(f"{page.name}: '{' '.join(words)}' has failed")
    print(f"{page.name}: its commands convert")


def main() -> None:
    """Follow both README files, then convert."""
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        os.chdir(folder)
        write_model()
        for page in (ROOT / "README.zh.md", ROOT / "README.md"):
            shutil.rmtree("runs", ignore_errors=True)
            follow(page)
        convert(ROOT / "docs" / "checkpoints.md")
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
