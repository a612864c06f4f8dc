"""Pixels as latents."""

from __future__ import annotations

import logging

import pytest
import torch

from mindspeed_mm.configs.sora_config import AeConfig
from mindspeed_mm.models.generation.ae.autoencoder import autoencoder_strides, open_autoencoder
from mindspeed_mm.models.generation.ae.pixel import PixelAutoencoder
from mindspeed_mm.utils.errors import ConfigError
from tests.support import tiny_image_pipelines as tiny

VIDEO = torch.rand(2, 3, 4, 6, 6) * 2 - 1


def _pixel(channels):
    return open_autoencoder(AeConfig(model_id="pixel", config={"channels": channels}), "model.json")


@pytest.fixture
def said():
    """What diffusers warns of."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("diffusers")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_pixels_stay_and_grey_is_their_mean():
    colours, grey = _pixel(3), _pixel(1)
    assert (colours.temporal_stride, colours.spatial_stride, colours.channels) == (1, 1, 3)
    assert autoencoder_strides(AeConfig(model_id="pixel"), None, (4, 8)) == (1, 1)
    torch.testing.assert_close(colours.encode(VIDEO).mean, VIDEO)
    torch.testing.assert_close(colours.decode(VIDEO), VIDEO)
    assert grey.channels == 1
    torch.testing.assert_close(grey.encode(VIDEO).mean, VIDEO.mean(1, keepdim=True))
    shown = grey.decode(grey.encode(VIDEO).mean)
    torch.testing.assert_close(shown, VIDEO.mean(1, keepdim=True).expand(-1, 3, -1, -1, -1))
    drawn = open_autoencoder(AeConfig(model_id="pixel", do_sample=True), "model.json").encode(VIDEO)
    assert not drawn.std.any()
    with pytest.raises(ConfigError, match=r"'ae.config': channels is 2; expected 1 \(grey\) or 3"):
        _pixel(2)
    with pytest.raises(ConfigError, match=r"'ae.config.chanels' is no key of pixel; .*did you mean 'channels'"):
        open_autoencoder(AeConfig(model_id="pixel", config={"chanels": 1}), "model.json")


def test_a_store_loads_as_it_was_and_nothing_is_warned_of(tmp_path, said):
    model = PixelAutoencoder(1).to(torch.bfloat16)
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    model.save_pretrained(tmp_path)
    loaded = PixelAutoencoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert (loaded.config["channels"], loaded.config["z_dim"]) == (1, 1)
    assert loaded.dtype == torch.bfloat16
    assert PixelAutoencoder.from_pretrained(tmp_path).dtype == torch.float32
    assert said == []
    # a pipeline's folder that was written after training may be the start of another one
    described = AeConfig(from_pretrained=str(tmp_path))
    assert open_autoencoder(described, "model.json").channels == 1
    assert autoencoder_strides(described, None, (4, 8)) == (1, 1)


def test_a_pipelines_folder_holds_it(tmp_path):
    from diffusers import DiffusionPipeline, WanPipeline, WanTransformer3DModel

    pipeline = tiny.wan()
    config = {**pipeline.transformer.config, "in_channels": 3, "out_channels": 3}
    made = WanPipeline(
        tokenizer=pipeline.tokenizer,
        text_encoder=pipeline.text_encoder,
        transformer=WanTransformer3DModel.from_config(config).eval(),
        vae=PixelAutoencoder(),
        scheduler=pipeline.scheduler,
    )
    made.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.vae, PixelAutoencoder)
    call = {"prompt": "a red fox", "height": 16, "width": 16, "num_frames": 1, "num_inference_steps": 2}
    shown = []
    for one in (made, loaded):
        one.set_progress_bar_config(disable=True)
        start = torch.randn(1, 3, 2, 16, 16, generator=torch.Generator().manual_seed(0))
        shown.append(one(**call, latents=start, guidance_scale=1.0, output_type="pt").frames)
    assert shown[0].shape == (1, 2, 3, 16, 16)
    torch.testing.assert_close(*shown)


@pytest.mark.parametrize("make", [tiny.flux, tiny.sd3, tiny.qwenimage])
def test_pipelines_of_pictures_decode_with_it(make):
    """Their latents are the pixels that come out."""
    made = make()
    parts = {**made.components, "vae": PixelAutoencoder(3)}
    described = {**made.transformer.config, "in_channels": 12, "out_channels": 3}
    if make is tiny.sd3:
        described["in_channels"] = 3
    if make is tiny.flux:
        described["out_channels"] = 12
    parts["transformer"] = type(made.transformer).from_config(described)
    parts["transformer"].forward = lambda hidden_states, **told: (torch.zeros_like(hidden_states),)
    pipeline = type(made)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    start = torch.rand(1, 3, 8, 12) * 2 - 1
    packed = start if make is tiny.sd3 else pipeline._pack_latents(start, 1, 3, 8, 12)
    more = {"true_cfg_scale": 1.0} if make is tiny.qwenimage else {"guidance_scale": 1.0}
    call = {"prompt": "a red fox", "height": 8, "width": 12, "num_inference_steps": 2, "output_type": "pt"}
    shown = pipeline(**call, latents=packed, **more).images
    torch.testing.assert_close(shown, start / 2 + 0.5, rtol=1e-5, atol=1e-5)
