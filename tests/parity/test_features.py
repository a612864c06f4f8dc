"""Training on features gives the losses of training on the clips that they were made of: the same bits in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import run_of
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders

SEED, ROWS, GLOBAL_BATCH = 42, 12, 4


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Clips of 7 to 9 frames, of which 5 are shown from a place that the seed decides."""
    return write_clips(tmp_path_factory.mktemp("clips"), rows=ROWS)


def extract(folder: Path, model: dict[str, Any], data: dict[str, Any], *words: str) -> Path:
    from mindspeed_mm.tools.cli import main

    folder.mkdir()
    files = {name: folder / f"{name}.json" for name in ("model", "data")}
    files["model"].write_text(json.dumps(model))
    files["data"].write_text(json.dumps(data))
    command = ["data", "extract-features", "--mm-model", str(files["model"]), "--mm-data", str(files["data"])]
    output = folder / "features"
    settings = ["--output", str(output), "--seed", str(SEED), "--num-workers", "0"]
    assert main([*command, *settings, *words]) == 0
    return output


def train(model: dict[str, Any], data: dict[str, Any], micro_batch_size: int = 2, steps: int = 3) -> list[float]:
    """Losses of the steps of one epoch, by the functions of pretrain_sora.py without its backend."""
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.configs.sora_config import SoRAModelConfig
    from mindspeed_mm.data.generation.providers import generation_data_provider
    from mindspeed_mm.data.start import DataStart
    from mindspeed_mm.models.generation.sora_model import SoRAModel, generation_rule

    flags = {"micro_batch_size": micro_batch_size, "global_batch_size": GLOBAL_BATCH, "num_workers": 0, "seed": SEED}
    run = run_of(data=GenerationDataConfig.from_dict(data), use_torch_fsdp2=True, **flags)
    rule = generation_rule(SoRAModelConfig.from_dict(model), SEED)
    loader, _, _ = generation_data_provider(run, DataStart(), GenerationDataConfig.from_dict(data), rule)
    trained = SoRAModel(model, num_microbatches=run.batch.num_microbatches)
    optimizer = torch.optim.AdamW(trained.predictor.parameters(), lr=1e-2)
    batches = iter(loader)
    losses = []
    for _ in range(steps):
        loss = 0.0
        for _ in range(run.batch.num_microbatches):
            output = trained(**trained.next_batch(batches))
            (output["loss"] / GLOBAL_BATCH).backward()
            loss += output["loss"].item() / GLOBAL_BATCH
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    loader.close()
    return losses


def on_features(model: dict[str, Any]) -> dict[str, Any]:
    """The same model.json for features: no encoder is named."""
    left = {k: v for k, v in model.items() if k not in ("ae", "text_encoder", "image_encoder")}
    left["ae"] = {"from_pretrained": model["ae"]["from_pretrained"]}
    return {**left, "load_video_features": True, "load_text_features": True}


@pytest.mark.parametrize(
    ("task", "do_sample", "size"), [("t2v", False, 2), ("t2v", True, 4), ("i2v", False, 4), ("i2v", True, 2)]
)
def test_losses_equal_those_of_training_on_clips(tmp_path, encoders, clips, task, do_sample, size):
    """Encoded in batches of the same size: kernels may round otherwise for one sample than for several."""
    model, data = model_json(encoders, task, do_sample=do_sample), data_json(clips, cfg=0.3)
    features = extract(tmp_path / "made", model, data, "--micro-batch-size", str(size))
    expected = train(model, data, size)
    assert train(on_features(model), data_json(features, cfg=0.3), size) == expected
    assert len(set(expected)) == 3
    assert train(on_features(model), data_json(features, cfg=0.0), size) != expected  # captions were left out


def test_pictures_among_clips_and_other_batch_sizes(tmp_path, encoders):
    """Of other batch sizes the same but for rounding; a batch that mixes shapes is cut to what they have in common."""
    clips = write_clips(tmp_path / "clips", rows=7, pictures=5)
    # a clip that is cut shorter could begin later: features have begun already
    model, data = model_json(encoders, "i2v"), data_json(clips, cfg=0.3, min_num_frames=1, zero_start=True)
    features = extract(tmp_path / "made", model, data)
    expected = train(model, data)
    assert train(on_features(model), data_json(features, cfg=0.3)) == pytest.approx(expected, rel=1e-5)


def test_latents_made_before_and_captions_encoded_while_training(tmp_path, encoders, clips):
    model, data = model_json(encoders), data_json(clips, cfg=0.3)
    features = extract(tmp_path / "made", model, data, "--micro-batch-size", "2", "--only", "video")
    found = train({**model, "load_video_features": True}, data_json(features, cfg=0.3))
    assert found == train(model, data)


def test_features_in_bf16(tmp_path, encoders, clips):
    model, data = model_json(encoders, "i2v", do_sample=True), data_json(clips, cfg=0.0)
    features = extract(tmp_path / "made", model, data, "--micro-batch-size", "2", "--dtype", "bf16")
    expected = train(model, data)
    found = train(on_features(model), data_json(features, cfg=0.0))
    # values have relative errors of up to 2^-9, which partly cancel in a mean; AdamW's first steps, which follow the
    # sign of gradients, enlarge what is left
    assert found[0] == pytest.approx(expected[0], rel=2e-3)
    assert found == pytest.approx(expected, rel=1e-2)
    assert found != expected


def test_encoding_ahead_changes_no_loss(encoders, clips):
    model, data = model_json(encoders, "i2v", do_sample=True), data_json(clips, cfg=0.3)
    one_by_one = train(model, data, micro_batch_size=1)
    for interval in (3, 8):
        assert train({**model, "encoder_offload_interval": interval}, data, micro_batch_size=1) == one_by_one
