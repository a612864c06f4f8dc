"""The loss type comes from a flag or from model.json; two different answers are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.flags.model import LossArguments
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError


def loss_type(hf_dir: Path, flags: LossArguments, **loss_cfg: Any) -> str:
    with build_context(BuildContext(loss=flags)):
        return TransformersModel({"init_from_hf_path": str(hf_dir), "loss_cfg": loss_cfg}).loss_options.loss_type


def test_flag_or_file(qwen3_dir: Path) -> None:
    square = LossArguments(calculate_square_loss=True)
    assert loss_type(qwen3_dir, LossArguments()) == "per_token_loss"
    assert loss_type(qwen3_dir, LossArguments(), loss_type="default") == "default"
    assert loss_type(qwen3_dir, square) == "square_loss"
    with pytest.raises(ConfigError, match="--calculate-square-loss asks for square_loss"):
        loss_type(qwen3_dir, square, loss_type="default")
