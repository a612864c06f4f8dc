"""A run in one YAML file: what it says is what flags and files say, flags after it go before."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.configs.arguments import parse_args
from mindspeed_mm.configs.config import merge_mm_args
from mindspeed_mm.configs.files import FileSection
from mindspeed_mm.configs.fsdp2_config import load_fsdp2_config
from mindspeed_mm.configs.lora import lora_options
from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.configs.yaml_run import FlagValue, YamlRun, in_words_of_the_file, read_yaml_run
from mindspeed_mm.utils.errors import ConfigError

RUN = """\
MM_TOOL_PATH: "./tools.json"
HF_MODEL_LOAD_PATH: &HF_MODEL_LOAD_PATH "./hf"
FSDP2_PATH: &FSDP2_PATH "./fsdp2.yaml"
VALIDATION: &ROWS "held_out.json"
gpt_args:
  tensor_model_parallel_size: 1
  use_torch_fsdp2: true
  fsdp2_config_path: *FSDP2_PATH
  micro_batch_size: 1
  global_batch_size: 8
  lr: 1e-5
  lr_decay_style: cosine
  weight_decay: 0.0
  train_iters: 10000
  bf16: false
  no_load_optim: true
  no_load_rng: false
  no_check_for_nan_in_loss_and_grad: false
  swiglu: true
  normalization: "RMSNorm"
  no_gradient_accumulation_fusion: true
  lr_scale_modules: [visual, merger]
  lr_mult: 0.5
  weight_decay_exclude_modules: "embed_tokens, norm"
  eval_interval: null
  recompute_modules: null
  seed: null
data:
  dataset_param:
    dataset_type: huggingface
    basic_parameters: {dataset: rows.json, val_dataset: *ROWS}
    preprocess_parameters: {model_name_or_path: *HF_MODEL_LOAD_PATH}
model:
  init_from_hf_path: *HF_MODEL_LOAD_PATH
  text_decoder: {freeze: false}
  loss_cfg: {compute_mode: default, loss_type: default}
"""

WORDS = """--tensor-model-parallel-size 1 --use-torch-fsdp2 --fsdp2-config-path ./fsdp2.yaml --micro-batch-size 1
    --global-batch-size 8 --lr 1e-5 --lr-decay-style cosine --weight-decay 0 --train-iters 10000 --no-load-optim
    --swiglu --normalization RMSNorm --no-gradient-accumulation-fusion --lr-scale-modules visual merger --lr-mult 0.5
    --weight-decay-exclude-modules embed_tokens norm --eval-interval None --mm-tool ./tools.json"""


@pytest.fixture
def run_yaml(run_folder: Path) -> Path:
    (run_folder / "run.yaml").write_text(RUN)
    return run_folder / "run.yaml"


def read(*words: str, **options: Any) -> Namespace:
    args = parse_args(["run.yaml", *words], **options)
    merge_mm_args(args)
    return args


def refusal(text: str, *words: str) -> str:
    """What is said of the folder's run with `text` at its end."""
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(*words)
    return str(caught.value)


def test_it_is_the_run_that_flags_and_files_describe(run_yaml: Path) -> None:
    content = yaml.safe_load(RUN)
    for name in ("model", "data"):
        Path(f"{name}_of_run.json").write_text(json.dumps(content[name]))
    flags = parse_args([*WORDS.split(), "--mm-model", "model_of_run.json", "--mm-data", "data_of_run.json"])
    merge_mm_args(flags)
    args = read()
    of_files = ("given", "mm", "mm_model", "mm_data")
    assert {k: v for k, v in vars(args).items() if k not in of_files} == {
        k: v for k, v in vars(flags).items() if k not in of_files
    }
    assert (args.mm.model, args.mm.data, args.mm.tool) == (flags.mm.model, flags.mm.data, flags.mm.tool)
    assert (args.bf16, args.no_load_rng, args.check_for_nan_in_loss_and_grad) == (False, False, True)
    assert args.lr_scale_modules == ["visual", "merger"] and args.eval_interval is args.recompute_modules is None
    assert args.seed == 1234


@pytest.mark.parametrize("written", ["v_proj,o_proj", "v_proj, o_proj", "[v_proj, o_proj]", '["v_proj,o_proj"]'])
def test_adapters(run_yaml: Path, written: str) -> None:
    lora = f"lora_args:\n  lora_r: 4\n  lora_target_modules: {written}\n  lora_register_forward_hook: embed_tokens\n"
    run_yaml.write_text(RUN + lora)
    options = lora_options(read())
    assert options is not None and options.target_modules == ("v_proj", "o_proj")
    assert (options.r, options.alpha, options.dropout, options.apply_to) == (4, 16, 0.0, ("all",))
    words = "--lora-r 2 --lora-target-modules q_proj k_proj --lora-register-forward-hook embed_tokens norm"
    changed = lora_options(read(*words.split()))
    assert changed is not None and (changed.r, changed.target_modules) == (2, ("q_proj", "k_proj"))


def test_flags_after_it_go_before(run_yaml: Path) -> None:
    (run_yaml.parent / "other.json").write_text(json.dumps({"init_from_hf_path": "./hf", "train_from_scratch": True}))
    words = "--lr 2e-5 --bf16 --distributed-backend gloo --lr-scale-modules head --mm-model other.json --load hf"
    args = read(*words.split(), "--train-epochs", "2", "--no-load-optim", "False")
    assert (args.lr, args.bf16, args.distributed_backend, args.load) == (2e-5, True, "gloo", "hf")
    assert args.lr_scale_modules == ["head"] and args.no_load_optim is False
    assert (args.train_epochs, args.train_iters) == (2, None)  # one length takes the place of another
    assert args.mm.model.train_from_scratch is True and args.mm.data.dataset_param.dataset_type == "huggingface"


def test_a_script_s_own_flags_and_defaults(run_yaml: Path) -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--rank-of-adapters", type=int, default=1)
        parser.add_argument("--colours", nargs="+", required=True)
        parser.add_argument("--mirror", action="store_true")
        parser.add_argument("--crop", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--sides", nargs=2, type=int)
        return parser

    own = "  rank_of_adapters: 4\n  colours: [red, 'a, b']\n  mirror: false\n  crop: false\n  sides: [1, 2]\n"
    run_yaml.write_text(RUN.replace("gpt_args:\n", "gpt_args:\n" + own))
    args = read("--rank-of-adapters", "5", extra_args_provider=add, args_defaults={"lr": 1.0, "clip_grad": 3.0})
    assert (args.rank_of_adapters, args.colours, args.mirror, args.crop) == (5, ["red", "a, b"], False, False)
    assert args.sides == [1, 2] and (args.lr, args.clip_grad) == (1e-5, 3.0)
    run_yaml.write_text(RUN.replace("gpt_args:\n", "gpt_args:\n  mirror: on it\n"))
    with pytest.raises(ConfigError, match=r"'gpt_args\.mirror' is 'on it'; expected true or false"):
        read("--colours", "red", extra_args_provider=add)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("gpt_args:", "gpt_arg:", "run.yaml: the section 'gpt_args' is missing"),
        (
            "  lr: 1e-5",
            "  learning_rate: 1e-5",
            "unknown key 'gpt_args.learning_rate' (value 1e-05); did you mean 'lr'",
        ),
        ("  lr: 1e-5", "  lr_decay_styl: a", "did you mean 'lr_decay_style'"),
        ("  lr: 1e-5", "  nnodes: 2", "'gpt_args.nnodes' is 2; this flag is torchrun's"),
        ("  lr: 1e-5", "  lr: fast", "run.yaml: 'gpt_args.lr' is 'fast'; expected a number such as 1e-5"),
        ("  lr: 1e-5", "  lr: true", "run.yaml: 'gpt_args.lr' is true; expected a value, not a switch"),
        ("  lr: 1e-5", "  lr: [1e-5, 1e-6]", "'gpt_args.lr' is [1e-05, 1e-06]; expected one value, not a list"),
        ("bf16: false", "bf16: maybe", "run.yaml: 'gpt_args.bf16' is 'maybe'; expected true or false"),
        ("lr_decay_style: cosine", "lr_decay_style: cosin", "'cosin'; expected one of constant, linear, cosine"),
        ("micro_batch_size: 1", "micro_batch_size: 0", "'gpt_args.micro_batch_size' is 0; expected at least 1"),
        (
            "  lr: 1e-5",
            "  group: {lr: 1e-5}\n  lr: 1",
            "'gpt_args.lr' and run.yaml: 'gpt_args.group.lr' are the same flag",
        ),
        (
            "  lr: 1e-5",
            "  lr: 1e-5\n  mm_data: data.json",
            "'gpt_args.mm_data' and run.yaml, section data are the same",
        ),
        ("MM_TOOL_PATH", "MM_TOL_PATH", "run.yaml: unknown key 'MM_TOL_PATH' (value './tools.json'); did you mean"),
        ("data:\n", "training_data: 1\ndata:\n", "run.yaml: unknown key 'training_data' (value 1)"),
        ("./tools.json", "./tool.json", "run.yaml: 'MM_TOOL_PATH': ./tool.json does not exist"),
        ("./fsdp2.yaml", "./fsdp.yaml", "run.yaml: 'gpt_args.fsdp2_config_path': ./fsdp.yaml does not exist"),
        ("text_decoder:", "text_decodr:", "run.yaml, section model: unknown key 'text_decodr'"),
        ("dataset_type:", "dataset_typ:", "run.yaml, section data: unknown key 'dataset_param.dataset_typ'"),
        ("model:\n  init_from_hf_path: *HF_MODEL_LOAD_PATH\n", "model: 3\nx:\n", "run.yaml: 'model' is 3; expected an"),
        ("model:\n", "lora: {a: 1}\nmodel:\n", "run.yaml: unknown key 'lora' (value {'a': 1}); did you mean"),
        ("  seed: null", "lora_args: {lora_r: 0}", "run.yaml: 'lora_args.lora_r' is 0; expected"),
        ("  micro_batch_size: 1\n", "", "missing flags: --micro-batch-size; run.yaml may give them too"),
    ],
)
def test_faults_name_the_key_and_the_nearest_name(run_yaml: Path, before: str, after: str, sentence: str) -> None:
    assert before in RUN
    assert sentence in refusal(RUN.replace(before, after, 1))


def test_all_faults_are_told_at_once(run_yaml: Path) -> None:
    text = RUN.replace("lr: 1e-5", "lr: fast").replace("bf16", "bf17").replace("seed: null", "seed: -1")
    assert len(refusal(text).splitlines()) == 3


def test_what_is_no_run(run_yaml: Path) -> None:
    assert "found [1, 2], expected sections such as gpt_args" in refusal("[1, 2]\n")
    assert "'gpt_args' is missing" in refusal("model: {}\n")
    assert "by which files of train_fsdp2.py or mindspeed_mm/fsdp/train/trainer.py are known" in refusal("data: {}\n")
    with pytest.raises(ConfigError, match=r"stray word 'run\.yaml': the YAML file of a run comes first"):
        parse_args(["--lr", "1", "run.yaml"])
    with pytest.raises(ConfigError, match=r"runn\.yaml does not exist; did you mean 'run\.yaml'"):
        parse_args(["runn.yaml"])


def test_a_variable_that_nothing_refers_to_is_said(run_yaml: Path, said: list[str]) -> None:
    run_yaml.write_text('SAVE_PATH: "runs"\n' + RUN)
    read()
    assert said[0].startswith("run.yaml: 'SAVE_PATH' has no effect here")
    assert not any("VALIDATION" in line or "MODEL_LOAD" in line for line in said)


def test_keys_without_effect_are_said_by_reason(run_yaml: Path, said: list[str]) -> None:
    read("--init-method-std", "0.1")
    reason = "the HF config is authoritative for the model's structure"
    assert (
        f"run.yaml: 'gpt_args.normalization', 'gpt_args.swiglu', --init-method-std have no effect here: {reason}"
        in said
    )
    assert not any("overlap" in line for line in said)


def test_sections_in_place_of_files(run_yaml: Path) -> None:
    text = RUN.replace('MM_TOOL_PATH: "./tools.json"', "tools: {profile: {enable: true, ranks: [0]}}")
    text = text.replace("  fsdp2_config_path: *FSDP2_PATH\n", "").replace(
        'FSDP2_PATH: &FSDP2_PATH "./fsdp2.yaml"\n', ""
    )
    run_yaml.write_text(text + "fsdp2: {sharding_size: auto, recompute_modules: ['model.layers.{*}']}\n")
    args = read()
    assert ToolsConfig.from_dict(args.mm.tool).profile.enable is True
    config = load_fsdp2_config(args.fsdp2_config_path)
    assert (config.sharding_size, config.recompute_modules) == ("auto", ["model.layers.{*}"])
    for copied in (copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert load_fsdp2_config(copied.fsdp2_config_path) == config and copied.mm_model == "run.yaml"
    run_yaml.write_text(run_yaml.read_text() + "tool: {}\n")
    with pytest.raises(ConfigError, match="'tool' and 'tools' are both given"):
        read()
    run_yaml.write_text(text + "fsdp2: {sharding: auto}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml, section fsdp2: unknown key 'sharding'.*'sharding_size'"):
        load_fsdp2_config(read().fsdp2_config_path)


def test_a_run_that_a_script_has_read_itself(run_yaml: Path) -> None:
    """Another dialect's reader hands over the same description."""
    run = read_yaml_run("run.yaml")
    assert isinstance(run.sections["mm_model"], FileSection)
    described = YamlRun("mine.yaml", run.flags, run.sections)
    args = parse_args(["--lr", "3"], run=described)
    assert (args.lr, args.global_batch_size) == (3.0, 8)
    with pytest.raises(ConfigError, match=r"stray word 'run\.yaml'"):
        parse_args(["run.yaml"], run=described)


def test_words_after_it_take_the_place_of_values(run_yaml: Path) -> None:
    words = ["gpt_args.lr=3e-4", "gpt_args.weight_decay_exclude_modules=[a, b]", "model.text_decoder.freeze=true"]
    args = read(*words, "data.dataset_param.basic_parameters.template=qwen=2", "--seed", "5")
    assert (args.lr, args.weight_decay_exclude_modules, args.seed) == (3e-4, ["a", "b"], 5)
    assert args.mm.model.text_decoder.freeze is True
    assert args.mm.data.dataset_param.basic_parameters.template == "qwen=2"
    for word, sentence in {
        "gpt_args.learning_rate=1": r"unknown key 'gpt_args\.learning_rate' \(value 1\); did you mean 'lr'",
        "gpt_args.lr.x=1": r"'gpt_args\.lr\.x=1': the file has 1e-05 there, which has no keys",
        "gpt_args.lr=[1": r"'gpt_args\.lr=\[1', after run\.yaml, line 1.*: not YAML",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            read(word)
    with pytest.raises(ConfigError, match=r"stray word 'gpt_args\.lr=1'.*right after a run's YAML file"):
        read("--bf16", "gpt_args.lr=1")


def test_errors_are_in_the_words_of_the_file(run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = YamlRun("run.yaml", [FlagValue("batch.rows", "micro_batch_size", 1)], {}, {"--lr": "a.b", "--lr-mult": "c"})
    monkeypatch.setattr("mindspeed_mm.configs.yaml_run.read_yaml_run", lambda *_: run)
    with pytest.raises(ConfigError) as caught, in_words_of_the_file(["run.yaml"]):
        raise ConfigError("--lr 1 is wrong")
    assert str(caught.value) == "--lr 1 is wrong\nin run.yaml: --lr is 'a.b'"
    with pytest.raises(ConfigError) as caught, in_words_of_the_file([]):
        raise ConfigError("--lr 1 is wrong")
    assert str(caught.value) == "--lr 1 is wrong"


def test_a_dialect_is_one_module_of_a_folder(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A toy one from a temporary folder: nothing else knows of it."""
    folder = tmp_path_factory.mktemp("dialects")
    (folder / "toy.py").write_text(
        "from mindspeed_mm.configs.files import FileSection\n"
        "from mindspeed_mm.configs.yaml_run import Dialect, FlagValue, YamlRun\n\n\n"
        "def read(content, path):\n"
        "    recipe = content['toy']\n"
        "    flags = [FlagValue(f'toy.{key}', key.replace('steps', 'train_iters'), recipe[key]) for key in recipe]\n"
        "    return YamlRun(path, flags, {'mm_model': FileSection(path, 'network', content['network'])})\n\n\n"
        "DIALECT = Dialect(frozenset({'toy'}), 'pretrain_transformers.py', read)\n"
    )
    package = importlib.import_module("mindspeed_mm.configs.dialects")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    (run_folder / "run.yaml").write_text("toy: {steps: 7, lr: 0.5}\nnetwork: {init_from_hf_path: hf}\n")
    args = parse_args(["run.yaml", "--micro-batch-size", "2", "--mm-data", "data.json"])
    assert (args.train_iters, args.lr, args.mm_model.label) == (7, 0.5, "run.yaml, section network")
    (run_folder / "run.yaml").write_text("toy: {stepz: 7}\nnetwork: {}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: unknown key 'toy\.stepz'"):
        parse_args(["run.yaml"])
    sys.modules.pop("mindspeed_mm.configs.dialects.toy")
