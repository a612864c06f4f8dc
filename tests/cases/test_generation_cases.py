"""Cases of generation models, through the real entry script; steps that compare gradients use SGD."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launch import launch_flags, metrics_of, run_entry
from tests.support.predictors.wan import CASES
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

SGD: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.05, "clip_grad": 0.0, "weight_decay": 0.0}
SEED = 42


def run(pool: RankPool, folder: Path, model: dict[str, Any], data: dict[str, Any], **flags: Any) -> Path:
    """Launch pretrain_sora.py; returns the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / name for name in ("model.json", "data.json", "tools.json", "fsdp2.yaml")}
    files["model.json"].write_text(json.dumps(model))
    files["data.json"].write_text(json.dumps(data))
    files["tools.json"].write_text("{}")
    files["fsdp2.yaml"].write_text("sharding_size: auto\n")
    settings = {"save": folder / "run", "seed": SEED, "num_workers": 0, **flags}
    pool.run(run_entry, launch_flags(files, **settings), "pretrain_sora.py", timeout=120)
    return folder / "run"


def weights_of(run_folder: Path) -> dict[str, torch.Tensor]:
    """What the run exported at its end."""
    from safetensors.torch import load_file

    (file,) = (run_folder / "hf").rglob("*.safetensors")
    return load_file(file)


def write_toy_features(folder: Path, rows: int) -> Path:
    """Random latents and text states of the tiny Wan, as the extraction would write them."""
    from mindspeed_mm.data.generation.feature_files import FeatureWriter

    case = CASES["t2v"]
    frames, height, width = case.latent[1:]
    with FeatureWriter(folder) as writer:
        for row in range(rows):
            sample = case.batch([row])
            tensors = {name: sample[name][0] for name in ("latents", "text.encoder_hidden_states")}
            writer.add(row, tensors, (4 * frames - 3, 8 * height, 8 * width))
    return folder


def plain_step(model: dict[str, Any], rows: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch of all rows, by diffusers' transformer and a plain loss."""
    import diffusers

    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.generation.sora_model import SoRAModel
    from mindspeed_mm.utils.sample_random import normals, sample_key, uniforms

    case = CASES["t2v"]
    with build_context(BuildContext(seed=SEED)):
        ours = SoRAModel(model)
    plain = diffusers.WanTransformer3DModel(**case.config)
    plain.load_state_dict(ours.predictor.state_dict())
    keys = [sample_key(SEED, row, 0) for row in range(rows)]
    batch = case.batch(list(range(rows)))
    noise, draws = normals(keys, "noise", case.latent), uniforms(keys, "timestep")
    text = {"encoder_hidden_states": batch["text.encoder_hidden_states"]}
    loss = case.plain(plain, batch["latents"], noise, draws, text, {})
    loss.backward()
    gradients = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    return loss.item(), {name: plain.state_dict()[name] - SGD["lr"] * value for name, value in gradients.items()}


def test_l04_accumulation_equals_one_batch(ranks1: RankPool, tmp_path: Path) -> None:
    """L04: micro-batches of 4, two a step: loss and gradients are those of one batch of 8, and of a plain loss."""
    model = CASES["t2v"].model_json("wan")
    model["predictor"]["train_from_scratch"] = True
    data = data_json(write_toy_features(tmp_path / "features", 8), cfg=0.0)
    loss, stepped = plain_step(model, 8)
    for size in (8, 4, 1):
        flags = {"micro_batch_size": size, "global_batch_size": 8, "train_iters": 1, "save_hf": True, **SGD}
        folder = run(ranks1, tmp_path / str(size), model, data, no_save_optim=True, **flags)
        (found,), _ = metrics_of(folder)
        assert found == pytest.approx(loss, rel=1e-6), size
        weights = weights_of(folder)
        for name, expected in stepped.items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_encoding_ahead_is_resumed_exactly(ranks1: RankPool, tmp_path: Path) -> None:
    """A checkpoint between two steps holds neither more nor less of the data than what was trained."""
    model = model_json(write_encoders(tmp_path / "encoders"), do_sample=True)
    data = data_json(write_clips(tmp_path / "clips", rows=6), cfg=0.3)
    flags = {"micro_batch_size": 1, "global_batch_size": 3, "train_iters": 4, "lr": "1e-2", "save_interval": 2}
    plain = metrics_of(run(ranks1, tmp_path / "plain", model, data, **flags))
    model["encoder_offload_interval"] = 2
    whole = run(ranks1, tmp_path / "whole", model, data, **flags)
    assert metrics_of(whole) == plain
    halfway = tmp_path / "halfway"
    shutil.copytree(whole, halfway)
    (halfway / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run(ranks1, tmp_path / "resumed", model, data, **flags, load=halfway)
    assert [values[2:] for values in plain] == list(metrics_of(resumed))
