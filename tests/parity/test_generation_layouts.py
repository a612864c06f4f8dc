"""Every layout of a generation run against a hand-written diffusers loop: losses, gradient norms, averaged weights.

The real entry script runs in the workers on real clips, with caption dropout and latents drawn from the posterior; the
loop is written with diffusers, transformers and torch alone. Only what is random of a sample (noise, timestep, whether
its caption is left out) is taken from where it is defined, `utils/sample_random`.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.compiled import run_entry_compiled
from tests.support.launch import launch_flags, metrics_of, run_entry
from tests.support.tiny_diffusers import build_diffusers
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders

ROWS, STEPS, SEED, SHIFT = 8, 3, 42, 3.0
BLOCKS = ["predictor.blocks.{*}"]
DROPOUT = 0.3
OFFLOAD = {"activation_offload_modules": BLOCKS}


@dataclass(frozen=True)
class Case:
    """A layout: number of ranks, rows of a micro-batch, and what differs in the files."""

    world: int = 1
    micro: int = 1
    fsdp2: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


CASES = {
    "1 process, one batch": Case(1, 8),
    "1 process, accumulation": Case(1, 2),
    "2 processes, accumulation": Case(2, 2),
    "4 processes": Case(4, 2),
    "4 processes, HSDP, accumulation": Case(4, 1, {"sharding_size": 2}),
    "2 processes, recompute, offload": Case(
        2, 4, {"recompute_modules": [BLOCKS[0].replace("*", "0")], "use_reentrant": False, **OFFLOAD}
    ),
    "1 process, compiled": Case(1, 2, {"compile": True, "compile_backend": "aot_eager"}),
    "2 processes, compiled": Case(2, 2, {"compile": True}),
    "4 processes, compiled, recompute": Case(
        4, 1, {"compile": True, "compile_backend": "aot_eager", "recompute_modules": BLOCKS, "use_reentrant": False}
    ),
    "2 processes, encoders ahead": Case(2, 1, model={"encoder_offload_interval": 3}),
}


@functools.cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="generation-"))
    write_encoders(folder / "encoders")
    build_diffusers("wan", seed=1).save_pretrained(folder / "transformer")
    write_clips(folder / "clips", rows=ROWS, frames=5)
    return folder


def files_of(case: Case, folder: Path) -> dict[str, Path]:
    made = workspace()
    model = model_json(made / "encoders", do_sample=True, use_ema=True, **case.model)
    model["predictor"] = {"from_pretrained": str(made / "transformer")}
    model["diffusion"] = {
        "model_id": "flow_matching",
        "shift": SHIFT,
        "sampling": "logit_normal",
        "weighting": "uniform",
    }
    model["text_encoder"]["ucg_rate"] = DROPOUT
    data = data_json(made / "clips" / "captions.jsonl", zero_start=True)
    contents = {
        "model.json": json.dumps(model),
        "data.json": json.dumps(data),
        "tools.json": "{}",
        "fsdp2.yaml": yaml.safe_dump({"sharding_size": "auto", "sub_modules_to_wrap": BLOCKS, **case.fsdp2}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in contents}


def clips_and_captions() -> tuple[torch.Tensor, list[str]]:
    """The clips as PyAV decodes them, [rows, 3, frames, height, width] in [-1, 1]."""
    import av

    folder = workspace() / "clips"
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    clips = []
    for row in rows:
        with av.open(str(folder / row["path"])) as container:
            frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
        clips.append(torch.stack(frames[:5]).permute(3, 0, 1, 2).float() / 127.5 - 1)
    return torch.stack(clips), [row["cap"] for row in rows]


@functools.cache
def reference() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms before clipping, and averaged weights of a plain loop."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(workspace() / "transformer").train()
    losses, norms, average = train_plainly(model)
    average.copy_to(model.parameters())
    return losses, norms, model.state_dict()


def train_plainly(model: Any) -> tuple[list[float], list[float], Any]:
    """Train what of a diffusers transformer isn't frozen: losses, norms before clipping, and diffusers' EMAModel."""
    from diffusers import AutoencoderKLWan, WanPipeline
    from diffusers.training_utils import EMAModel
    from transformers import AutoTokenizer, UMT5EncoderModel

    from mindspeed_mm.utils.sample_random import normal, sample_key, uniform

    folder = workspace()
    vae = AutoencoderKLWan.from_pretrained(folder / "encoders" / "vae")
    text_encoder = UMT5EncoderModel.from_pretrained(folder / "encoders" / "text_encoder").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "encoders" / "tokenizer")
    pipeline = WanPipeline(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=None, transformer=None)
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
    )
    average = EMAModel(parameters, decay=0.9999)
    clips, captions = clips_and_captions()
    with torch.no_grad():
        posterior = vae.encode(clips).latent_dist
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    deviation = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    losses, norms = [], []
    for step in range(STEPS):  # a global batch is the whole data set, so a step is an epoch
        keys = [sample_key(SEED, row, step) for row in range(ROWS)]
        told = ["" if uniform(key, "caption") < DROPOUT else text for key, text in zip(keys, captions, strict=True)]
        with torch.no_grad():
            states, _ = pipeline.encode_prompt(told, do_classifier_free_guidance=False, max_sequence_length=12)
        shape = posterior.mean.shape[1:]
        drawn = torch.stack([normal(key, "posterior", shape) for key in keys])
        latents = (posterior.mean + posterior.std * drawn - mean) / deviation
        noise = torch.stack([normal(key, "noise", shape) for key in keys])
        positions = torch.tensor([uniform(key, "timestep") for key in keys], dtype=torch.float64)
        sigmas = torch.sigmoid(torch.distributions.Normal(0.0, 1.0).icdf(positions))
        sigmas = (SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)).float().view(-1, 1, 1, 1, 1)
        noisy = (1 - sigmas) * latents + sigmas * noise
        predicted = model(hidden_states=noisy, timestep=sigmas.flatten() * 1000, encoder_hidden_states=states).sample
        loss = torch.nn.functional.mse_loss(predicted, noise - latents)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        average.step(parameters)
    return losses, norms, average


# what other rows of the table cover as well
BY_NAME = {"1 process, one batch", "2 processes, accumulation", "4 processes"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in BY_NAME or "compiled" in name else []) for name in CASES],
)
def test_equals_a_hand_written_loop(name: str, pools: dict[int, Any], tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    case = CASES[name]
    flags = launch_flags(
        files_of(case, tmp_path / "files"),
        micro_batch_size=case.micro,
        global_batch_size=ROWS,
        train_iters=STEPS,
        seed=SEED,
        save=tmp_path / "run",
        save_hf=True,
        no_save_optim=True,
    )
    if "compile" in case.fsdp2:
        assert min(pools[case.world].run(run_entry_compiled, flags, "pretrain_sora.py", timeout=170)) > 0
    else:
        pools[case.world].run(run_entry, flags, "pretrain_sora.py", timeout=120)
    losses, norms = metrics_of(tmp_path / "run")
    expected_losses, expected_norms, expected_average = reference()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=2e-5)
    average = WanTransformer3DModel.from_pretrained(transformer_of(tmp_path / "run" / "hf_ema"))
    assert distance_moved(average, expected_average) < 1e-3


def distance_moved(found: Any, expected: dict[str, torch.Tensor]) -> float:
    """L2 distance of averaged weights from the expected ones, over the distance of these from the first weights.

    Element by element they can't be compared: Adam divides a gradient that is next to nothing by itself, and rounding
    decides what comes out.
    """
    from diffusers import WanTransformer3DModel

    first = WanTransformer3DModel.from_pretrained(workspace() / "transformer").state_dict()
    weights = found.state_dict()
    wrong = sum(float((weights[name] - value).double().square().sum()) for name, value in expected.items())
    moved = sum(float((first[name] - value).double().square().sum()) for name, value in expected.items())
    return (wrong / moved) ** 0.5


def transformer_of(export: Path) -> Path:
    """The trained part of an export: of a whole pipeline, its folder transformer."""
    return export / "transformer" if (export / "transformer").is_dir() else export


def test_the_export_samples_what_the_run_samples(pools: dict[int, Any], tmp_path: Path) -> None:
    """Two ranks train and export; the folder alone makes the pixels that the trained model makes inside."""
    from diffusers import DiffusionPipeline

    files = files_of(Case(), tmp_path / "files")
    flags = launch_flags(
        files, micro_batch_size=4, global_batch_size=ROWS, train_iters=1, seed=SEED, save=tmp_path / "run", save_hf=True
    )
    pools[2].run(run_entry, flags, "pretrain_sora.py", timeout=120)
    inside = pixels_inside(files["model.json"], files["data.json"], tmp_path / "run")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "run" / "hf")
    # weights mapped from a file are aligned otherwise in memory, and some processors then add in another order
    torch.testing.assert_close(pixels_of(pipeline), inside, rtol=0, atol=1e-5)
    averaged = DiffusionPipeline.from_pretrained(tmp_path / "run" / "hf_ema")
    torch.testing.assert_close(pixels_of(averaged), inside, rtol=0, atol=1e-5)  # after one step they are the weights


def pixels_inside(model_file: Path, data_file: Path, run: Path) -> torch.Tensor:
    """What the model of model.json, with the weights of the run's checkpoint, makes of a prompt."""
    from mindspeed_mm.configs.sora_inference import SoRAInferenceConfig
    from mindspeed_mm.tasks.generation import build_pipeline

    config = SoRAInferenceConfig.from_file(str(model_file))
    return pixels_of(build_pipeline(config, load=run, ema=False).pipeline)


def pixels_of(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    made = pipeline(
        ["a red cat"], height=32, width=32, num_frames=5, latents=noise, num_inference_steps=3, guidance_scale=2.0,
        max_sequence_length=12, output_type="pt",
    )  # fmt: skip
    return made.frames
