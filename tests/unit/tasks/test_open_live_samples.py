"""What --sample-interval draws is settled before a model is built, and what can't be drawn is refused then."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.data.loading.providers import build_run_data
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.tasks.generation.live_samples import LiveSamples, open_live_samples
from mindspeed_mm.tasks.train.generation import train_valid_test_datasets_provider
from mindspeed_mm.utils.errors import ConfigError
from tests.support.runs import run_of
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips"), rows=8)


def opened(model: dict[str, Any], data: dict[str, Any], **flags: Any) -> LiveSamples | None:
    run = run_of(
        model=SoRAModelConfig.from_dict(model),
        data=GenerationDataConfig.from_dict(data),
        files={"model": model, "data": data},
        **{
            "use_torch_fsdp2": True,
            "save": "run",
            "sample_interval": 5,
            "global_batch_size": 2,
            "num_workers": 0,
            **flags,
        },
    )
    with closing(build_run_data(train_valid_test_datasets_provider, run, DataStart())) as found:
        return open_live_samples(run, found)


def test_prompts_and_sizes_are_those_of_rows_or_of_flags(
    encoders: Path, clips: Path, tmp_path: Path, said: list[str]
) -> None:
    model, data = model_json(encoders), data_json(clips)
    assert opened(model, data, sample_interval=None) is None
    drawer = opened(model, data)
    assert drawer is not None
    assert [request.prompt for request in drawer.requests] == [
        "a dog",
        "runs blue there",
        "blue is runs fast",
        "there runs slow dog fast",
    ]
    assert drawer.options.size == (5, 32, 32) and drawer.options.steps == 20 and drawer.options.seed == 3

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(10)))
    drawer = opened(model, data, sample_prompts=str(prompts), sample_size=[1, 64, 32], sample_guidance_scale=2.0)
    assert drawer is not None
    assert [request.prompt for request in drawer.requests] == [f"prompt {number}" for number in range(8)]
    assert drawer.options.size == (1, 64, 32) and drawer.options.guidance == (2.0,)
    assert any("the first 8 of 10 prompts are drawn" in message for message in said)


def test_a_model_that_begins_with_a_picture_gets_that_of_a_row(encoders: Path, clips: Path) -> None:
    drawer = opened(model_json(encoders, "i2v"), data_json(clips), sample_size=[5, 16, 48])
    assert drawer is not None
    assert [request.image.size for request in drawer.requests] == 4 * [(48, 16)]


def test_what_cannot_be_drawn_is_refused(encoders: Path, clips: Path) -> None:
    with pytest.raises(ConfigError, match=r"size 4 30 32 can't be made with AutoencoderKLWan: .* nearest is 5 32 32"):
        opened(model_json(encoders), data_json(clips), sample_size=[4, 30, 32])
    of_features = {"load_video_features": True, "load_text_features": True}
    without = {key: value for key, value in model_json(encoders).items() if key != "text_encoder"} | of_features
    with pytest.raises(ConfigError, match=r"--sample-interval 5: the run trains on features, .*text_encoder"):
        opened(without, data_json(clips))
