"""What users' scripts read of `get_args()`: every flag under Megatron's name, what follows from them, and the files."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mindspeed_mm.configs.config import ConfigReader, MMConfig, merge_mm_args, mm_extra_args_provider
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.spec import all_flags
from mindspeed_mm.configs.global_args import get_args, report_progress
from mindspeed_mm.tasks.train.language import VLM
from mindspeed_mm.utils.errors import ConfigError
from tests.support.runs import OWN, described_args

#: a launch as published ones are (`GPT_ARGS`, `MM_ARGS`, `OUTPUT_ARGS`), and what a script reads under each name
FLAGS: dict[str, Any] = {
    "use_torch_fsdp2": True,
    "fsdp2_config_path": "fsdp2.yaml",
    "init_model_with_meta_device": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "context_parallel_algo": "ulysses_cp_algo",
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "num_workers": 3,
    "seed": 5,
    "seq_length": 128,
    "vocab_size": 152064,
    "make_vocab_size_divisible_by": 1,
    "tokenizer_type": "NullTokenizer",
    "normalization": "RMSNorm",
    "swiglu": True,
    "use_flash_attn": True,
    "use_fused_rmsnorm": True,
    "use_cpu_initialization": True,
    "use_distributed_optimizer": True,
    "untie_embeddings_and_output_weights": True,
    "lr": 1e-3,
    "min_lr": 1e-5,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.25,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "clip_grad": 1.0,
    "bf16": True,
    "train_iters": 8,
    "eval_interval": 4,
    "eval_iters": 2,
    "log_interval": 1,
    "save_interval": 4,
    "no_load_optim": True,
    "no_load_rng": True,
    "no_save_optim": True,
    "no_save_rng": True,
    "ckpt_format": "torch_dcp",
    "distributed_backend": "gloo",
    "mm_model": "model.json",
    "mm_data": "data.json",
    "mm_tool": "tools.json",
}
MODEL = {"width": 8, "dtype": "bf16", "text_decoder": {"layers": [{"size": 1}], "freeze": False}}
DATA = {"rows": 4, "dataloader_param": {"shuffle": True}}


@pytest.fixture
def launch(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rank 1 of 2 of a script with a model and data of its own."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    (run_folder / "model.json").write_text(json.dumps(MODEL))
    (run_folder / "data.json").write_text(json.dumps(DATA))
    words: list[str] = []
    for name, value in FLAGS.items():
        words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


def test_every_flag_is_an_attribute(launch: list[str]) -> None:
    args = described_args(launch, OWN)
    assert args is get_args()
    assert {name: getattr(args, name) for name in FLAGS} == FLAGS
    assert [item.name for item in all_flags(GROUPS) if not hasattr(args, item.name)] == []
    assert set(FLAGS) <= set(vars(args))


def test_our_flags_are_listed_once_to_find_those_of_a_script(launch: list[str]) -> None:
    with mock.patch("mindspeed_mm.configs.describe.all_flags", side_effect=all_flags) as listed:
        described_args(launch, OWN)
    assert listed.call_count == 1


def test_what_follows_from_the_flags(launch: list[str]) -> None:
    args = described_args(launch, OWN)
    assert (args.rank, args.local_rank, args.world_size, args.data_parallel_size) == (1, 1, 2, 2)
    assert (args.num_microbatches, args.lr_decay_iters, args.params_dtype) == (2, 8, "bf16")
    assert (args.start_weight_decay, args.end_weight_decay) == (0.0, 0.0)
    assert args.consumed_train_samples == 0
    assert (args.load, args.save, args.finetune, args.fp16) == (None, None, False, False)


def test_the_files_are_in_mm(launch: list[str]) -> None:
    mm = described_args(launch, OWN).mm
    assert isinstance(mm, MMConfig) and isinstance(mm.model, ConfigReader)
    mm_model, mm_data = mm.model, mm.data
    assert (mm_model.width, mm_model.text_decoder.freeze, mm_data.dataloader_param.shuffle) == (8, False, True)
    assert mm_model.text_decoder.layers == [{"size": 1}]
    assert (mm_model.get("width", 1), mm_model.get("depth", 1), hasattr(mm_model, "depth")) == (8, 1, False)
    assert mm_data.to_dict() == DATA
    assert mm.tool.to_dict() == {}
    own = copy.deepcopy(mm_model)
    own.pre_process, own.width = True, 9
    assert (mm_model.width, hasattr(mm_model, "pre_process")) == (8, False)


def test_a_file_that_is_not_given_is_not_in_mm(launch: list[str]) -> None:
    args = described_args([word for word in launch if word not in ("--mm-tool", "tools.json")], OWN)
    assert not hasattr(args.mm, "tool")


def test_merging_the_files_once_more_changes_nothing(launch: list[str]) -> None:
    args = described_args(launch, OWN)
    mm = args.mm
    merge_mm_args(args)
    assert args.mm is mm


def own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--colour", default="blue")
    return mm_extra_args_provider(parser)


def test_what_a_script_adds_is_its_own(launch: list[str]) -> None:
    """Flags of its own, what `args_defaults` stores beside flags, and new attributes: read and written at any time."""
    defaults = {"dataloader_type": "external", "curr_forward_iteration": 0, "clip_grad": 3.0, "adam_eps": 1e-6}
    recipe = dataclasses.replace(OWN, own_flags=own_flags, defaults=defaults)
    args = described_args([*launch, "--colour", "red"], recipe)
    assert (args.colour, args.dataloader_type, args.clip_grad, args.adam_eps) == ("red", "external", 1.0, 1e-6)
    args.curr_forward_iteration += 1
    args.colour = "green"
    args.counted = 7
    args.counted += 1
    assert (args.curr_forward_iteration, args.colour, args.counted) == (1, "green", 8)
    del args.counted
    assert not hasattr(args, "counted")


def test_what_the_launch_describes_is_not_changed_in_a_script(launch: list[str]) -> None:
    """Another value that stays is an error that says where to give it; one that is put back is the script's affair."""
    args = described_args(launch, OWN)
    args.micro_batch_size = args.micro_batch_size
    for name, value in (("micro_batch_size", 1), ("train_iters", 9), ("mm", MMConfig({})), ("params_dtype", "fp32")):
        before = getattr(args, name)
        setattr(args, name, value)
        assert getattr(args, name) is value
        setattr(args, name, before)
        report_progress(iteration=1)
        setattr(args, name, value)
        with pytest.raises(ConfigError, match=f"get_args\\(\\).{name} is "):
            report_progress(iteration=2)
        setattr(args, name, before)
    with pytest.raises(ConfigError, match="micro_batch_size"):
        del args.micro_batch_size
    assert (args.micro_batch_size, args.train_iters) == (2, 8)
    own = copy.copy(args)
    assert type(own) is Namespace
    own.micro_batch_size = 1
    assert args.micro_batch_size == 2


def test_files_of_a_schema_are_not_written(run_folder: Path) -> None:
    """What the run has typed can't change afterwards, at any depth; copies can."""
    words = "--mm-model model.json --mm-data data.json --micro-batch-size 1 --lr 1 --train-iters 1 --use-torch-fsdp2"
    mm = described_args(words.split(), VLM).mm
    with pytest.raises(ConfigError, match=r"model\.json: 'model_id' can't be written.*copy\.deepcopy"):
        mm.model.model_id = "other"
    with pytest.raises(ConfigError, match=r"data\.json: dataset_param: 'dataset_type' can't be written"):
        mm.data.dataset_param["dataset_type"] = "other"
    own = copy.deepcopy(mm.model)
    own.model_id = "other"
    assert own.model_id == "other"
