"""Families of picture models: what they tell the transformer is what diffusers' pipelines tell it."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.models.generation.diffusion.build import build_objective
from mindspeed_mm.models.generation.predictor.family import families
from mindspeed_mm.models.generation.sora_model import SoRAModel, generation_rule, resolve_predictor
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support import tiny_image_pipelines as tiny
from tests.support.predictors import cases
from tests.support.tiny_video_pipelines import CAPTIONS

CPU = torch.device("cpu")
#: label of a case → its pipeline, further arguments of a call
PIPELINES = {
    "flux-guided": (tiny.flux, {"guidance_scale": 3.5}),
    "sd3-3.5": (tiny.sd3, {"guidance_scale": 1.0}),
    "qwenimage-t2i": (tiny.qwenimage, {"true_cfg_scale": 1.0}),
}
HEIGHT, WIDTH = 48, 64


def _family(label):
    name, case = cases()[label]
    config = SoRAModelConfig.from_dict(case.model_json(name))
    return resolve_predictor(config)[0], config


class Recorder:
    """Stands in front of a transformer and keeps what it is told."""

    def __init__(self, model):
        self.told, self._forward = [], model.forward
        model.forward = self

    def __call__(self, **kwargs):
        self.told.append({k: v for k, v in kwargs.items() if v not in (None, {}) or isinstance(v, torch.Tensor)})
        return self._forward(**kwargs)


@pytest.mark.parametrize("label", PIPELINES)
def test_predict_tells_the_transformer_what_the_pipeline_does(label):
    torch.manual_seed(0)
    make, more = PIPELINES[label]
    pipeline, (family, _) = make(), _family(label)
    pipeline.set_progress_bar_config(disable=True)
    recorder = Recorder(pipeline.transformer)
    start = torch.randn(1, 4, HEIGHT // 8, WIDTH // 8)
    packed = start if label.startswith("sd3") else pipeline._pack_latents(start, 1, 4, HEIGHT // 8, WIDTH // 8)
    with torch.no_grad():
        pipeline(
            prompt=CAPTIONS[1],
            num_inference_steps=2,
            output_type="latent",
            height=HEIGHT,
            width=WIDTH,
            latents=packed,
            max_sequence_length=11,
            **more,
        )
        theirs = recorder.told[0]
        scale = 1 if label.startswith("sd3") else 1000
        text = family.text_states(pipeline, CAPTIONS[1:], CPU, 11)
        predicted = family.predict(pipeline.transformer, start[:, :, None], theirs["timestep"] * scale, text, {}, 3.5)
    ours = recorder.told[-1]
    assert predicted.shape == (1, 4, 1, HEIGHT // 8, WIDTH // 8)
    # a mask of nothing but ones says the same as none
    assert bool(ours.pop("encoder_hidden_states_mask", torch.ones(1)).all())
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name].to(value.dtype), value, rtol=1e-6, atol=1e-6)
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("label", PIPELINES)
def test_captions_of_a_batch_are_encoded_one_by_one(label):
    torch.manual_seed(0)
    pipeline, (family, _) = PIPELINES[label][0](), _family(label)
    captions = [*CAPTIONS, ""]
    with torch.no_grad():
        together = family.text_states(pipeline, captions, CPU, None)
        apart = [family.text_states(pipeline, [caption], CPU, None) for caption in captions]
    for name, values in together.items():
        for value, one in zip(values, apart, strict=True):
            alone = one[name][0]
            if value.dim() and value.shape != alone.shape:  # as long as its longest neighbour
                assert not value[len(alone) :].any()
                value = value[: len(alone)]
            torch.testing.assert_close(value, alone, rtol=1e-5, atol=1e-5)
    states = together["encoder_hidden_states"]
    assert not torch.allclose(states[0], states[1])


@pytest.mark.parametrize(
    ("label", "tokens", "shift"),
    [
        ("flux-t2i", 4096, 3.1582),
        ("flux-t2i", 256, 1.6487),
        ("qwenimage-t2i", 8192, 2.4596),
        ("sd3-t2i", 4096, 3.0),
    ],
)
def test_defaults_are_the_published_schedules(label, tokens, shift):
    """A middling draw is moved to shift / (1 + shift); exp(1.15), exp(0.5), exp(0.9) at the ends of dynamic shifts."""
    family, config = _family(label)
    objective = build_objective(config.diffusion, family.defaults, "model.json")
    sigma = objective.sigmas(torch.tensor([0.5], dtype=torch.float64), tokens)
    assert float(sigma) == pytest.approx(shift / (1 + shift), rel=1e-4)
    scheduler = objective.sampling_scheduler()
    assert scheduler.config.use_dynamic_shifting == (label != "sd3-t2i")
    assert scheduler.config.shift_terminal == (0.02 if label.startswith("qwen") else None)
    assert float(objective.weights(sigma, tokens)) == 1


def test_keys_of_a_dynamic_shift_take_the_place_of_the_familys():
    name, case = cases()["qwenimage-t2i"]
    config = SoRAModelConfig.from_dict({**case.model_json(name), "diffusion": {"max_shift": 1.0, "max_seq_len": 4096}})
    family = resolve_predictor(config)[0]
    assert build_objective(config.diffusion, family.defaults, "model.json").dynamic == (0.5, 1.0, 256, 4096)


@pytest.mark.parametrize("label", PIPELINES)
def test_shapes_are_the_pipelines(label):
    pipeline, (family, config) = PIPELINES[label][0](), _family(label)
    assert family.defaults.ae == type(pipeline.vae).__name__
    assert family.latent_channels == 4
    rule = generation_rule(config, seed=1)
    assert rule.spatial_multiple == 16
    assert rule.temporal_stride == (4 if label.startswith("qwen") else 1)
    assert rule.tokens(1, 48, 64) == 12
    model = SoRAModel(cases()[label][1].model_json(cases()[label][0]))
    assert model.tokens(torch.zeros(1, 4, 1, 6, 8)) == 12


@pytest.mark.parametrize("name", ["flux", "sd3", "qwenimage"])
def test_names_and_task(name):
    family = families()[name]
    assert list(family.pipelines) == ["t2i"]
    with pytest.raises(ConfigError, match=r"'task' is 't2v'; .* is trained for t2i"):
        resolve_predictor(SoRAModelConfig.from_dict({"task": "t2v", "predictor": {"model_id": name, "config": {}}}))


@pytest.mark.parametrize("label", PIPELINES)
def test_several_frames_are_refused(label):
    name, case = cases()[label]
    model = SoRAModel(case.model_json(name))
    batch = case.batch([0])
    batch["latents"] = batch["latents"].repeat(1, 1, 2, 1, 1)
    with pytest.raises(DataError, match=f"{name} makes pictures, and a sample has 2 latent frames; expected 1"):
        model(**model.prepare(batch))


def test_pictures_beyond_the_table_of_positions_are_refused():
    name, case = cases()["sd3-t2i"]
    model = SoRAModel(case.model_json(name))
    batch = case.batch([0])
    batch["latents"] = torch.zeros(1, 4, 1, 8, 18)
    with pytest.raises(DataError, match=r"8 × 18 latents, and .* \(pos_embed_max_size 8\) reaches 16 on a side"):
        model(**model.prepare(batch))


def test_a_layered_qwenimage_is_refused():
    name, case = cases()["qwenimage-t2i"]
    described = case.model_json(name)
    described["predictor"]["config"]["use_layer3d_rope"] = True
    with pytest.raises(ConfigError, match="use_layer3d_rope is True in the transformer's configuration"):
        resolve_predictor(SoRAModelConfig.from_dict(described))


def test_positions_stay_exact_in_low_precision():
    """Inputs are cast to bf16 under FSDP2, where 257 would be 256: positions are whole numbers, which stay."""
    family, _ = _family("flux-t2i")
    told = {}

    def model(**kwargs):
        told.update(kwargs)
        return (kwargs["hidden_states"],)

    text = {"encoder_hidden_states": torch.zeros(1, 3, 12), "pooled_projections": torch.zeros(1, 10)}
    family.predict(model, torch.zeros(1, 4, 1, 2, 600), torch.ones(1), text, {}, 1.0)
    assert not told["img_ids"].is_floating_point() and not told["txt_ids"].is_floating_point()
    assert told["img_ids"][:, 2].tolist() == list(range(300))
    assert "guidance" not in told or told["guidance"] is None
