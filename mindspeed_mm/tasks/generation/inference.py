"""The command of inference_sora.py: generate samples of prompts, divided among the processes of a launch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.sora_inference import InferenceFlags, SamplingKeys, SoRAInferenceConfig
from mindspeed_mm.tasks.command_line import run_command
from mindspeed_mm.tasks.generation.options import needed, parse_flags, read_images, read_prompts, sampling_options
from mindspeed_mm.tasks.generation.requests import Request, SamplingOptions
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.files import refuse_unwritable
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import info_rank0

if TYPE_CHECKING:
    from mindspeed_mm.tasks.generation.outputs import SampleFolder
    from mindspeed_mm.tasks.generation.pipeline import GenerationPipeline

_FPS = 16
_WAIT = timedelta(days=30)  # processes may have very different amounts of work


@dataclass(frozen=True)
class _Launch:
    """Content of the flags and files of a launch."""

    flags: InferenceFlags
    config: SoRAInferenceConfig | None
    keys: SamplingKeys
    prompts: list[str]
    images: list[Path] | None
    save_path: Path
    options: SamplingOptions


@dataclass(frozen=True)
class _Work:
    """A sample to generate, and its record so far."""

    request: Request
    record: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a launch command; see `run_command`."""
    return run_command(
        argv,
        InferenceFlags,
        "Make pictures or videos of prompts (docs/inference.md).",
        lambda words: _outline(_describe(words)),
        lambda words: _run(_describe(words)),
    )


def _describe(words: Sequence[str]) -> _Launch:
    """Read flags and files; torch isn't imported, so that a mistake is reported in a fraction of a second."""
    flags = parse_flags(words)
    require_extra("generation", "a model that makes images or videos")
    config = SoRAInferenceConfig.from_file(flags.mm_model, flags.mm_data) if flags.mm_model else None
    keys = config.sampling if config is not None else SamplingKeys()
    prompts = read_prompts(flags.prompts or keys.prompt)
    images = read_images(flags.images or keys.image, len(prompts))
    save_path = Path(needed(flags.save_path or keys.save_path, "--save-path", "the folder to write to"))
    refuse_unwritable(save_path, "--save-path")
    options = sampling_options(flags, keys)
    if options.size[0] > 1:
        require_extra("video", f"a sample of {options.size[0]} frames, which is written as a video,")
    return _Launch(flags, config, keys, prompts, images, save_path, options)


def _outline(launch: _Launch) -> dict[str, object]:
    """The answer of a dry run: no model is built, and no size compared with what a model can make."""
    options, prompts = launch.options, len(launch.prompts)
    samples = prompts * launch.flags.num_samples_per_prompt
    return {"prompts": prompts, "samples": samples, "size": list(options.size), "steps": options.steps}


def _run(launch: _Launch) -> None:
    """Open the pipeline and generate the samples."""
    from mindspeed_mm import accelerator
    from mindspeed_mm.tasks.generation.outputs import SampleFolder
    from mindspeed_mm.tasks.generation.sampling import check_size

    _quiet()
    flags, images, options = launch.flags, launch.images, launch.options
    if flags.allow_tf32:
        accelerator.current().allow_tf32()
    pipeline = _open(launch.config, flags)
    check_size(options.size, pipeline.rule)
    if pipeline.needs_image != (images is not None):
        raise ConfigError(
            "this model begins with a picture; give --images, one path a line beside each prompt"
            if pipeline.needs_image
            else "this model begins with no picture; leave --images (or 'image') out, or write 'task': 'i2v'"
        )
    fps = flags.fps or launch.keys.fps or _FPS
    work = _work(launch.prompts, images, flags.num_samples_per_prompt, pipeline, options, fps)
    _generate_missing(work, SampleFolder(launch.save_path), pipeline, options, flags, fps)


def _quiet() -> None:
    """Turn off progress bars of the libraries, and their warnings about sizes that are checked here."""
    import diffusers
    import transformers

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()


def _open(config: SoRAInferenceConfig | None, flags: InferenceFlags) -> GenerationPipeline:
    from mindspeed_mm.checkpoint.pipeline_folder import is_pipeline
    from mindspeed_mm.tasks.generation.pipeline import build_pipeline, open_pipeline

    if config is not None:
        return build_pipeline(
            config,
            load=flags.load,
            step=flags.ckpt_step,
            ema=flags.ema,
            dtype=flags.dtype,
            sampler=flags.sampler,
            shift=flags.shift,
            low_noise_predictor=flags.low_noise_predictor,
            adapters=flags.lora_load,
            low_noise_adapters=flags.low_noise_lora_load,
            cpu_offload=flags.cpu_offload,
        )
    if flags.load is not None and not is_pipeline(Path(flags.load)) and is_pipeline(Path(flags.load) / "hf"):
        flags.load = str(Path(flags.load) / "hf")
    return open_pipeline(
        str(flags.load),
        dtype=flags.dtype,
        sampler=flags.sampler,
        shift=flags.shift,
        adapters=flags.lora_load,
        low_noise_adapters=flags.low_noise_lora_load,
        cpu_offload=flags.cpu_offload,
    )


def _work(
    prompts: Sequence[str],
    images: Sequence[Path] | None,
    samples: int,
    pipeline: GenerationPipeline,
    options: SamplingOptions,
    fps: int,
) -> list[_Work]:
    from mindspeed_mm.tasks.generation.outputs import file_name
    from mindspeed_mm.tasks.generation.sampling import default_steps_and_guidance

    steps, guidance = default_steps_and_guidance(pipeline)
    common = {
        "seed": options.seed,
        "steps": options.steps or steps,
        "guidance": list(options.guidance) if options.guidance else guidance,
        "negative_prompt": options.negative_prompt or "",
        "size": list(options.size),
        "sampler": type(pipeline.pipeline.scheduler).__name__,
        "weights": pipeline.weights,
    }
    if options.size[0] > 1:
        common["fps"] = fps
    work = []
    for index, prompt in enumerate(prompts):
        for sample in range(samples):
            record: dict[str, Any] = {"prompt": prompt, "file": file_name(index, sample, options.size[0])}
            record |= {"index": index, "sample": sample, **common}
            if images is not None:
                record["image"] = str(images[index])
            work.append(_Work(Request(prompt, index, sample), record))
    return work


def _generate_missing(
    work: Sequence[_Work],
    folder: SampleFolder,
    pipeline: GenerationPipeline,
    options: SamplingOptions,
    flags: InferenceFlags,
    fps: int,
) -> None:
    """Generate missing samples, each process its share; rank 0 then writes the index and the contact sheet."""
    import torch.distributed as dist

    from mindspeed_mm.tasks.generation.contact_sheet import write_contact_sheet
    from mindspeed_mm.tasks.generation.outputs import SAMPLES
    from mindspeed_mm.tasks.generation.sampling import generate

    launch = this_launch()
    rank, size = launch.rank, launch.world_size
    folder.root.mkdir(parents=True, exist_ok=True)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_WAIT)
    mine = [item for item in work[rank::size] if flags.overwrite or not folder.exists(item.record)]
    info_rank0(f"{len(work)} samples of {options.size}: {len(mine)} to be made" + (" by rank 0" if size > 1 else ""))
    began = time.monotonic()
    for first in range(0, len(mine), flags.batch_size):
        batch = mine[first : first + flags.batch_size]
        started = time.monotonic()
        frames = generate(pipeline, [_with_image(item) for item in batch], options)
        seconds = round((time.monotonic() - started) / len(batch), 3)
        for item, values in zip(batch, frames, strict=True):
            folder.write(values, {**item.record, "seconds": seconds}, fps)
        done = first + len(batch)
        left = (time.monotonic() - began) / done * (len(mine) - done)
        info_rank0(f"{done} of {len(mine)} samples, {seconds:.2f} s each, {left:.0f} s to go")
    if size > 1:
        dist.barrier()
    if rank == 0:
        records = folder.write_index([item.record["file"] for item in work])
        sheet = write_contact_sheet(folder.root, records)
        info_rank0(f"{len(records)} samples in '{folder.root}': {SAMPLES}, {sheet.name}")


def _with_image(item: _Work) -> Request:
    if "image" not in item.record:
        return item.request
    from PIL import Image, ImageOps

    path = Path(item.record["image"])
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"picture '{path}' can't be read: {error}") from error
    _, height, width = item.record["size"]
    fitted = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    return Request(item.request.prompt, item.request.index, item.request.sample, fitted)
