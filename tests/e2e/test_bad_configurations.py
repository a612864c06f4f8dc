"""Bad configurations, run as a user runs them: each ends at once with a non-zero status and the right last lines.

Each runs the entry script in a process forked from a server that has torch imported; `-m full` starts each by
`mindspeed-mm train`, too, of which the sentence is all there is. A few are commands of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, WRAP, launch_flags, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.workers import RankError, run_ranks

LAST_LINES = 5  # of stderr
LAST_LINES_OF_TORCHRUN = 40
SECONDS = 20.0  # a case needs under one on an idle machine
SECONDS_OF_TRAIN = 100.0
LINES_OF_TRAIN = 3
LAUNCHERS = {
    "python": [],
    "early": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "late": ["-m", "mindspeed_mm.tools.cli", "train", "--nproc-per-node", "2"],
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass
class Run:
    """A good run's files in a folder of their own; a case spoils one thing."""

    folder: Path
    files: dict[str, Path]
    flags: dict[str, Any] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)
    script: str = "pretrain_transformers.py"
    how: str = "entry"
    processes: int = 2  # of mindspeed-mm train; 1 where the case says so, or is about their number

    def words(self) -> list[str]:
        settings = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 1, "save": self.folder / "run"}
        return [*launch_flags(self.files, **{**settings, **self.flags}), *self.more]

    def edit(self, name: str, path: str, value: Any) -> None:
        """Set a dotted key of a JSON file."""
        content = json.loads(self.files[name].read_text())
        *parents, last = path.split(".")
        place = content
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
        self.files[name].write_text(json.dumps(content))

    def append(self, name: str, text: str) -> None:
        with open(self.files[name], "a") as f:
            f.write(text)

    def rows(self, change: Callable[[list[dict[str, Any]]], Any]) -> None:
        """Change the data file's rows."""
        path = self.folder / "data/data.json"
        rows = json.loads(path.read_text())
        change(rows)
        path.write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory and data, to copy."""
    folder = tmp_path_factory.mktemp("good")
    tiny_qwen2_5_vl_dir(folder / "hf")
    write_mixed_dataset(folder / "data", rows=6, seed=1)
    return folder


def copy_of(good: Path, folder: Path) -> Run:
    shutil.copytree(good, folder, dirs_exist_ok=True)
    files = write_run_files(folder, folder / "hf", folder / "data/data.json", fsdp2={"sub_modules_to_wrap": WRAP})
    return Run(folder, files)


@pytest.fixture(params=["entry", pytest.param("train", marks=pytest.mark.full)])
def run(good: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    made = copy_of(good, tmp_path)
    made.how = request.param
    return made


@pytest.fixture
def megatron_run(run: Run) -> Run:
    """The same run on the Megatron backend."""
    run.script = "pretrain_vlm.py"
    run.flags |= {"use_torch_fsdp2": None, "fsdp2_config_path": None}
    return run


def run_with_stderr(words: list[str], script: str, errors: str) -> None:
    """The entry script, its stderr in a file of its own; an uncaught exception ends it as Python would."""
    import traceback

    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    try:
        run_entry(words, script)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def last_lines(text: str, number: int) -> str:
    return "\n".join(text.rstrip().splitlines()[-number:])


def assert_refused(run: Run, *said: str) -> None:
    """The launch ends with status 1, and its last lines hold all of `said`."""
    if run.how == "train":
        assert_one_sentence(run, *said)
        return
    errors = run.folder / "stderr.txt"
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 0 died with exit code 1"):
        run_ranks(run_with_stderr, 1, run.words(), run.script, str(errors), timeout=SECONDS)
    text = errors.read_text()
    assert time.monotonic() - started < SECONDS
    end = last_lines(text, LAST_LINES)
    for part in said:
        assert part in end, f"'{part}' is not in:\n{end}"
    assert "Traceback" not in text


def assert_one_sentence(run: Run, *said: str) -> None:
    """`mindspeed-mm train` ends with status 1 and says all of `said`, once, and nothing else on stderr."""
    words = [*LAUNCHERS["late"][:-1], str(run.processes), str(ROOT / run.script), *run.words()]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS_OF_TRAIN
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 1 and 1 <= len(lines) <= LINES_OF_TRAIN, done.stderr
    for part in said:
        assert part in done.stderr, f"'{part}' is not in:\n{done.stderr}"
    for word in ("Traceback", "Warning", lines[0]):
        assert word not in done.stdout


def test_the_good_run_is_good(run: Run) -> None:
    """Every case below spoils one thing of a run that works."""
    if run.how == "train":
        return
    run_ranks(run_entry, 1, run.words(), timeout=60)
    assert (run.folder / "run/latest_checkpointed_iteration.txt").read_text() == "1"


# --- keys and flags


def test_typo_in_model_json(run: Run) -> None:
    run.edit("model.json", "train_from_scrach", True)
    assert_refused(
        run, "ConfigError", "model.json", "unknown key 'train_from_scrach'", "did you mean 'train_from_scratch'"
    )


def test_typo_in_data_json(run: Run) -> None:
    key = "dataset_param.basic_parameters.dataset_dirr"
    run.edit("data.json", key, "x")
    assert_refused(run, "data.json", f"unknown key '{key}'", "did you mean 'dataset_dir'")


def test_typo_in_tools_json(run: Run) -> None:
    run.edit("tools.json", "profile.enabel", True)
    assert_refused(run, "tools.json", "unknown key 'profile.enabel'", "did you mean 'enable'")


def test_typo_in_fsdp2_yaml(run: Run) -> None:
    run.append("fsdp2.yaml", "recompute_module:\n  - model.visual.blocks.{*}\n")
    assert_refused(run, "fsdp2.yaml", "unknown key 'recompute_module'", "did you mean 'recompute_modules'")


def test_typo_in_a_flag(run: Run) -> None:
    run.more = ["--micro-batchsize", "1"]
    assert_refused(run, "unknown flag '--micro-batchsize'; did you mean '--micro-batch-size'")


def test_typos_in_two_places_are_said_together(run: Run) -> None:
    run.edit("model.json", "modelid", "qwen3")
    run.edit("data.json", "dataloader_param.shufle", True)
    assert_refused(
        run, "unknown key 'modelid'", "'model_id'", "unknown key 'dataloader_param.shufle'", "did you mean 'shuffle'"
    )


def test_wrong_type_in_fsdp2_yaml(run: Run) -> None:
    run.append("fsdp2.yaml", "offload_to_cpu: maybe\n")
    assert_refused(run, "fsdp2.yaml: 'offload_to_cpu' is 'maybe'", "expected true or false")


def test_wrong_type_in_model_json(run: Run) -> None:
    run.edit("model.json", "loss_cfg", {"chunk_size": "many", "compute_mode": "chunk"})
    assert_refused(run, "model.json: 'loss_cfg.chunk_size' is 'many'", "expected a whole number")


def test_wrong_choice_in_model_json(run: Run) -> None:
    run.edit("model.json", "loss_cfg", {"loss_type": "per_tokn_loss"})
    assert_refused(run, "model.json: 'loss_cfg.loss_type' is 'per_tokn_loss'", "per_token_loss")


def test_wrong_type_of_a_flag(run: Run) -> None:
    run.flags["lr"] = "fast"
    assert_refused(run, "--lr", "'fast'", "expected a number")


def test_paths_written_as_text(run: Run) -> None:
    run.append("fsdp2.yaml", "ignored_modules: model.visual\n")
    assert_refused(run, "fsdp2.yaml: 'ignored_modules' is 'model.visual'", "expected a list of module paths")


# --- files


def test_json_that_cannot_be_parsed(run: Run) -> None:
    run.files["model.json"].write_text('{\n  "init_from_hf_path": "x",\n  "train_from_scratch": True\n}\n')
    assert_refused(run, "model.json, line 3, column 25: not JSON")


def test_yaml_that_cannot_be_parsed(run: Run) -> None:
    run.files["fsdp2.yaml"].write_text("sharding_size: auto\nsub_modules_to_wrap:\n  - a: [\n")
    assert_refused(run, "fsdp2.yaml, line 4, column 1: not YAML")


def test_no_model_json(run: Run) -> None:
    run.flags["mm_model"] = run.folder / "modle.json"
    assert_refused(run, "--mm-model", "modle.json", "does not exist", "model.json")


def test_no_data_file(run: Run) -> None:
    run.edit("data.json", "dataset_param.basic_parameters.dataset", str(run.folder / "data/dota.json"))
    assert_refused(run, "DataError", "data file not found", "data/dota.json", "'data.json'")


def test_no_image(run: Run) -> None:
    def rename(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["images"])["images"][0] = "images/nowhere.png"

    run.rows(rename)
    assert_refused(run, "DataError", "data.json", "row ", "images/nowhere.png", str(run.folder / "data"))


def test_no_hf_directory(run: Run) -> None:
    run.edit("model.json", "init_from_hf_path", str(run.folder / "hff"))
    assert_refused(run, "model.json", "'init_from_hf_path'", "hff", "does not exist")


def test_no_config_in_the_hf_directory(run: Run) -> None:
    (run.folder / "hf/config.json").unlink()
    assert_refused(run, "config.json", str(run.folder / "hf"))


def test_no_weights(run: Run) -> None:
    (run.folder / "hf/model.safetensors").unlink()
    assert_refused(run, "CheckpointError", str(run.folder / "hf"), "*.safetensors", '"train_from_scratch": true')


def test_no_tokenizer(run: Run) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run.folder / "hf" / name).unlink()
    assert_refused(run, "tokenizer", str(run.folder / "hf"))


def test_load_from_nowhere(run: Run) -> None:
    run.flags["load"] = run.folder / "earlier"
    assert_refused(run, "--load", str(run.folder / "earlier"), "does not exist")


def test_a_file_above_the_run_folder(run: Run) -> None:
    """Told before weights are looked for."""
    (run.folder / "hf/model.safetensors").unlink()
    (run.folder / "runs").write_text("")
    run.flags["save"] = run.folder / "runs/mine"
    place = run.folder / "runs"
    assert_refused(run, f"--save '{place}/mine' can't be written: '{place}' is a file, expected a folder")


# --- what doesn't fit the model or the ranks


def test_a_pattern_that_matches_nothing(run: Run) -> None:
    run.append("fsdp2.yaml", "recompute_modules:\n  - model.language_model.layer.{*}\n")
    pattern = "'model.language_model.layer.{*}'"
    assert_refused(
        run,
        "fsdp2.yaml: recompute_modules",
        f"{pattern} matches nothing",
        "did you mean 'model.language_model.layers.{*}'",
    )


def test_an_index_out_of_range(run: Run) -> None:
    run.append("fsdp2.yaml", "recompute_modules:\n  - model.language_model.layers.{0-23}\n")
    assert_refused(run, "fsdp2.yaml: recompute_modules", "layers.{0-23}", "index 2", "has 2 elements (0-1)")


def test_a_path_of_the_outer_model(run: Run) -> None:
    """Paths are relative to the HF model."""
    run.append("fsdp2.yaml", "ignored_modules:\n  - model.model.visual\n")
    assert_refused(run, "fsdp2.yaml: ignored_modules", "'model.model.visual' matches nothing", "'model' has no 'model'")


def test_sharding_size_that_does_not_divide(run: Run) -> None:
    run.processes = 1
    run.files["fsdp2.yaml"].write_text("sharding_size: 4\n")
    assert_refused(run, "fsdp2.yaml: sharding_size is 4", "data-parallel size 1", "valid here: auto, 1")


def test_global_batch_that_does_not_divide(run: Run) -> None:
    run.processes = 1
    run.flags |= {"micro_batch_size": 4, "global_batch_size": 6}
    assert_refused(run, "--global-batch-size 6", "--micro-batch-size 4", "nearest valid: 4 or 8")


def test_more_rows_than_there_are(run: Run) -> None:
    run.flags["global_batch_size"] = 8
    assert_refused(run, "DataError", "6 row(s)", "one global batch of 8", "at most 6", "drop_last to false")


def test_expert_parallelism(run: Run) -> None:
    run.processes = 1
    run.append("fsdp2.yaml", "expert_parallel_size: 2\n")
    assert_refused(run, "expert_parallel_size is 2, which does not divide the 1 process", "valid here: 1")


def test_everything_frozen(run: Run) -> None:
    frozen = {"freeze": True}
    run.edit("model.json", "image_encoder", {"vision_encoder": frozen, "vision_projector": frozen})
    run.edit("model.json", "text_decoder", frozen)
    assert_refused(run, "model.json: everything is frozen", "vision_encoder", "text_decoder")


# --- names


def test_unknown_model_id(run: Run) -> None:
    run.edit("model.json", "model_id", "qwen2_5_vlm")
    assert_refused(run, "model.json: model_id 'qwen2_5_vlm'", "did you mean 'qwen2_5_vl'")


def test_unknown_sampler(run: Run) -> None:
    run.edit("data.json", "dataloader_param.sampler_type", "BaseRandomSampler")
    assert_refused(run, "data.json: 'dataloader_param.sampler_type' is 'BaseRandomSampler'", "'BaseRandomBatchSampler'")


def test_unknown_template(run: Run) -> None:
    run.edit("data.json", "dataset_param.basic_parameters.template", "qwen2_vlm")
    assert_refused(run, "template", "'qwen2_vlm'", "qwen2_vl")


def test_unknown_plugin(run: Run) -> None:
    run.edit("model.json", "plugin", ["my.own_module"])
    assert_refused(run, "model.json: plugin 'my.own_module' can't be imported", "PYTHONPATH")


# --- rows


def test_wrong_column_names(run: Run) -> None:
    run.edit("data.json", "dataset_param.attr.messages", "conversations")
    assert_refused(run, "DataError", "data/data.json", "'conversations'", "messages", "images")


def test_more_images_than_tags(run: Run) -> None:
    def add(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if len(row["images"]) == 1)
        row["images"] *= 2

    run.rows(add)
    assert_refused(run, "DataError", "data/data.json", "row ", "1 <image>", "2 image(s)")


# --- the Megatron backend


def test_the_megatron_backend_of_a_script_that_has_none(megatron_run: Run) -> None:
    megatron_run.processes = 1
    megatron_run.script = "pretrain_transformers.py"
    assert_refused(megatron_run, "--use-torch-fsdp2 is missing", "starts from pretrain_vlm.py")


def test_more_ranks_for_a_model_than_processes(megatron_run: Run) -> None:
    megatron_run.processes = 1
    megatron_run.flags["tensor_model_parallel_size"] = 2
    assert_refused(megatron_run, "1 process can't be split into groups of 2", "--tensor-model-parallel-size 2")


def test_virtual_stages_without_stages(megatron_run: Run) -> None:
    megatron_run.processes = 1
    megatron_run.flags["virtual_pipeline_model_parallel_size"] = 2
    assert_refused(megatron_run, "--virtual-pipeline-model-parallel-size 2 needs --pipeline-model-parallel-size 2")


def test_typo_in_model_json_of_the_megatron_backend(megatron_run: Run) -> None:
    megatron_run.edit("model.json", "text_decoder.num_layer", 2)
    assert_refused(megatron_run, "model.json: unknown key 'text_decoder.num_layer'", "'num_layers'")


def test_layers_of_stages_that_are_no_list(megatron_run: Run) -> None:
    megatron_run.edit("model.json", "text_decoder.pipeline_num_layers", "1,1")
    assert_refused(megatron_run, "model.json: 'text_decoder.pipeline_num_layers' is '1,1'", "such as [11, 17]")


def test_no_weights_to_start_from(megatron_run: Run) -> None:
    megatron_run.edit("model.json", "init_from_hf_path", None)
    assert_refused(megatron_run, "model.json: there are no weights to start from", "--load")


def test_stages_that_the_lists_do_not_fit(megatron_run: Run) -> None:
    megatron_run.processes = 1
    megatron_run.edit("model.json", "text_decoder.pipeline_num_layers", [1, 1])
    assert_refused(
        megatron_run, "'text_decoder.pipeline_num_layers' has 2 numbers", "--pipeline-model-parallel-size is 1"
    )


def test_a_number_that_contradicts_the_hf_directory(megatron_run: Run) -> None:
    megatron_run.edit("model.json", "text_decoder.num_layers", 28)
    assert_refused(megatron_run, "model.json: 'text_decoder.num_layers' is 28", "num_hidden_layers is 2")


# --- whole commands


@pytest.fixture(scope="module", autouse=True)
def commands(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Any, Path]]]:
    """Three commands and the files of their stderr; they run beside the tests above, most of their time importing."""
    runs = {name: copy_of(good, tmp_path_factory.mktemp(name)) for name in ("python", "early", "late")}
    runs["python"].more = ["--train-iter", "1"]
    runs["early"].append("fsdp2.yaml", "param_type: bf16\n")
    runs["late"].append("fsdp2.yaml", "recompute_modules:\n  - model.language_model.layers.{0-23}\n")
    started = {}
    for name, run in runs.items():
        words = [sys.executable, *LAUNCHERS[name], str(ROOT / "pretrain_transformers.py")]
        file = run.folder / "stderr.txt"
        with open(file, "wb") as errors:
            process = subprocess.Popen(
                [*words, *run.words()], cwd=ROOT, env=ENVIRONMENT, stderr=errors, stdout=subprocess.DEVNULL
            )
        started[name] = (process, file)
    yield started
    for process, _ in started.values():
        process.terminate()  # torchrun ends its workers
        process.wait(timeout=60)


def end_of(command: tuple[Any, Path]) -> tuple[int, str]:
    """Exit status and stderr."""
    process, errors = command
    return process.wait(timeout=60), errors.read_text()


def test_python(commands: dict[str, tuple[Any, Path]]) -> None:
    """A typo in a flag."""
    status, errors = end_of(commands["python"])
    assert status == 1
    assert "unknown flag '--train-iter'; did you mean '--train-iters'" in last_lines(errors, LAST_LINES)
    assert "Traceback" not in errors


def test_torchrun(commands: dict[str, tuple[Any, Path]]) -> None:
    """torchrun's own summary, which ends its output, holds our sentence as the root cause."""
    status, errors = end_of(commands["early"])
    assert status == 1
    assert errors.count("\nConfigError: ") == 1  # both ranks found it, one says so
    summary = last_lines(errors, LAST_LINES_OF_TORCHRUN)
    assert "Root Cause (first observed failure)" in summary
    root_cause = summary[summary.index("Root Cause") :]
    assert "ConfigError: " in root_cause
    for part in ("fsdp2.yaml: unknown key 'param_type'", "'param_dtype'"):
        assert part in root_cause


def test_train(commands: dict[str, tuple[Any, Path]]) -> None:
    """Of `mindspeed-mm train` the sentence is all there is."""
    status, errors = end_of(commands["late"])
    assert status == 1
    said = errors.strip().splitlines()
    assert len(said) <= 3 and said[0].startswith("ConfigError: ")
    assert "index 2, but 'model.language_model.layers' has 2 elements (0-1)" in said[0]
