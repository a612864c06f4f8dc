"""Train a tiny model from an installed wheel, outside the checkout.

    python scripts/check_wheel.py

The package is built from a copy of what a wheel is made of and installed with `pip install --no-deps --target`; the
folder of the run contains neither the checkout nor its entry scripts. A vision-language model trains two steps on
images.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("mindspeed_mm", "pyproject.toml", "setup.py", "README.md", "LICENSE")
STEPS = 2

#: creates the model, its data and the files of the run in the working folder
PREPARE = """
import json
from pathlib import Path

from PIL import Image

import mindspeed_mm
from mindspeed_mm.tools import tiny_models

print(mindspeed_mm.__file__)
here = Path.cwd()
tokenizer = tiny_models.build_byte_bpe_tokenizer(["red green blue"] * 9, 320, here / "hf")
tiny_models.build_qwen2_5_vl_processor(tokenizer, here / "hf")
tiny_models.save_model_dir(tiny_models.qwen2_5_vl_config(tokenizer), tokenizer, here / "hf", 0)
colours = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
rows = []
for name, colour in colours.items():
    Image.new("RGB", (56, 56), colour).save(here / f"{name}.png")
    talk = [{"role": "user", "content": "<image>Which colour?"}, {"role": "assistant", "content": name}]
    rows.append({"messages": talk, "images": [f"{name}.png"]})
Path("rows.json").write_text(json.dumps(rows))
Path("model.json").write_text(json.dumps({"init_from_hf_path": "hf"}))
param = {
    "dataset_type": "huggingface",
    "basic_parameters": {"dataset": "rows.json", "dataset_dir": "."},
    "preprocess_parameters": {"model_name_or_path": "hf"},
    "attr": {"messages": "messages", "images": "images", "role_tag": "role", "content_tag": "content",
             "user_tag": "user", "assistant_tag": "assistant"},
}
Path("data.json").write_text(json.dumps({"dataset_param": param, "dataloader_param": {}}))
"""
TRAIN = [
    *("--use-torch-fsdp2", "--mm-model", "model.json", "--mm-data", "data.json", "--save", "run"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", str(STEPS), "--lr", "1e-3"),
    *("--num-workers", "0", "--distributed-backend", "gloo", "--save-hf"),
]


def run(words: list[str], folder: Path, **variables: str) -> str:
    """Run a command in a folder and return its output; a failure ends this program."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **variables}
    done = subprocess.run(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(words[:4])} … ended with status {done.returncode}")
    return done.stdout


def main() -> None:
    """Build, install, train."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        folder = Path(name)
        copy, installed, elsewhere = folder / "source", folder / "installed", folder / "elsewhere"
        copy.mkdir()
        elsewhere.mkdir()
        for source in map(ROOT.joinpath, SOURCES):
            if source.is_dir():
                shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        install = ["install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *install]
        run([*pip, "--target", str(installed), str(copy)], folder)
        missing = [
            str(file.relative_to(copy))
            for file in (copy / "mindspeed_mm").rglob("*")
            if file.is_file() and not (installed / file.relative_to(copy)).is_file()
        ]
        if missing:
            sys.exit(f"the wheel lacks {', '.join(missing)}: see package-data in pyproject.toml")
        shutil.rmtree(copy)
        where = {"PYTHONPATH": str(installed), "MM_DEVICE": "cpu"}
        came_from = run([sys.executable, "-c", PREPARE], elsewhere, **where).splitlines()[0]
        if not came_from.startswith(str(installed)):
            sys.exit(f"the run would import {came_from}, not what was installed into {installed}")
        output = run([sys.executable, "-m", "mindspeed_mm.entry.pretrain_vlm", *TRAIN], elsewhere, **where)
        if f"done: {STEPS} iterations" not in output or not (elsewhere / "run/hf/config.json").is_file():
            sys.exit(f"{output}\nthe run has not trained and exported a model")
    print("a model trains from the installed wheel")


if __name__ == "__main__":
    main()
