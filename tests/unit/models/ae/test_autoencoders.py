"""Every family's autoencoder: strides, normalised latents that its pipeline decodes, drawn latents, tiles, messages."""

from __future__ import annotations

import json

import pytest
import torch

from mindspeed_mm.configs.sora_config import AeConfig
from mindspeed_mm.models.generation.ae.autoencoder import (
    CLASSES,
    PUBLISHED_AUTOENCODERS,
    autoencoder_strides,
    open_autoencoder,
)
from mindspeed_mm.utils.errors import CheckpointError, ConfigError, DataError
from tests.support import tiny_image_pipelines as pictures
from tests.support import tiny_video_pipelines as videos

#: name → its pipeline, further arguments of a call, a clip's shape, strides
PIPELINES = {
    "wan-2.1": (pictures.wan, {}, (5, 32, 48), (4, 8)),
    "wan-2.2": (lambda: pictures.wan(compressed=True), {}, (5, 32, 48), (4, 16)),
    "hunyuanvideo": (videos.hunyuanvideo, {"max_sequence_length": 30}, (5, 32, 48), (4, 8)),
    "hunyuanvideo15": (lambda: videos.hunyuanvideo15("t2v"), {}, (5, 32, 48), (4, 16)),
    "cogvideox": (lambda: videos.cogvideox("cogvideox-t2v"), {}, (9, 32, 48), (4, 8)),
    "ltx": (lambda: videos.ltx("t2v"), {"max_sequence_length": 20}, (9, 64, 96), (8, 32)),
    "flux": (pictures.flux, {}, (1, 32, 48), (1, 8)),
    "sd3": (pictures.sd3, {}, (1, 32, 48), (1, 8)),
    "qwenimage": (pictures.qwenimage, {"true_cfg_scale": 1.0}, (1, 32, 48), (4, 8)),
}


@pytest.fixture
def pipeline(request):
    torch.manual_seed(0)
    return PIPELINES[request.param][0]()


def _clip(frames, height, width, batch=1):
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def _stored(model, tmp_path, **config):
    model.save_pretrained(tmp_path / "vae")
    return open_autoencoder(AeConfig(from_pretrained=str(tmp_path / "vae"), **config), "model.json")


def _sampled(pipeline, name, latents, more, shape):
    """What the pipeline shows of latents when its transformer changes nothing: [frames, 3, height, width] in [0, 1]."""
    frames, height, width = shape
    if name == "cogvideox":  # its schedule has no prediction that changes nothing
        decoded = pipeline.decode_latents(latents.transpose(1, 2))
        return pipeline.video_processor.postprocess_video(decoded, output_type="pt")[0]
    channels = latents.shape[1]
    rows, columns = latents.shape[-2:]
    if name in ("flux", "qwenimage"):
        latents = pipeline._pack_latents(latents[:, :, 0], 1, channels, rows, columns)
    elif name == "sd3":
        latents = latents[:, :, 0]
    elif name == "ltx":
        latents = pipeline._pack_latents(latents, 1, 1)
    pipeline.transformer.forward = lambda hidden_states, **told: (
        torch.zeros_like(hidden_states[:, :channels] if hidden_states.dim() > 3 else hidden_states),
    )
    pipeline.set_progress_bar_config(disable=True)
    sizes = {} if frames == 1 else {"num_frames": frames}
    if name == "hunyuanvideo15":
        pipeline.scheduler.set_shift(1.0)
    else:
        more = {"guidance_scale": 1.0, **more} if name != "qwenimage" else more
    made = pipeline(
        prompt=videos.CAPTIONS[0],
        height=height,
        width=width,
        latents=latents,
        num_inference_steps=2,
        output_type="pt",
        **sizes,
        **more,
    )
    return made.images if frames == 1 else made.frames[0]


@pytest.mark.parametrize(("pipeline", "name"), [(n, n) for n in PIPELINES], indirect=["pipeline"])
def test_the_pipeline_undoes_what_training_normalised(pipeline, name, tmp_path):
    _, more, shape, strides = PIPELINES[name]
    ae, model = _stored(pipeline.vae, tmp_path), pipeline.vae
    video = _clip(*shape)
    latents = ae.encode(video).mean
    frames, height, width = shape
    rows, columns = height // strides[1], width // strides[1]
    assert latents.shape == (1, ae.channels, (frames - 1) // strides[0] + 1, rows, columns)
    assert latents.dtype == torch.float32
    with torch.no_grad():
        raw = model.encode(video[:, :, 0] if name in ("flux", "sd3") else video).latent_dist.mean
        expected = model.decode(raw, return_dict=False)[0]
    expected = expected.reshape(1, 3, frames, height, width)
    assert not torch.allclose(raw.reshape(latents.shape), latents)
    torch.testing.assert_close(ae.decode(latents), expected, rtol=1e-4, atol=1e-5)
    shown = _sampled(pipeline, name, latents, more, shape)
    torch.testing.assert_close(shown, (expected[0].transpose(0, 1) / 2 + 0.5).clamp(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config", [{"base_dim": 8}, {"_class_name": "UNet2DModel"}, {"_class_name": "AutoencoderKLGone"}]
)
def test_strides_of_a_directory_of_another_class(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if "_class_name" not in config:  # it is the class of the family's pipeline
        assert autoencoder_strides(None, tmp_path, (3, 7), "AutoencoderKLWan") == (4, 8)
        return
    with pytest.raises(ConfigError, match=f"holds a {config['_class_name']}; expected one of AutoencoderKL"):
        autoencoder_strides(AeConfig(from_pretrained=str(tmp_path)), None, (3, 7), "AutoencoderKLWan")


@pytest.mark.parametrize(("pipeline", "name"), [(n, n) for n in PIPELINES], indirect=["pipeline"])
def test_strides_drawn_latents_and_precision(pipeline, name, tmp_path):
    _, _, shape, strides = PIPELINES[name]
    ae = _stored(pipeline.vae, tmp_path, do_sample=True)
    assert (ae.temporal_stride, ae.spatial_stride) == strides
    described = AeConfig(from_pretrained=str(tmp_path / "vae"))
    assert autoencoder_strides(described, None, (3, 7)) == strides
    assert autoencoder_strides(None, tmp_path / "vae", (3, 7)) == strides
    assert type(pipeline.vae).__name__ in CLASSES
    video = _clip(*shape)
    encoded = ae.encode(video)
    with torch.no_grad():
        posterior = pipeline.vae.encode(video[:, :, 0] if name in ("flux", "sd3") else video).latent_dist
    drawn = posterior.sample(generator=torch.Generator().manual_seed(5))
    draws = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(5)).reshape(encoded.mean.shape)
    expected = (drawn.reshape(draws.shape) - ae._shift) * ae._scale
    torch.testing.assert_close(encoded.mean + encoded.std * draws, expected, rtol=1e-5, atol=1e-5)
    assert not any(p.requires_grad for p in ae.model.parameters()) and not ae.model.training
    low = open_autoencoder(described.model_copy(update={"dtype": "bf16"}), "model.json")
    assert low.model.dtype == torch.bfloat16
    in_low = low.encode(video)
    assert in_low.mean.dtype == torch.float32 and in_low.std is None
    torch.testing.assert_close(in_low.mean, encoded.mean, rtol=0.2, atol=0.2)


TILES = {
    "tile_sample_min_height": 32,
    "tile_sample_min_width": 32,
    "tile_sample_stride_height": 16,
    "tile_sample_stride_width": 16,
}
#: one of each way that a class is told of tiles; the others in the whole tables
_TILED_OFTEN = ("wan-2.2", "hunyuanvideo15", "cogvideox", "flux")
TILED = [pytest.param(n, n, marks=() if n in _TILED_OFTEN else pytest.mark.full) for n in PIPELINES if n != "ltx"]


@pytest.mark.parametrize(("pipeline", "name"), TILED, indirect=["pipeline"])
def test_tiles_are_as_large_and_as_far_apart_as_said(pipeline, name, tmp_path):
    frames, _, _ = PIPELINES[name][2]
    stride = PIPELINES[name][3][1]
    plain = _stored(pipeline.vae, tmp_path)
    described = {"from_pretrained": str(tmp_path / "vae"), "tiling_param": TILES}
    tiled = open_autoencoder(AeConfig(use_tiling=True, **described), "model.json")
    off = open_autoencoder(AeConfig(**described), "model.json")
    # Wan 2.2 folds two by two pixels before it makes tiles
    height, width = (128, 128) if name == "wan-2.2" else (64, 80)
    video = _clip(frames, height, width)
    whole, in_tiles = plain.encode(video).mean, tiled.encode(video).mean
    assert in_tiles.shape == whole.shape
    torch.testing.assert_close(off.encode(video).mean, whole)
    assert not torch.allclose(in_tiles, whole)
    # the corner belongs to the first tile alone
    corner = 16 // stride
    first = plain.encode(video[..., : 64 if name == "wan-2.2" else 32, : 64 if name == "wan-2.2" else 32]).mean
    torch.testing.assert_close(in_tiles[..., :corner, :corner], first[..., :corner, :corner], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("flux", {"tile_sample_min_height": 36}, "tile_sample_min_height is 36; expected a multiple of 8"),
        (
            "flux",
            {"tile_sample_min_height": 32, "tile_sample_min_width": 64},
            "same for height and width, found 32 and 64",
        ),
        ("cogvideox", {"tile_sample_min_width": 32, "tile_sample_stride_width": 64}, "is 64, and a tile's width 32"),
        ("hunyuanvideo15", {"tile_sample_stride_height": 128, "tile_sample_stride_width": 192}, "one overlap for both"),
    ],
)
def test_tiles_that_cannot_be(name, sizes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        _stored(PIPELINES[name][0]().vae, tmp_path, enable_tiling=True, tiling_param=sizes)


def test_tiles_of_thirds_leave_no_seam(tmp_path):
    """1 - 16/24 is no binary fraction: products with it must not fall below whole pixels."""
    sizes = {f"tile_sample_min_{s}": 48 for s in ("height", "width")}
    sizes |= {f"tile_sample_stride_{s}": 32 for s in ("height", "width")}
    for name in ("flux", "cogvideox"):
        ae = _stored(PIPELINES[name][0]().vae, tmp_path / name, enable_tiling=True, tiling_param=sizes)
        latents = ae.encode(_clip(1, 96, 160)).mean
        assert latents.shape[-2:] == (12, 20)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (
            "wan-2.1",
            (6, 32, 32),
            r"AutoencoderKLWan encodes clips of 4 · k \+ 1 frames, and a sample has 6; .* 5 and 9",
        ),
        ("wan-2.2", (5, 40, 32), r"sides are multiples of 16 pixels, and a sample's height is 40; nearest: 32 and 48"),
        ("cogvideox", (5, 32, 4), r"multiples of 8 pixels, and a sample's width is 4; nearest: 8"),
        ("flux", (5, 32, 32), r"AutoencoderKL encodes pictures, and a sample has 5 frames; expected 1"),
    ],
)
def test_clips_that_cannot_be_encoded(name, shape, said, tmp_path):
    ae = _stored(PIPELINES[name][0]().vae, tmp_path)
    with pytest.raises(DataError, match=said):
        ae.encode(_clip(*shape))


def test_normalisation_follows_model_json(tmp_path):
    vae = pictures.autoencoder_wan()
    video = _clip(1, 16, 16)
    with torch.no_grad():
        raw = vae.encode(video).latent_dist.mean
    plain = _stored(vae, tmp_path, norm_latents=False).encode(video).mean
    torch.testing.assert_close(plain, raw)
    by_one = _stored(vae, tmp_path, norm_mode="shift_scale", scaling_factor=2.0, shift_factor=0.5).encode(video).mean
    torch.testing.assert_close(by_one, (raw - 0.5) * 2)
    with pytest.raises(ConfigError, match="AutoencoderKL has no latents_mean and latents_std; write shift_scale"):
        _stored(pictures.autoencoder_of_pictures(), tmp_path / "kl", norm_mode="channel_specified_shift_scale")


def test_directories_and_names(tmp_path):
    pictures.autoencoder_wan().save_pretrained(tmp_path / "vae")
    here = str(tmp_path / "vae")
    for model_id in (None, "wan_video_vae", "AutoencoderKLWan"):
        opened = open_autoencoder(AeConfig(model_id=model_id, from_pretrained=here), "model.json")
        assert type(opened.model).__name__ == "AutoencoderKLWan"
    assert set(PUBLISHED_AUTOENCODERS.values()) <= set(CLASSES)
    with pytest.raises(ConfigError, match=r"'ae.model_id' is 'wan_vae'.*did you mean 'wan_video_vae'"):
        open_autoencoder(AeConfig(model_id="wan_vae", from_pretrained=here), "model.json")
    with pytest.raises(ConfigError, match=r"'flux_vae' \(AutoencoderKL\), but .* holds a AutoencoderKLWan"):
        open_autoencoder(AeConfig(model_id="flux_vae", from_pretrained=here), "model.json")
    with pytest.raises(ConfigError, match=r"has no config.json; expected a diffusers directory \(the folder vae"):
        open_autoencoder(AeConfig(from_pretrained=str(tmp_path)), "model.json")
    with pytest.raises(ConfigError, match=r"'ae.from_pretrained' is missing"):
        open_autoencoder(AeConfig(), "model.json")
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderDC"}')
    with pytest.raises(ConfigError, match=r"holds a AutoencoderDC; expected one of AutoencoderKL, "):
        open_autoencoder(AeConfig(from_pretrained=str(tmp_path)), "model.json")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="can't be loaded as AutoencoderKLWan"):
        open_autoencoder(AeConfig(from_pretrained=here), "model.json")
