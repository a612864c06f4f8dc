"""What the start of a run must not import: it would be paid by every process of every run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = (
    *("av", "diffusers", "jsonargparse", "matplotlib", "megatron.core", "pandas"),
    *("pyarrow", "rich", "sklearn", "tensorboard", "torch", "transformers"),
    *("mlflow", "swanlab", "trackio", "wandb"),
    *("mindspeed_mm.configs.generation_data", "mindspeed_mm.configs.sora_config", "mindspeed_mm.data.generation"),
)
CODE = """
import sys
import pretrain_transformers
models = [n for n in sys.modules if n.startswith("mindspeed_mm.models.transformers.")]
families = [n for n in models if sys.modules[n].__package__ == n]
print([name for name in {elsewhere} if name in sys.modules], families)
"""


def test_an_entry_script_imports_no_reader_no_other_backend_and_no_family() -> None:
    """Readers of media and tables, generation's library and families come when a run's files name them."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(elsewhere=ELSEWHERE)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[-2] == "[] []"


#: entry script → words of a launch; model.json and data.json are there
LAUNCHES = {
    "pretrain_vlm.py": "--mm-model model.json --mm-data data.json --use-torch-fsdp2",
    "pretrain_transformers.py": "--mm-model model.json --mm-data data.json",
    "pretrain_sora.py": "--mm-model model.json --mm-data data.json",
    "inference_sora.py": "--mm-model model.json",
    "inference_vlm.py": "--mm-model model.json --prompt hello",
    "evaluate_vlm.py": "--mm-model model.json --benchmark mmmu --data-path data.json --output out",
    "evaluate_gen.py": "--features-a model.json --features-b data.json",
    "mindspeed_mm/tools/feature_extraction/get_wan_feature.py": "--mm-model model.json --mm-data data.json --output o",
}
ROWS: dict[str, dict[str, object]] = {
    "huggingface": {
        "basic_parameters": {"dataset": "rows.json"},
        "preprocess_parameters": {"model_name_or_path": "."},
    },
    "t2v": {"basic_parameters": {"data_path": "rows.jsonl"}},
}
RUN = """
import json, os, runpy, sys
os._exit = sys.exit  # errors of training end the process so
script, launches = sys.argv[1], json.loads(sys.argv[2])
for words in launches:
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        assert error.code == 1, error.code
print([name for name in ("torch", "transformers", "diffusers", "numpy") if name in sys.modules])
"""


@pytest.mark.parametrize("script", LAUNCHES)
def test_a_wrong_launch_is_reported_before_torch_is_imported(script: str, tmp_path: Path) -> None:
    """A wrong flag, a missing file, a wrong key."""
    kind = "t2v" if "vlm" not in script and "transformers" not in script else "huggingface"
    model = {"init_from_hf_path": "."} if kind == "huggingface" else {"predictor": {"model_id": "wan"}}
    (tmp_path / "model.json").write_text(json.dumps({**model, "predictorz": {}}))
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": {"dataset_type": kind, **ROWS[kind]}}))
    words = LAUNCHES[script].split()
    if script.startswith("pretrain"):
        words += ["--micro-batch-size", "1", "--lr", "1", "--train-iters", "1"]
    wrong = {
        "unknown flag '--sede'": [*words, "--sede", "1"],
        "gone.json does not exist": ["gone.json" if word == "model.json" else word for word in words],
        "unknown key 'predictorz'": words,
    }
    if script == "evaluate_gen.py":  # it reads no model.json
        del wrong["unknown key 'predictorz'"]
    command = [sys.executable, "-c", RUN, str(ROOT / script), json.dumps(list(wrong.values()))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert [sentence for sentence in wrong if sentence not in done.stderr] == [], done.stderr
