"""Layouts and rows of Gemma 4 and Llama 4 that would be trained otherwise than transformers does are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.conversation.tokens import Tokenizer
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.transformers.llama4.data import ADAPTER as LLAMA4
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.support.families import gemma4, gemma4_moe, llama4

LAYERS = "model.language_model.layers.{*}"


@pytest.fixture(scope="module")
def hf_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    makers = {"gemma4": gemma4.make, "gemma4_moe": gemma4_moe.make, "llama4": llama4.make}
    return {name: make(tmp_path_factory.mktemp(name) / "hf") for name, make in makers.items()}


def build(hf_dir: Path) -> TransformersModel:
    """The model's structure."""
    with build_context(BuildContext(load_weights=False, defer_weights=True)):
        return TransformersModel({"init_from_hf_path": str(hf_dir)})


def plan(hf_dir: Path, folder: Path, text: str) -> Any:
    file = folder / "fsdp2.yaml"
    file.write_text(text)
    return build(hf_dir).plan_sharding(2, str(file))


CHUNKS = f'recompute_modules: ["{LAYERS}"]\nchunk_mbs_modules: ["{LAYERS}"]\nchunk_mbs_size: 1\n'


def test_rows_whose_layers_share_keys_are_not_cut(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    """A later layer would take the keys of another chunk's rows; sizes without shared keys run so."""
    with pytest.raises(ConfigError, match=r"chunk_mbs_modules: the last 2 layers of Gemma 4 take keys and values"):
        plan(hf_dirs["gemma4"], tmp_path, CHUNKS)
    assert len(plan(hf_dirs["gemma4_moe"], tmp_path, CHUNKS).chunked) == 2


@pytest.mark.parametrize("unit", ["model.language_model.embed_tokens", "model.language_model"])
def test_an_embedding_that_is_read_outside_is_no_unit(unit: str, hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    units = f'sub_modules_to_wrap: ["{LAYERS}", "{unit}"]\n'
    with pytest.raises(ConfigError, match=r"reads the weight of 'model.language_model.embed_tokens' outside of it"):
        plan(hf_dirs["gemma4"], tmp_path, units)
    assert unit in plan(hf_dirs["gemma4_moe"], tmp_path, units).units


def test_a_size_without_sounds_has_no_such_part(hf_dirs: dict[str, Path]) -> None:
    small, large = (build(hf_dirs[name]).traits for name in ("gemma4", "gemma4_moe"))
    assert "audio_encoder" in small.parts and [tower.path for tower in small.towers][2] == "model.audio_tower"
    assert "audio_encoder" not in large.parts and len(large.towers) == 2


def test_places_in_a_row_change_the_scale_of_llama4(hf_dirs: dict[str, Path]) -> None:
    """Rows so short that all scales are 1 train; a sample behind the first one would have another scale than alone."""
    model = build(hf_dirs["llama4"])
    row = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0]])
    model.model.config.text_config.floor_scale = 8
    assert model.prepare({**row, "documents": documents})["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    model.model.config.text_config.floor_scale = 7
    with pytest.raises(ConfigError, match=r"packed rows of 8 tokens: it scales attention .* from 7 tokens on"):
        model.prepare({**row, "documents": documents})
    model.prepare({**row, "documents": torch.ones_like(documents)})


def test_the_token_of_tiles_in_a_text_is_text(hf_dirs: dict[str, Path]) -> None:
    """`<|patch|>` in a message is spelt out, as `<|image|>` is: no image belongs to it."""
    path = str(hf_dirs["llama4"])
    processor = LLAMA4.load_processor(path, PreprocessParameters(model_name_or_path=path))
    tokenizer = Tokenizer(processor, LLAMA4, {})
    (patch,) = processor.image_token_ids
    assert patch not in tokenizer(tokenizer.hide("a <|patch|> b")).ids.tolist()
    assert patch in tokenizer("a <|image|> b", [("image", "<|patch|>")]).ids.tolist()
