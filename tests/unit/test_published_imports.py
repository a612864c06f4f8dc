"""Import paths that published scripts and documents name: each must go on bringing what it brought."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

ROOT = Path(__file__).resolve().parents[2]

#: path → for a class what it must have and its parents, for a function the names of its first parameters
CLASSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mindspeed_mm.configs.config.ConfigReader": (("to_dict", "get"), ()),
    "mindspeed_mm.configs.config.MMConfig": ((), ()),
    "mindspeed_mm.models.common.module.MultiModalModule": (("state_dict_for_save_checkpoint",), ("Module",)),
    "mindspeed_mm.models.common.modelzoo.ModelHub": (("MODEL_MAPPINGS", "register"), ()),
    "mindspeed_mm.models.transformers.base_model.FSDP2Mixin": (
        (
            *("fully_shard", "_pre_fully_shard", "_fully_shard", "_post_fully_shard", "freeze", "post_meta_init"),
            *("set_recompute_modules_to_wrap", "set_fullyshard_modules_to_wrap", "set_modules_to_prefetch"),
        ),
        (),
    ),
    "mindspeed_mm.models.transformers.base_model.WeightInitMixin": (("init_weights", "_init_weights"), ()),
    "mindspeed_mm.models.transformers_model.TransformersModel": (("fully_shard", "forward"), ("MultiModalModule",)),
    "mindspeed_mm.models.sora_model.SoRAModel": (("fully_shard", "forward"), ("MultiModalModule",)),
}
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "mindspeed_mm.configs.config.merge_mm_args": ("args",),
    "mindspeed_mm.configs.config.mm_extra_args_provider": ("parser",),
    "mindspeed_mm.configs.global_args.get_args": (),
    "mindspeed_mm.data.build_mm_dataset": ("dataset_param",),
    "mindspeed_mm.data.build_mm_dataloader": (
        *("dataset", "dataloader_param", "process_group", "consumed_samples", "dataset_param"),
    ),
    "mindspeed_mm.models.common.modelzoo.register_model": ("model_id",),
    "mindspeed_mm.training.pretrain": (
        *("train_valid_test_datasets_provider", "model_provider", "model_type", "forward_step_func"),
        *("process_non_loss_data_func", "extra_args_provider", "args_defaults"),
    ),
    "mindspeed_mm.training.train": (),
    "mindspeed_mm.training.train_step": (),
    "mindspeed_mm.utils.device.move_to_device": ("value", "device", "dtype"),
    "megatron.training.get_args": (),
    "megatron.training.global_vars.get_args": (),
}
#: run by published launches as files
FILES = (
    *("evaluate_gen.py", "inference_sora.py", "inference_vlm.py"),
    *("pretrain_sora.py", "pretrain_transformers.py", "pretrain_vlm.py"),
    "mindspeed_mm/tools/feature_extraction/get_sora_feature.py",
    "mindspeed_mm/tools/feature_extraction/get_vace_feature.py",
    "mindspeed_mm/tools/feature_extraction/get_wan_feature.py",
    "train_fsdp2.py",
    "mindspeed_mm/tools/tools.json",
)


def named(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def problems_of_classes(classes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """Paths that aren't the class that they must be, with what is wrong."""
    found = []
    for path, (members, parents) in classes.items():
        kind = named(path)
        if not inspect.isclass(kind) or kind.__name__ != path.rpartition(".")[2]:
            found.append(f"{path} is {kind!r}")
            continue
        bases = {base.__name__ for base in kind.__mro__}
        found += [f"{path} has no {name}" for name in members if not hasattr(kind, name)]
        found += [f"{path} is no {name}" for name in parents if name not in bases]
    return found


def test_classes() -> None:
    assert problems_of_classes(CLASSES) == []
    assert issubclass(named("mindspeed_mm.models.common.module.MultiModalModule"), nn.Module)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_functions(path: str) -> None:
    """Their published parameters stand first, under their names, and the rest need not be given by position."""
    function = named(path)
    assert inspect.isfunction(function)
    assert tuple(inspect.signature(function).parameters)[: len(FUNCTIONS[path])] == FUNCTIONS[path]


def test_one_get_args() -> None:
    """Wherever it is imported from, it gives the same arguments."""
    ways = [named(path) for path in FUNCTIONS if path.endswith(".get_args")]
    assert len(ways) == 3 and len(set(ways)) == 1


@pytest.mark.parametrize("path", FILES)
def test_files_that_launches_name(path: str) -> None:
    assert (ROOT / path).is_file()


def test_the_package_brings_get_args() -> None:
    """`import mindspeed_mm` is enough for a script's next line, and imports no torch."""
    code = "import mindspeed_mm, sys; from megatron.training import get_args; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
