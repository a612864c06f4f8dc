"""The inputs of a launch of inference_sora.py: flags, prompts, pictures, options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.parser import build_parser, spell_as_declared, stray_words, unknown_flags
from mindspeed_mm.configs.flags.spec import flags_of
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.sora_inference import InferenceFlags, SamplingKeys
from mindspeed_mm.tasks.generation.requests import SamplingOptions
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_SEED = 42


def parse_flags(words: Sequence[str]) -> InferenceFlags:
    """Parse the words of a launch command; published training flags are accepted, with a notice.

    Raises:
        ConfigError: unknown flags, wrong values, files that don't exist.
    """
    parser: argparse.ArgumentParser = build_parser((*GROUPS, InferenceFlags))
    words = spell_as_declared(parser, words)
    raise_all(unknown_flags(parser, words))
    parsed, extras = parser.parse_known_args(words)
    raise_all(stray_words(parser, words, extras))
    own = {item.name: item for item in flags_of(InferenceFlags)}
    given = vars(parsed)
    others = sorted(given.keys() - own.keys() - {"bf16", "fp16", "dry_run"})
    if others:
        names = ", ".join("--" + name.replace("_", "-") for name in others)
        notice(f"no effect here: {names}: they belong to training")
    flags = InferenceFlags(**{name: value for name, value in given.items() if name in own})
    inputs = ("file", "directory", "file or directory")
    paths = {name: value for name, value in vars(flags).items() if own[name].path in inputs and value}
    missing = [name for name, value in paths.items() if not Path(value).exists()]
    describe = {"directory": describe_missing_model, "file": describe_missing, "file or directory": describe_missing}
    raise_all([f"{own[name].spelling}: {describe[str(own[name].path)](paths[name])}" for name in missing])
    if flags.mm_model is None and flags.load is None:
        raise ConfigError(
            "--mm-model (model.json of the training or of inference) is missing, or --load, the directory of a whole "
            "diffusers pipeline"
        )
    if flags.dtype is None:
        flags.dtype = "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else None
    return flags


def read_prompts(path: str | None) -> list[str]:
    """Read a file of prompts, one a line; empty lines are left out.

    Raises:
        ConfigError: the file doesn't exist, or has no prompt.
    """
    lines = _lines(needed(path, "--prompts", "a text file, one prompt a line"), "prompts")
    if not lines:
        raise ConfigError(f"prompts '{path}': the file holds no prompts; expected one a line")
    return lines


def read_images(path: str | None, prompts: int) -> list[Path] | None:
    """Read a file of paths of pictures, one a line, one for each prompt; None: there is no file.

    Raises:
        ConfigError: their number differs, or a picture doesn't exist.
    """
    if path is None:
        return None
    lines = _lines(path, "images")
    if len(lines) != prompts:
        raise ConfigError(f"images '{path}': {len(lines)} pictures for {prompts} prompts; expected one for each prompt")
    found = []
    for number, line in enumerate(lines):
        candidates = [Path(line), Path(path).parent / line]
        place = next((c for c in candidates if c.is_file()), None)
        if place is None:
            raise ConfigError(f"images '{path}', line {number + 1}: {describe_missing(line)}")
        found.append(place)
    return found


def sampling_options(flags: InferenceFlags, keys: SamplingKeys) -> SamplingOptions:
    """Return the sampling options of flags and model.json; flags have precedence.

    Raises:
        ConfigError: neither has the size.
    """
    of_pipeline, of_diffusion = keys.pipeline_config, keys.diffusion
    size = flags.size or of_pipeline.input_size
    if size is None or len(size) != 3:
        found = " ".join(map(str, size)) if size else "nothing"
        raise ConfigError(
            f"--size is {found}; expected frames, height and width of a sample, such as --size 1 256 256 (or "
            "'pipeline_config.input_size' in model.json)"
        )
    guidance = flags.guidance_scale or of_pipeline.guidance_scale or of_diffusion.guidance_scale
    seed = flags.seed if flags.seed is not None else of_pipeline.seed
    return SamplingOptions(
        size=(size[0], size[1], size[2]),
        steps=flags.num_inference_steps or of_diffusion.num_inference_steps or of_diffusion.num_inference_timesteps,
        guidance=tuple(guidance) if guidance else None,
        negative_prompt=flags.negative_prompt,
        seed=_SEED if seed is None else seed,
    )


def needed(value: str | None, flag: str, what: str) -> str:
    """Return a required value; `flag` and `what` are for the message where it is missing."""
    if not value:
        raise ConfigError(f"{flag} is missing: {what}")
    return value


def _lines(path: str, what: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{what}: {describe_missing(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} '{path}' can't be read as text: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
