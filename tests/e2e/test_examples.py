"""examples/<family>: the files are what the schemas take, the scripts' flags too, and runs of them train.

A script runs with a launcher that only writes down its words; what it wrote is then read, or run by workers that are
there already. Its own variables exchange the directory, the rows and the run folder. Examples that don't source
`examples/common.sh` have tests of their own.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mindspeed_mm.configs.arguments import parse_args, validate_args
from mindspeed_mm.configs.config import merge_mm_args
from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.fsdp2_config import load_fsdp2_config
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.paths import find_modules
from mindspeed_mm.models.transformers.inferred import traits_of
from mindspeed_mm.models.transformers.meta_model import build_meta_model, config_for
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.utils.log import logger
from tests.parity.test_families import load_all
from tests.support.families import Family, families
from tests.support.family_case import write_rows
from tests.support.launch import ROOT, run_entry
from tests.support.workers import RankPool

EXAMPLES = ROOT / "examples"
COMMON = "source examples/common.sh"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*/*.sh") if COMMON in path.read_text(encoding="utf-8"))
NAMES = [f"{path.parent.name}/{path.name}" for path in SCRIPTS]
FOLDERS = sorted({path.parent for path in SCRIPTS})
FAMILIES = families()
#: script → the families that it trains: the one of its default directory, then others that its README speaks of
TRAINED = {
    "deepseekv3/finetune_deepseek_v3_671b.sh": ("deepseek_v3",),
    "deepseekvl/finetune_deepseek_vl_1_3b.sh": ("deepseek_vl",),
    "deepseekvl/finetune_deepseek_vl_7b.sh": ("deepseek_vl_hybrid",),
    "gemma3/finetune_gemma3_4b.sh": ("gemma3",),
    "glm4.1v/finetune_glm4_1v_9b.sh": ("glm4v",),
    "glm4.5v/finetune_glm4_5v_106b.sh": ("glm4v_moe",),
    "gptoss/finetune_gpt_oss_20b.sh": ("gpt_oss",),
    "internvl3.5/finetune_internvl3_5_30b.sh": ("internvl_moe",),
    "internvl3.5/finetune_internvl3_5_8b.sh": ("internvl",),
    "llama3/finetune_llama3_8b.sh": ("llama", "qwen2", "mixtral", "gemma3_text"),
    "llava1.5/finetune_llava1_5_7b.sh": ("llava", "llava_next"),
    "llava_onevision/finetune_llava_onevision_7b.sh": ("llava_onevision",),
    "magistral-2509/finetune_magistral_2509_24b.sh": ("mistral3",),
    "qwen2.5omni/finetune_qwen2_5_omni_7b.sh": ("qwen2_5_omni",),
    "qwen2audio/finetune_qwen2_audio_7b.sh": ("qwen2_audio",),
    "qwen2vl/finetune_qwen2_vl_2b.sh": ("qwen2_vl",),
    "qwen2vl/finetune_qwen2_vl_7b.sh": ("qwen2_vl",),
    "qwen3asr/finetune_qwen3_asr_1_7b.sh": ("qwen3_asr",),
    "qwen3moe/finetune_qwen3_moe_30b.sh": ("qwen3_moe",),
    "qwen3omni/finetune_qwen3_omni_30b.sh": ("qwen3_omni_moe",),
    "qwen3vl/finetune_qwen3_vl_30b.sh": ("qwen3_vl_moe",),
    "qwen3vl/finetune_qwen3_vl_8b.sh": ("qwen3_vl",),
    "whisper/finetune_whisper_large_v3.sh": ("whisper",),
}
#: of these a run is part of every test run; the others are run by `pytest -m full`
RUN_ALWAYS = {
    "llama3/finetune_llama3_8b.sh",
    "qwen3omni/finetune_qwen3_omni_30b.sh",
}
_OWN = ("NNODES", "NODE_RANK", "NPUS_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "MM_DATA", "MM_MODEL", "MM_TOOL")
_OWN += ("HF_PATH", "DATA_PATH", "LOAD_PATH", "SAVE_PATH", "FSDP2_PATH", "TRAIN_ITERS", "VP_SIZE", "WORLD_SIZE")
_OWN += ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_TOWERS = {"vision_encoder": r"visual\.|vision_tower\.|vision_model\.", "audio_encoder": r"audio_tower\."}
_LAUNCHER = '#!/bin/sh\nprintf "%s\\n" "$@" > "$LAUNCHED"\n'
#: `mindspeed-mm train`, and for all other words the interpreter
_PYTHON = f"""#!/bin/sh
[ "$2 $3" = "mindspeed_mm.tools.cli train" ] || exec {sys.executable} "$@"
shift 3
printf "%s\\n" "$@" > "$LAUNCHED"
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record.getMessage()))
    return lines


@dataclass(frozen=True)
class Launched:
    """What a script would have launched.

    Attributes:
        own: words before the entry script, torchrun's own.
        entry: the entry script.
        words: its words.
    """

    own: list[str]
    entry: str
    words: list[str]

    def own_value(self, flag: str) -> str:
        return self.own[self.own.index(flag) + 1]


@functools.cache
def workspace() -> Path:
    folder = tempfile.mkdtemp(prefix="examples-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def directory_of(family: str) -> Path:
    """A tiny directory of the family, with weights."""
    path = workspace() / "hf" / family
    path.mkdir(parents=True)
    return FAMILIES[family].make(path)


@functools.cache
def model_of(family: str) -> Any:
    """Its model, on meta."""
    hf_config = AutoConfig.from_pretrained(directory_of(family))
    model_class = ModelHub.get(None, hf_config)
    return build_meta_model(model_class, config_for(model_class, hf_config))


@functools.cache
def rows_of(family: str) -> Path:
    """Its rows: with media of all its kinds, and with none."""
    return write_rows(workspace() / "rows" / family, FAMILIES[family])


def launched(script: str, folder: Path, *words: str, **variables: str) -> Launched:
    """Run a script with a torchrun, and a `mindspeed-mm train`, that only writes down its words."""
    programs, record = folder / "bin", folder / "launched"
    programs.mkdir(exist_ok=True)
    for name, text in (("torchrun", _LAUNCHER), ("python", _PYTHON)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    python = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if name not in _OWN}
    path = os.pathsep.join([str(programs), str(python), os.environ["PATH"]])
    environment = {**kept, "PATH": path, "VIRTUAL_ENV": str(python.parent), "LAUNCHED": str(record)}
    command = ["bash", str(EXAMPLES / script), *words]
    done = subprocess.run(
        command, env={**environment, "MM_DEVICE": "cpu", **variables}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = record.read_text().splitlines()
    entry = next(i for i, word in enumerate(found) if word.endswith(".py"))
    return Launched(found[:entry], found[entry], found[entry + 1 :])


def tiny_variables(family: str, folder: Path) -> dict[str, str]:
    """The script's variables for the tiny directory and its rows."""
    return {"HF_PATH": str(directory_of(family)), "DATA_PATH": str(rows_of(family)), "SAVE_PATH": str(folder / "run")}


def described(words: list[str], world_size: int) -> Namespace:
    args = parse_args(words)
    merge_mm_args(args)
    validate_args(args, world_size)
    return args


def default_of(script: Path, variable: str) -> str:
    """The default that a script gives to a variable."""
    found = re.search(rf"^{variable}=\$\{{{variable}:-(.*)\}}$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, (script, variable)
    return found[1]


def frozen_parts(folder: Path) -> list[str]:
    """Published names of the parts that model.json freezes."""
    model = TransformersModelConfig.from_dict(read_json(folder / "model.json"))
    parts = ("vision_encoder", "vision_projector", "audio_encoder", "text_decoder")
    return [part for part in parts if getattr(model, f"freeze_{part}")]


def media_columns(folder: Path) -> list[str]:
    """Columns of media that data.json names."""
    attr = DataConfig.from_dict(read_json(folder / "data.json")).dataset_param.attr
    return [column for column in ("images", "videos", "audios") if getattr(attr, column)]


def table() -> str:
    """The table of examples/README.md, from the folders."""
    lines = ["| folder | script | directory in `ckpt/hf_path/` | media | frozen |", "|---|---|---|---|---|"]
    for script in SCRIPTS:
        folder = script.parent
        media = ", ".join(media_columns(folder)) or "none"
        frozen = ", ".join(part.replace("_", " ") for part in frozen_parts(folder)) or "nothing"
        name = default_of(script, "HF_PATH").removeprefix("./ckpt/hf_path/")
        lines.append(f"| [{folder.name}]({folder.name}) | `{script.name}` | `{name}` | {media} | {frozen} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_that_of_the_folders() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert table() in text, f"write into examples/README.md:\n{table()}"
    folders = [path.name for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.sh"))]
    assert [name for name in folders if f"({name})" not in text] == []


def test_every_script_is_tried_here() -> None:
    assert set(NAMES) == set(TRAINED)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_files_are_taken_without_a_word(folder: Path, said: list[str]) -> None:
    """model.json, data.json and fsdp2 files through their schemas; both paths are that of one script."""
    model = TransformersModelConfig.from_dict(read_json(folder / "model.json"))
    data = DataConfig.from_dict(read_json(folder / "data.json"))
    for file in folder.glob("fsdp2_config*.yaml"):
        assert load_fsdp2_config(file).use_reentrant is False
    assert said == []
    scripts = [script for script in SCRIPTS if script.parent == folder]
    assert model.init_from_hf_path == data.dataset_param.preprocess_parameters.model_name_or_path
    assert model.init_from_hf_path in [default_of(script, "HF_PATH") for script in scripts]
    assert data.dataset_param.basic_parameters.dataset == [default_of(scripts[0], "DATA_PATH")]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_short_and_its_readme_names_it(name: str) -> None:
    script = EXAMPLES / name
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50 and os.access(script, os.X_OK)
    readme = (script.parent / "README.md").read_text(encoding="utf-8")
    assert script.name in readme
    for path in re.findall(r"examples/[\w./-]+\w", readme):
        assert (ROOT / path).exists(), path


@functools.cache
def launched_once(name: str) -> Launched:
    """A script's launch, with its variables exchanged and flags of the user's own behind the script's."""
    folder = workspace() / "launched" / name.replace("/", "-")
    folder.mkdir(parents=True)
    return launched(name, folder, "--lr", "3e-5", "--min-lr", "0", **tiny_variables(TRAINED[name][0], folder))


@pytest.mark.parametrize("name", NAMES)
def test_flags_parse(name: str, said: list[str]) -> None:
    family, found = TRAINED[name][0], launched_once(name)
    assert found.own_value("--nproc_per_node") == "2" and found.own_value("--nnodes") == "1"
    assert found.entry == "pretrain_transformers.py" and (ROOT / found.entry).is_file()
    args = in_root(described, found.words, 2)
    assert (args.lr, args.min_lr) == (3e-5, 0.0)
    assert args.save == str(workspace() / "launched" / name.replace("/", "-") / "run")
    assert args.mm.model.init_from_hf_path == str(directory_of(family))
    basic = args.mm.data.dataset_param.basic_parameters
    assert (basic.dataset, basic.dataset_dir) == (str(rows_of(family)), str(rows_of(family).parent))
    assert args.num_microbatches * args.micro_batch_size * 2 == args.global_batch_size
    assert said == []


@pytest.mark.parametrize("name", NAMES)
def test_wrap_and_recompute_lists_expand(name: str, said: list[str]) -> None:
    """Every path as written, in every family that the script trains; the units hold all blocks."""
    words = launched_once(name).words
    config = load_fsdp2_config(ROOT / words[words.index("--fsdp2-config-path") + 1])
    for family in TRAINED[name]:
        model = model_of(family)
        wrapped = find_modules(model, config.sub_modules_to_wrap or (), where=name)
        assert set(find_modules(model, FAMILIES[family].wrap, where=name)) <= set(wrapped)
        recomputed = find_modules(model, config.recompute_modules or (), where=name)
        assert recomputed and set(recomputed) <= set(wrapped)
        assert set(frozen_parts((EXAMPLES / name).parent)) <= set(traits_of(model).parts)
    assert said == []


def test_variables_of_the_environment_reach_the_launch(tmp_path: Path) -> None:
    name = "llama3/finetune_llama3_8b.sh"
    variables = {**tiny_variables("llama", tmp_path), "LOAD_PATH": str(tmp_path / "earlier"), "TRAIN_ITERS": "11"}
    variables |= {"NPUS_PER_NODE": "4", "NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "there", "MASTER_PORT": "7"}
    variables |= {"TP": "2", "CP": "2", "EP": "4"}
    (tmp_path / "earlier").mkdir()
    found = launched(name, tmp_path, **variables)
    assert " ".join(found.own) == "--nproc_per_node 4 --nnodes 3 --node_rank 2 --master_addr there --master_port 7"
    args = in_root(described, found.words, 12)
    assert (args.train_iters, args.load, args.data_parallel_size) == (11, variables["LOAD_PATH"], 3)
    sizes = (args.tensor_model_parallel_size, args.context_parallel_size, args.expert_model_parallel_size)
    assert sizes == (2, 2, 4)
    assert (tmp_path / "run/train_rank2.log").is_file()


@pytest.mark.parametrize("device, variable", [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")])
def test_a_process_for_each_visible_device(device: str, variable: str, tmp_path: Path) -> None:
    variables = {**tiny_variables("llama", tmp_path), "MM_DEVICE": device, variable: "4,5,7"}
    found = launched("llama3/finetune_llama3_8b.sh", tmp_path, **variables)
    assert found.own_value("--nproc_per_node") == "3"


def in_root(function: Any, *arguments: Any) -> Any:
    """Call a function in the checkout's root, where a script launches."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        return function(*arguments)
    finally:
        os.chdir(before)


def launch(words: list[str], entry: str) -> None:
    """What torchrun would run."""
    in_root(run_entry, words, entry)


@pytest.mark.parametrize(
    "name, family",
    [
        pytest.param(name, family, marks=[] if name in RUN_ALWAYS and number == 0 else [pytest.mark.full])
        for name, trained in TRAINED.items()
        for number, family in enumerate(trained)
    ],
)
def test_two_steps(name: str, family: str, ranks2: RankPool, tmp_path: Path) -> None:
    """The tiny directory trains, by the example's own files, and what comes out loads."""
    settings = {"train-iters": 2, "lr-warmup-fraction": 0, "num-workers": 0, **run_settings(FAMILIES[family])}
    words = [word for flag, value in settings.items() for word in (f"--{flag}", str(value))]
    found = launched(name, tmp_path, *words, **tiny_variables(family, tmp_path))
    ranks2.run(launch, found.words, found.entry, timeout=170)
    run = tmp_path / "run"
    steps = read_metrics(run / "metrics.jsonl")
    assert [step["iteration"] for step in steps] == [1, 2]
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    assert_only_trained_parts_changed(name, family, run / "hf")


def run_settings(family: Family) -> Mapping[str, Any]:
    """Two steps take all eight rows, with media and without, one by one; or packs of rows, where data.json says so."""
    return {"global-batch-size": 4, "micro-batch-size": 1, "seq-length": 256 if family.packs else 64}


def assert_only_trained_parts_changed(name: str, family: str, exported: Path) -> None:
    """The export has the directory's names; weights of frozen towers are as they were, others aren't."""
    before, after = load_all(directory_of(family)), load_all(exported)
    assert before.keys() == after.keys()
    changed = {key for key, tensor in before.items() if not torch.equal(tensor, after[key])}
    frozen = [_TOWERS[part] for part in frozen_parts((EXAMPLES / name).parent) if part in _TOWERS]
    towers = {key for key in before if any(re.search(tower, key) for tower in frozen)}
    assert changed and changed.isdisjoint(towers)
    assert bool(towers) == bool(frozen)
