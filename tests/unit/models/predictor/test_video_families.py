"""Families of video models: what they tell the transformer is what diffusers' pipelines tell it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_mm.configs.sora_config import AeConfig, SoRAModelConfig
from mindspeed_mm.models.generation.ae.autoencoder import Autoencoder, _strides
from mindspeed_mm.models.generation.diffusion.build import build_objective
from mindspeed_mm.models.generation.parts import FrozenImageEncoder
from mindspeed_mm.models.generation.sora_model import resolve_predictor
from mindspeed_mm.utils.errors import ConfigError
from tests.support import tiny_video_pipelines as tiny
from tests.support.predictors import cases

CPU = torch.device("cpu")
#: label of a case → its pipeline, further arguments of a call, pixels of a clip
PIPELINES = {
    "hunyuanvideo-t2v": (tiny.hunyuanvideo, {"guidance_scale": 6.0, "max_sequence_length": 30}, (5, 32, 48)),
    "hunyuanvideo15-t2v": (lambda: tiny.hunyuanvideo15("t2v"), {}, (5, 32, 48)),
    "hunyuanvideo15-i2v": (lambda: tiny.hunyuanvideo15("i2v"), {}, (5, 32, 32)),
    "cogvideox-t2v": (lambda: tiny.cogvideox("cogvideox-t2v"), {"guidance_scale": 1.0}, (9, 32, 64)),
    "cogvideox-t2v-rotary": (lambda: tiny.cogvideox("cogvideox-t2v-rotary"), {"guidance_scale": 1.0}, (5, 48, 32)),
    "cogvideox-t2v-1.5": (lambda: tiny.cogvideox("cogvideox-t2v-1.5"), {"guidance_scale": 1.0}, (5, 48, 32)),
    "cogvideox-i2v": (lambda: tiny.cogvideox("cogvideox-i2v"), {"guidance_scale": 1.0}, (9, 32, 64)),
    "cogvideox-i2v-1.5": (
        lambda: tiny.cogvideox("cogvideox-i2v-1.5", inverted=True),
        {"guidance_scale": 1.0},
        (9, 48, 32),
    ),
    "ltx-t2v": (lambda: tiny.ltx("t2v"), {"guidance_scale": 1.0}, (9, 64, 96)),
    "ltx-i2v": (lambda: tiny.ltx("i2v"), {"guidance_scale": 1.0}, (9, 64, 96)),
}
#: longest caption of the tiny pipelines
LENGTHS = {"hunyuanvideo": 30, "hunyuanvideo15": None, "cogvideox": 6, "ltx": 20}


class Recorder:
    """Stands in front of a transformer and keeps what it is told."""

    def __init__(self, model):
        self.told, self._forward = [], model.forward
        model.forward = self

    def __call__(self, **kwargs):
        self.told.append({k: v for k, v in kwargs.items() if v is not None and k not in ("return_dict",)})
        return self._forward(**kwargs)


def _family(label):
    name, case = cases()[label]
    config = SoRAModelConfig.from_dict(case.model_json(name))
    return resolve_predictor(config)[0], config


def _parts(pipeline):
    encoder = getattr(pipeline, "image_encoder", None)
    processor = getattr(pipeline, "feature_extractor", None)
    return SimpleNamespace(
        ae=Autoencoder(pipeline.vae, AeConfig()), image_encoder=encoder and FrozenImageEncoder(encoder, processor)
    )


def _clip(frames, height, width):
    """A clip of 8-bit colours, and its first frame as a picture."""
    from PIL import Image

    levels = torch.randint(0, 256, (1, 3, frames, height, width), generator=torch.Generator().manual_seed(3))
    return levels / 127.5 - 1, Image.fromarray(levels[0, :, 0].permute(1, 2, 0).byte().numpy())


@pytest.fixture(autouse=True)
def _the_mode(monkeypatch):
    """Pipelines that draw a picture's latents take the middle of the posterior, as training does."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())


@pytest.mark.parametrize("label", PIPELINES)
def test_predict_tells_the_transformer_what_the_pipeline_does(label):
    torch.manual_seed(0)
    make, more, shape = PIPELINES[label]
    pipeline, (family, _) = make(), _family(label)
    pipeline.set_progress_bar_config(disable=True)
    (frames, height, width), (video, picture) = shape, _clip(*shape)
    sizes = {"num_frames": frames, "height": height, "width": width}
    if family.task == "i2v":
        more = {**more, "image": picture}
    if label == "hunyuanvideo15-i2v":  # it takes the picture's size
        sizes = {"num_frames": frames}
    if family.names[0] in ("ltx", "cogvideox"):
        more = {**more, "max_sequence_length": LENGTHS[family.names[0]]}
    recorder = Recorder(pipeline.transformer)
    with torch.no_grad():
        pipeline(prompt=tiny.CAPTIONS[1], num_inference_steps=2, output_type="latent", **sizes, **more)
        theirs = recorder.told[0]
        noisy = theirs["hidden_states"]
        if family.names[0] == "cogvideox":
            noisy = noisy.transpose(1, 2)
        if family.names[0] == "ltx":
            noisy = pipeline._unpack_latents(noisy, 2, height // 32, width // 32)
        noisy = noisy[:, : family.latent_channels]
        parts = _parts(pipeline)
        latents = parts.ae.encode(video).mean
        assert family.padded(latents).shape == noisy.shape
        conditions = family.conditions(parts, video, latents)
        if "known" in conditions:  # the first frame is put in place before the transformer is asked
            assert bool((conditions["known"] == 0).any())
            first = conditions["known_latents"][:, :, :1]
            torch.testing.assert_close(first, noisy[:, :, :1], rtol=1e-5, atol=1e-5)
        text = family.text_states(pipeline, tiny.CAPTIONS[1:], CPU, LENGTHS[family.names[0]])
        timesteps = theirs["timestep"] if theirs["timestep"].dim() == 1 else theirs["timestep"].amax(1)
        guidance = 6.0
        predicted = family.predict(pipeline.transformer, noisy, timesteps, text, conditions, guidance)
    ours = recorder.told[-1]
    assert len(recorder.told) == 3
    assert predicted.shape == noisy.shape
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("label", ["hunyuanvideo-t2v", "hunyuanvideo15-t2v", "cogvideox-t2v", "ltx-t2v"])
def test_captions_of_a_batch_are_encoded_one_by_one(label):
    torch.manual_seed(0)
    pipeline, (family, _) = PIPELINES[label][0](), _family(label)
    length = LENGTHS[family.names[0]]
    with torch.no_grad():
        together = family.text_states(pipeline, [*tiny.CAPTIONS, ""], CPU, length)
        apart = [family.text_states(pipeline, [caption], CPU, length) for caption in [*tiny.CAPTIONS, ""]]
    for name, value in together.items():
        torch.testing.assert_close(value, torch.cat([one[name] for one in apart]), rtol=1e-5, atol=1e-5)
    states = together["encoder_hidden_states"]
    assert not torch.allclose(states[0], states[1])


def test_a_longest_caption_counts_for_hunyuanvideo15():
    pipeline, (family, _) = tiny.hunyuanvideo15("t2v"), _family("hunyuanvideo15-t2v")
    with torch.no_grad():
        assert family.text_states(pipeline, tiny.CAPTIONS, CPU, 7)["encoder_attention_mask"].shape == (2, 7)


@pytest.mark.parametrize("label", ["cogvideox-t2v", "cogvideox-t2v-rotary"])
def test_the_schedule_of_cogvideox_is_diffusers(label):
    from diffusers import CogVideoXDDIMScheduler

    family, config = _family(label)
    scheduler = CogVideoXDDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=3.0 if label == "cogvideox-t2v" else 1.0,
    )
    objective = build_objective(config.diffusion, family.defaults, "model.json")
    latents, noise = torch.randn(2, 6, 4, 2, 3, 3)
    draws = torch.tensor([0.0, 0.0009, 0.25, 0.5, 0.75, 0.9999], dtype=torch.float64)
    noised = objective.noised(latents, noise, draws, 1)
    assert noised.timesteps.tolist() == [999, 999, 749, 499, 249, 0]
    torch.testing.assert_close(noised.noisy, scheduler.add_noise(latents, noise, noised.timesteps))
    torch.testing.assert_close(noised.target, scheduler.get_velocity(latents, noise, noised.timesteps))
    assert not noised.timesteps.is_floating_point()
    assert objective.sampling_scheduler().config.timestep_spacing == "trailing"


def test_a_family_of_flows_may_be_trained_by_ddpm():
    from diffusers import DDPMScheduler

    name, case = cases()["ltx-t2v"]
    config = SoRAModelConfig.from_dict({**case.model_json(name), "diffusion": {"model_id": "ddpm"}})
    objective = build_objective(config.diffusion, resolve_predictor(config)[0].defaults, "model.json")
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    latents, noise = torch.randn(2, 1, 4, 2, 3, 3)
    noised = objective.noised(latents, noise, torch.tensor([0.4], dtype=torch.float64), 1)
    torch.testing.assert_close(noised.noisy, scheduler.add_noise(latents, noise, noised.timesteps))
    torch.testing.assert_close(noised.target, noise)


@pytest.mark.parametrize("label", ["hunyuanvideo-t2v", "hunyuanvideo15-t2v", "ltx-t2v"])
def test_noise_of_flows_is_the_schedulers(label):
    """Uniform draws on the grid of a sampling schedule give its sigmas, timesteps and noisy samples."""
    name, case = cases()[label]
    config = SoRAModelConfig.from_dict({**case.model_json(name), "diffusion": {"sampling": "uniform"}})
    family = resolve_predictor(config)[0]
    objective = build_objective(config.diffusion, family.defaults, "model.json")
    tokens, grid = 2000, [1.0, 0.75, 0.5, 0.25]
    scheduler = objective.sampling_scheduler()
    mean = 0.95 + 1.1 * (tokens - 1024) / 3072
    scheduler.register_to_config(shift_terminal=None)
    scheduler.set_timesteps(sigmas=grid, mu=mean)
    latents, noise = torch.randn(2, 4, 4, 2, 3, 3)
    noised = objective.noised(latents, noise, 1 - torch.tensor(grid, dtype=torch.float64), tokens)
    torch.testing.assert_close(noised.timesteps, scheduler.timesteps)
    torch.testing.assert_close(noised.noisy, scheduler.scale_noise(latents, scheduler.timesteps, noise))
    torch.testing.assert_close(noised.target, noise - latents)
    expected = {"hunyuanvideo": 7.0, "hunyuanvideo15": 3.0, "ltx": float(torch.tensor(mean).exp())}[name]
    torch.testing.assert_close(float(noised.timesteps[2]) / 1000, expected / (1 + expected))


@pytest.mark.parametrize("label", ["hunyuanvideo-t2v", "hunyuanvideo15-t2v", "cogvideox-t2v", "ltx-t2v"])
def test_strides_and_autoencoder_are_the_pipelines(label):
    pipeline, (family, _) = PIPELINES[label][0](), _family(label)
    assert family.defaults.ae == type(pipeline.vae).__name__
    assert family.defaults.strides == _strides(pipeline.vae)


def test_frames_in_front_make_whole_tokens():
    family, _ = _family("cogvideox-t2v-1.5")
    latents = torch.randn(2, 4, 3, 4, 4)
    padded = family.padded(latents)
    torch.testing.assert_close(padded, torch.cat([latents[:, :, :1], latents], 2), rtol=0, atol=0)
    assert family.padded(padded) is padded
    assert _family("cogvideox-t2v")[0].padded(latents) is latents


@pytest.mark.parametrize("label", ["hunyuanvideo15-i2v", "wan-i2v"])
def test_a_picture_needs_its_encoder(label, tmp_path):
    """Said before anything is built or loaded; the published place of the encoder is known as well."""
    from mindspeed_mm.models.generation.sora_model import SoRAModel

    name, case = cases()[label]
    content = {**case.model_json(name), "load_video_features": False}
    with pytest.raises(ConfigError, match=r"'image_encoder' is missing: this .* is conditioned on the first frame"):
        SoRAModel(content)
    SoRAModel({**content, "ae": {"i2v_processor": {"image_encoder": str(tmp_path)}}})


PUBLISHED = {
    "model_id": "hunyuanvideo15dit",
    "task_type": "i2v",
    "patch_size": [1, 1, 1],
    "in_channels": 32,
    "out_channels": 32,
    "hidden_size": 2048,
    "num_heads": 16,
    "mm_double_blocks_depth": 54,
    "mm_single_blocks_depth": 0,
    "mlp_width_ratio": 4,
    "mlp_act_type": "gelu_tanh",
    "qkv_bias": True,
    "qk_norm": True,
    "qk_norm_type": "rms",
    "rope_dim_list": [16, 56, 56],
    "rope_theta": 256,
    "guidance_embed": False,
    "text_states_dim": 3584,
    "text_states_dim_2": None,
    "vision_states_dim": 1152,
    "glyph_byT5_v2": True,
    "text_projection": "single_refiner",
    "text_pool_type": None,
    "vision_projection": "linear",
    "concat_condition": True,
    "use_meanflow": False,
    "use_cond_type_embedding": True,
    "use_attention_mask": True,
    "is_reshape_temporal_channels": False,
    "attn_mode": "flash2",
}


def _published(**changed):
    predictor = {**PUBLISHED, **changed}
    return resolve_predictor(SoRAModelConfig.from_dict({"predictor": predictor, "diffusion": {}}))


def test_published_keys_of_hunyuanvideo15_make_diffusers_model():
    from diffusers import HunyuanVideo15Transformer3DModel

    family, structure, source = _published()
    assert (family.task, source) == ("i2v", None)
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel.from_config(structure)
        default = HunyuanVideo15Transformer3DModel()
    count = sum(p.numel() for p in model.parameters())
    assert count == sum(p.numel() for p in default.parameters()) == 8_326_608_160
    assert dict(model.config).items() >= {k: v for k, v in default.config.items() if not k.startswith("_")}.items()
    smaller = _published(hidden_size=256, num_heads=2, mm_double_blocks_depth=3, in_channels=8, out_channels=8)[1]
    assert (smaller["num_layers"], smaller["in_channels"], smaller["attention_head_dim"]) == (3, 17, 128)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mm_single_blocks_depth": 4}, "'predictor.mm_single_blocks_depth' is 4; .* has 0"),
        ({"guidance_embed": True}, "'predictor.guidance_embed' is True; .* has False"),
        ({"use_meanflow": True}, "'predictor.use_meanflow' is True; .* has False"),
        ({"text_pool_type": "mean"}, "'predictor.text_pool_type' is 'mean'; .* has null"),
        ({"attn_mode": "flex-block-attn"}, "sparse attention is not supported: write 'flash2'"),
        ({"vision_projection": "linear-none"}, "expected 'linear' for i2v"),
        ({"hidden_size": 2000, "head_dim": 128}, "expected num_heads × head_dim, 16 × 128"),
        ({"patch_size": [1, 1, 2]}, "as many rows as columns"),
        ({"freq_dim": 256}, "'predictor.freq_dim' is no structure key of hunyuanvideo15dit"),
    ],
)
def test_published_keys_that_diffusers_has_no_place_for(changed, said):
    with pytest.raises(ConfigError, match=said):
        _published(**changed)


def test_mean_flows_of_a_diffusers_configuration_are_refused():
    predictor = {"model_id": "hunyuanvideo15", "config": {"use_meanflow": True}}
    with pytest.raises(ConfigError, match="training of mean flows is not supported"):
        resolve_predictor(SoRAModelConfig.from_dict({"predictor": predictor}))
