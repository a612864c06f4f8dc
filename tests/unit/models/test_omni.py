"""Omni models: times between whole numbers, clips of several rates, sounds of whole frames, the whole beside a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from mindspeed_mm.checkpoint.hf_export import export_from
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.conversation.tokens import Tokenizer
from mindspeed_mm.data.media.audio import SoundFacts, SoundRule
from mindspeed_mm.data.media.media import DecodedVideo
from mindspeed_mm.models.common.exact_positions import ExactPositions
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.meta_model import build_meta_model, config_for
from mindspeed_mm.models.transformers.qwen3_omni_moe.data import ADAPTER
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support.families import qwen3_omni_moe
from tests.support.tiny_families import weights_in


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_omni_moe.make(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(hf_dir: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(hf_dir)
    model_class = ModelHub.get(None, config)
    return build_meta_model(model_class, config_for(model_class, config))


def row(model: Any, kinds: str) -> list[int]:
    """Ids of a row of words and media: v a video of 3 groups of 2 × 2 merged patches, i a picture of one group."""
    config, ids = model.config, [5, 6]
    for kind in kinds:
        token, count = (config.video_token_id, 12) if kind == "v" else (config.image_token_id, 4)
        ids += [config.vision_start_token_id, *[token] * count, config.vision_end_token_id, 7]
    return ids


def grids(kinds: str) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    if "v" in kinds:
        made["video_grid_thw"] = torch.tensor([[3, 4, 4]] * kinds.count("v"))
        made["video_second_per_grid"] = torch.full((kinds.count("v"),), 4 / 3)
    if "i" in kinds:
        made["image_grid_thw"] = torch.tensor([[1, 4, 4]] * kinds.count("i"))
    return made


def test_packed_times_between_whole_numbers_are_those_of_each_row_alone(model: Any) -> None:
    """1.5 frames a second put a group of frames at 17.33: nothing may round that."""
    traits, kinds = model.traits, ["v", "", "iv"]
    rows = [row(model, own) for own in kinds]
    documents = torch.tensor([[number for number, own in enumerate(rows, start=1) for _ in own] + [0, 0]])
    batch = {"input_ids": torch.tensor([[token for own in rows for token in own] + [0, 0]]), **grids("vvi")}
    packed = traits.packed_positions(model, batch, documents)
    assert packed.dtype == torch.float32
    at = 0
    for own, ids in zip(kinds, rows, strict=True):
        alone = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        expected, _ = model.model.get_rope_index(
            alone["input_ids"],
            grids(own).get("image_grid_thw"),
            grids(own).get("video_grid_thw"),
            alone["attention_mask"],
            second_per_grids=grids(own).get("video_second_per_grid"),
        )
        assert torch.equal(packed[1:, :, at : at + len(ids)], expected)
        assert packed[0, 0, at : at + len(ids)].tolist() == list(range(len(ids)))
        at += len(ids)
    assert bool((packed != packed.round()).any())


def test_positions_with_fractions_reach_the_language_model_as_they_are() -> None:
    """What is between gets whole numbers: FSDP casts everything else to the parameters' dtype."""

    class LanguageModel(nn.Module):
        def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
            return position_ids

    language_model = LanguageModel()
    exact = ExactPositions(language_model)
    positions = torch.tensor([[301.25, 302.5]])
    batch = {"position_ids": positions}
    exact.for_batch(batch)
    assert batch["position_ids"].dtype == torch.int64
    assert torch.equal(language_model(position_ids=batch["position_ids"]), positions)
    whole = {"position_ids": torch.tensor([[3, 4]])}
    exact.for_batch(whole)
    assert language_model(position_ids=whole["position_ids"]).tolist() == [[3, 4]]


def test_media_that_do_not_fit_the_tokens_are_named(model: Any) -> None:
    batch = {"input_ids": torch.tensor([row(model, "vv")]), **grids("v")}
    with pytest.raises(DataError, match=r"video_grid_thw.*0 sounds\) don't fit its media tokens"):
        model.traits.prepare_batch(model, batch)


def test_each_clip_is_told_its_own_rate(hf_dir: Path) -> None:
    """Two groups of frames follow each other after two frames' time, whatever the clips beside."""
    processor = ADAPTER.load_processor(str(hf_dir), PreprocessParameters(model_name_or_path=str(hf_dir)))
    frames = np.zeros((4, 64, 64, 3), dtype=np.uint8)
    clips = [DecodedVideo(frames, [number / fps for number in range(4)], fps, fps, 4) for fps in (2.0, 1.0, 1.0, 4.0)]
    tensors, texts = Tokenizer(processor, ADAPTER, {}).process([("video", clip) for clip in clips])
    assert tensors["video_second_per_grid"].tolist() == [1.0, 2.0, 2.0, 0.5]
    assert len(tensors["video_grid_thw"]) == len(texts) == 4


def test_sounds_are_whole_frames_and_at_least_a_window(hf_dir: Path) -> None:
    """A sound takes the same number of tokens alone and beside a longer one."""
    processor = ADAPTER.load_processor(str(hf_dir), PreprocessParameters(model_name_or_path=str(hf_dir)))
    limits = ADAPTER.limits(processor)
    rule = SoundRule(limits.sampling_rate, limits.max_audio_seconds, limits.min_audio_samples, limits.audio_multiple)
    lengths = [rule.samples(SoundFacts(16_000, length)) for length in (1, 16_001, 40 * 16_000)]
    assert lengths == [16_000, 16_160, 640_000]
    tokenizer = Tokenizer(processor, ADAPTER, {})
    sounds: list[Any] = [("audio", np.zeros(length, dtype=np.float32)) for length in lengths]
    together = tokenizer.process(sounds)[1]
    assert together == [tokenizer.process([sound])[1][0] for sound in sounds]


def test_a_part_is_found_by_its_own_name_too(model: Any) -> None:
    assert ModelHub.get(None, model.config) is ModelHub.get("qwen3_omni_moe", model.config)


def test_the_whole_is_written_again_in_another_dtype(model: Any, hf_dir: Path, tmp_path: Path) -> None:
    """Converted to bfloat16: every weight of the whole, under its name, and a config that says so."""
    target = tmp_path / "converted"
    count = export_from(open_weights(hf_dir), model, target, str(hf_dir), torch.bfloat16)
    written, before = weights_in(target), weights_in(hf_dir)
    assert count == len(before) and written.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(written[name], tensor.bfloat16()), name
    said = json.loads((target / "config.json").read_text())
    assert said["model_type"] == "qwen3_omni_moe"
    assert said["thinker_config"]["dtype"] == "bfloat16"
    loaded, info = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        target, output_loading_info=True
    )
    assert not info["missing_keys"] and loaded.dtype == torch.bfloat16


def test_sound_inside_videos_is_refused() -> None:
    from mindspeed_mm.configs.data_config import DatasetParam

    parameters = {"model_name_or_path": "x", "use_audio_in_video": True}
    basic = {"dataset": "rows.json"}
    with pytest.raises(ConfigError, match=r"use_audio_in_video.*give the sound as an audio of the row"):
        DatasetParam.from_dict(
            {"dataset_type": "huggingface", "basic_parameters": basic, "preprocess_parameters": parameters}
        )
