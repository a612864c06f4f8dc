"""A run never begins with random values that nobody asked for, nor beside weights that it would leave unread."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.first_weights import weight_files
from mindspeed_mm.models.generation.sora_model import SoRAModel
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.support.predictors import cases

SCRATCH = {"train_from_scratch": True}


def build(model_class: Any, description: dict[str, Any], **context: Any) -> Any:
    """As a backend has a model built, on meta; not a run's unless `context` says so."""
    with build_context(BuildContext(defer_weights=True, **{"in_run": True, **context})):
        return model_class(description)


def sora(**predictor: Any) -> dict[str, Any]:
    name, case = cases()["wan-t2v"]
    model = case.model_json(name)
    return {**model, "predictor": {**model["predictor"], **predictor}}


def test_random_values_beside_weights_are_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    described = {"init_from_hf_path": str(qwen3_dir), **SCRATCH}
    with pytest.raises(ConfigError) as refused:
        build(TransformersModel, described)
    for words in (f"'{qwen3_dir}' holds weights (model.safetensors)", "remove 'train_from_scratch' to start from them"):
        assert words in str(refused.value)
    assert '"ignore_weights": true' in str(refused.value)
    assert build(TransformersModel, described | {"ignore_weights": True}).pending_weights is None
    empty = shutil.copytree(qwen3_dir, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    assert build(TransformersModel, {**described, "init_from_hf_path": str(empty)}).pending_weights is None


def test_a_checkpoint_brings_them_whatever_the_directory_holds(qwen3_dir: Path) -> None:
    described = {"init_from_hf_path": str(qwen3_dir), **SCRATCH}
    build(TransformersModel, described, load_weights=False)
    build(TransformersModel, described, in_run=False)  # somebody's own Python


def test_random_weights_are_said(qwen3_dir: Path, said: list[str]) -> None:
    described = {"init_from_hf_path": str(qwen3_dir), **SCRATCH, "ignore_weights": True}
    build(TransformersModel, described, seed=7)
    assert any("random weights (train_from_scratch), seed 7" in line and "are not read" in line for line in said)


def test_generation_models_are_held_to_the_same(tmp_path: Path) -> None:
    model = build(SoRAModel, sora(**SCRATCH))
    config = model.predictor.config
    directory = tmp_path / "transformer"
    directory.mkdir()
    model.predictor.save_config(directory)
    assert config is not None
    described = sora(from_pretrained=str(directory), **SCRATCH)
    described["predictor"].pop("config")
    build(SoRAModel, described)
    (directory / "diffusion_pytorch_model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"'predictor'.*'from_pretrained'.*holds weights \(diffusion_pytorch_model"):
        build(SoRAModel, described)
    described["predictor"]["ignore_weights"] = True
    build(SoRAModel, described)
    # an empty run folder as --load satisfies the look at the files; nothing comes from it
    with pytest.raises(ConfigError, match="no weights to start from: give from_pretrained"):
        build(SoRAModel, sora(train_from_scratch=False))


@pytest.mark.parametrize("config", [TransformersModelConfig, VLMModelConfig, SoRAModelConfig])
def test_ignore_weights_alone_is_refused(config: Any) -> None:
    keys = {"ignore_weights": True}
    content = (
        sora(**keys, train_from_scratch=False) if config is SoRAModelConfig else {"init_from_hf_path": "x", **keys}
    )
    with pytest.raises(ConfigError, match="'ignore_weights' is true, but 'train_from_scratch' is not"):
        config.from_dict(content)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("pytorch_model.bin", True),
        ("diffusion_pytorch_model.fp16.safetensors", True),
        ("model.safetensors.index.json", False),
        ("training_args.bin", False),
    ],
)
def test_which_files_are_weights(tmp_path: Path, name: str, holds: bool) -> None:
    (tmp_path / name).touch()
    assert bool(weight_files(tmp_path)) is holds
    assert weight_files(tmp_path / "absent") == []
