"""Samples of prompts while a model is trained (--sample-interval), by the pipeline that inference_sora.py uses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.backends.protocol import Backend
from mindspeed_mm.checkpoint.rng import kept_random_states
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.recipe import DrawnSample
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.data.generation.dataset import ShapedDataset
from mindspeed_mm.data.generation.feature_dataset import FeatureDataset
from mindspeed_mm.data.loading.loader import MMDataLoader
from mindspeed_mm.data.loading.providers import RunData
from mindspeed_mm.models.generation.sample_encoder import SampleEncoder
from mindspeed_mm.models.generation.sora_model import resolve_predictor
from mindspeed_mm.monitor.recording.thumbnails import as_jpeg, pixels_of, spread
from mindspeed_mm.tasks.generation.options import read_prompts
from mindspeed_mm.tasks.generation.outputs import save_video
from mindspeed_mm.tasks.generation.pipeline import pipeline_of_training, pipeline_rule
from mindspeed_mm.tasks.generation.requests import Request, SamplingOptions
from mindspeed_mm.tasks.generation.sampling import check_size, generate
from mindspeed_mm.utils.errors import ConfigError, MMError
from mindspeed_mm.utils.extras import has_extra
from mindspeed_mm.utils.log import notice

_CAPTIONS = 4  # of the data
_PROMPTS = 8  # of a file, at most
_LOOKED_AT = 64  # rows, for captions
_SIDE = 512  # longest side of a kept picture or frame
_FPS = 16


@dataclass(frozen=True)
class _Row:
    """A row as a request: its caption, and its first frame, [height, width, 3] uint8; None: there are no pixels."""

    caption: str
    picture: np.ndarray | None
    size: tuple[int, int, int]


def open_live_samples(run: Run, data: RunData) -> LiveSamples | None:
    """Return what draws samples of a run; None without --sample-interval.

    Args:
        run: the run, with model.json and data.json of a generation model.
        data: its data.

    Raises:
        ConfigError: no prompts, a size that the model can't make, or frozen parts that model.json doesn't name.
    """
    if run.logging.sample_interval is None:
        return None
    flag = f"--sample-interval {run.logging.sample_interval}"
    described = SoRAModelConfig.from_dict(run.files.model)
    family, _, _ = resolve_predictor(described)
    with kept_random_states():
        rows = list(_rows_of(data))
    prompts = _prompts(run, rows, flag)
    needs_image = family.task in ("i2v", "ti2v")
    if needs_image and (len(rows) < len(prompts) or any(row.picture is None for row in rows)):
        raise ConfigError(
            f"{flag}: this model begins with a picture, and {len(prompts)} rows with pictures are needed beside the "
            "prompts, from clips and not from features; leave it out, or train on clips"
        )
    size = tuple(run.logging.sample_size or (rows[0].size if rows else ()))
    if len(size) != 3:
        raise ConfigError(f"{flag}: no row tells the size of a sample; give --sample-size FRAMES HEIGHT WIDTH")
    rule, makes_videos = pipeline_rule(described)
    check_size(size, rule, makes_videos=makes_videos)
    guidance = run.logging.sample_guidance_scale
    options = SamplingOptions(
        (size[0], size[1], size[2]),
        run.logging.sample_inference_steps,
        None if guidance is None else (guidance,),
        seed=run.process.seed,
    )
    requests = [
        Request(prompt, number, image=_image(rows[number].picture, options.size) if needs_image else None)
        for number, prompt in enumerate(prompts)
    ]
    encoder = None
    if described.load_video_features or described.load_text_features:
        encoder = SampleEncoder(described, family, _tokenizers(run), stays=False)
        _open_parts(encoder, flag)
    return LiveSamples(requests, options, encoder, is_compiled=run.fsdp2 is not None and bool(run.fsdp2.compile))


class LiveSamples:
    """Draws a sample of each request at each call, always from the same noise.

    Processes share the requests. Afterwards model, hooks, frozen parts and random states are what they were before.

    Attributes:
        requests: the samples.
        options: how they are drawn.

    Args:
        encoder: the frozen parts, where the model in training has not all of them; None: it has.
        is_compiled: whether modules of the model are compiled: sampling, with its other shapes, leaves their graphs
            alone and computes without them.
    """

    def __init__(
        self, requests: Sequence[Request], options: SamplingOptions, encoder: SampleEncoder | None, *, is_compiled: bool
    ) -> None:
        self.requests, self.options = list(requests), options
        self._encoder, self._is_compiled = encoder, is_compiled

    def __call__(self, backend: Backend) -> list[DrawnSample]:
        """Draw with the averaged weights of a backend, if it keeps any, else with the trained ones; a collective.

        Returns:
            the samples of all ranks in the order of the prompts, on every rank.
        """
        drawn: list[DrawnSample] = []
        with backend.generation(averaged=True) as generation, ExitStack() as stack:
            if self._is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_quiet())
            encoder = self._encoder or generation.built.encoder
            parts = encoder.parts
            encoder.load()
            stack.callback(encoder.offload)
            pipeline = pipeline_of_training(generation.built, parts)
            for first in range(0, len(self.requests), generation.size):
                number = first + generation.rank
                is_wanted = number < len(self.requests)
                if is_wanted or generation.in_lockstep:
                    request = self.requests[number if is_wanted else 0]
                    (frames,) = generate(pipeline, [request], self.options)
                    drawn += [self._sample(request, frames)] if is_wanted else []
        by_index = {sample.index: sample for part in backend.gather_objects(drawn) for sample in part}
        return [by_index[index] for index in sorted(by_index)]

    def _sample(self, request: Request, frames: np.ndarray) -> DrawnSample:
        files: dict[str, bytes] = {}
        if len(frames) == 1:
            files[".jpg"] = as_jpeg(frames[0], _SIDE)
        else:
            files |= {f"-frame-{number}.jpg": as_jpeg(frame, _SIDE) for number, frame in enumerate(spread(frames))}
            if has_extra("video"):
                files[".mp4"] = _mp4(frames)
        return DrawnSample(request.prompt, request.index, self.options.seed, self.options.size, files)


def _prompts(run: Run, rows: Sequence[_Row], flag: str) -> list[str]:
    path = run.logging.sample_prompts
    if path is None:
        found = list(dict.fromkeys(row.caption for row in rows))[:_CAPTIONS]
        if not found:
            raise ConfigError(
                f"{flag}: the data have no captions to draw; give --sample-prompts FILE, one prompt a line"
            )
        return found
    found = read_prompts(path)
    if len(found) > _PROMPTS:
        notice(f"--sample-prompts '{path}': the first {_PROMPTS} of {len(found)} prompts are drawn")
    return found[:_PROMPTS]


def _rows_of(data: RunData) -> Iterator[_Row]:
    """The first rows with a caption of the validation data, else of the training data, as evaluation reads them."""
    loader = data.loader if data.valid is None else data.valid.loader
    dataset = loader.dataset if isinstance(loader, MMDataLoader) else None
    if not isinstance(dataset, ShapedDataset):
        return
    rows = dataset.part(dataset.indices, training=False)
    captions = rows.reader.captions() if isinstance(rows, FeatureDataset) else None
    found = 0
    for index in range(min(len(rows), _LOOKED_AT)):
        try:
            bucket = rows.bucket_of(index)
            sample = None if bucket is None else rows.get(index, bucket)
        except MMError:  # a run meets it by itself
            continue
        if sample is None or bucket is None or "fault" in sample:
            continue
        caption = sample["caption"] if captions is None else captions[int(rows.indices[index])]
        shape = rows.shapes[bucket]
        if caption:
            picture = pixels_of(sample["video"])[0] if "video" in sample else None
            yield _Row(caption, picture, (shape.frames, shape.height, shape.width))
            found += 1
        if found == _PROMPTS:
            return


def _image(picture: np.ndarray | None, size: tuple[int, int, int]) -> Any:
    from PIL import Image, ImageOps

    assert picture is not None, "rows without pixels have been refused"
    return ImageOps.fit(Image.fromarray(picture), (size[2], size[1]), Image.Resampling.BICUBIC)


def _tokenizers(run: Run) -> list[str | None]:
    data = run.data if isinstance(run.data, GenerationDataConfig) else GenerationDataConfig.from_dict(run.files.data)
    return list(data.dataset_param.tokenizer_dirs)


def _open_parts(encoder: SampleEncoder, flag: str) -> None:
    """Load the frozen parts that a run on features does without; they wait on the host for their turn."""
    try:
        assert encoder.parts is not None
    except MMError as error:
        raise ConfigError(
            f"{flag}: the run trains on features, and its samples need the autoencoder and the text encoders that they "
            f"were made with: {error}; or leave the flag out"
        ) from error


def _mp4(frames: np.ndarray) -> bytes:
    with tempfile.TemporaryDirectory(prefix="samples-") as folder:
        path = Path(folder) / "sample.mp4"
        save_video(frames, path, _FPS)
        return path.read_bytes()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without diffusers' warnings about sizes, which have been checked."""
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
