"""Pipelines of every family take a predictor in training, and make of it what they make of diffusers' own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_mm.tasks.generation.pipeline import LivePredictor
from tests.support import tiny_image_pipelines as pictures
from tests.support import tiny_video_pipelines as videos

PIPELINES: dict[str, Callable[[], Any]] = {
    "hunyuanvideo15": lambda: videos.hunyuanvideo15("t2v"),
    "wan": pictures.wan,
}
MORE: dict[str, Callable[[], Any]] = {
    "flux": pictures.flux,
    "sd3": pictures.sd3,
    "qwenimage": pictures.qwenimage,
    "hunyuanvideo": videos.hunyuanvideo,
    "cogvideox": lambda: videos.cogvideox("cogvideox-t2v"),
    "ltx": lambda: videos.ltx("t2v"),
}
#: settings that the tests' pipelines have because their vocabulary is tiny
OF_TINY = ("prompt_template_encode_start_idx", "tokenizer_max_length", "tokenizer_2_max_length")


@pytest.mark.parametrize("label", [*PIPELINES, *(pytest.param(label, marks=pytest.mark.full) for label in MORE)])
def test_a_pipeline_takes_a_predictor_in_training(label: str) -> None:
    torch.manual_seed(0)
    pipeline = (PIPELINES | MORE)[label]()
    live = type(pipeline)(**{**pipeline.components, "transformer": LivePredictor(pipeline.transformer, torch.float32)})
    for name in OF_TINY:
        if hasattr(pipeline, name):
            setattr(live, name, getattr(pipeline, name))
    takes = inspect.signature(pipeline.__call__).parameters
    sizes = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 6}
    asked = {name: value for name, value in sizes.items() if name in takes}
    made = []
    for each in (pipeline, live):
        each.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(1)
        made.append(each(prompt="a cat", generator=generator, output_type="latent", **asked)[0])
    assert torch.equal(*made) and made[0].isfinite().all()
