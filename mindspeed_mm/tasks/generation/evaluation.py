"""The command of evaluate_gen.py: metrics of samples, as a table and as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.flags.parser import build_parser, spell_as_declared, stray_words, unknown_flags
from mindspeed_mm.configs.flags.spec import flag, flags_of
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.tasks.generation.options import needed
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.files import refuse_unwritable, working_file, write_json

FlagsT = TypeVar("FlagsT")

_FEATURES = "features"


@dataclass
class EvaluationFlags:
    """Figures about generated samples."""

    features_a: Annotated[str | None, flag("features of real samples (.safetensors, .npz, .npy)", path="file")] = None
    features_b: Annotated[str | None, flag("features of generated samples", path="file")] = None
    samples: Annotated[
        str | None, flag("folder that inference_sora.py has written, for the CLIP score", path="directory")
    ] = None
    clip: Annotated[str | None, flag("directory of a CLIP model of transformers", path="directory")] = None
    frames: Annotated[int, flag("frames of a video that are looked at", minimum=1)] = 8
    allow_tf32: Annotated[
        bool, flag("compute float32 products and convolutions in TF32 (HF32 on an NPU), as in training")
    ] = False
    neighbours: Annotated[int, flag("neighbours that precision and recall look at", minimum=1)] = 3
    subset: Annotated[int, flag("samples of each draw of the kernel distance", minimum=2)] = 1000
    subsets: Annotated[int, flag("draws of the kernel distance", minimum=1)] = 100
    output: Annotated[str | None, flag("JSON file that is written", path="output")] = None


@dataclass
class FeatureFlags:
    """Features of pictures and videos."""

    model: Annotated[str | None, flag("directory of a vision model of transformers", path="directory")] = None
    media: Annotated[
        str | None, flag("folder of pictures and videos, or a text file with a path a line", path="directory")
    ] = None
    output: Annotated[str | None, flag("file that is written, ends in .safetensors", path="output")] = None
    frames: Annotated[int, flag("frames of a video that are looked at", minimum=1)] = 8
    allow_tf32: Annotated[
        bool, flag("compute float32 products and convolutions in TF32 (HF32 on an NPU), as in training")
    ] = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status.

    Raises:
        MMError: the command can't be done.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == [_FEATURES]:
        return _write_features(words[1:])
    flags = _parse(EvaluationFlags, words, "Figures about generated samples; `features` makes features of files.")
    if flags is None:
        return 0
    if flags.output is not None:
        refuse_unwritable(Path(flags.output).parent, "--output")
    figures = evaluate_generation(flags)
    width = max(len(name) for name in figures)
    for name, value in figures.items():
        if not isinstance(value, list):
            print(f"{name:<{width}}  {value:.6g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    if flags.output is not None:
        Path(flags.output).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(flags.output), figures)
        print(f"written to {flags.output}")
    return 0


def evaluate_generation(flags: EvaluationFlags) -> dict[str, Any]:
    """Compute the metrics that the flags request.

    Returns:
        metric → number; `clip_scores` → a list with one object for each sample.

    Raises:
        ConfigError: they request nothing, or one of two flags is missing.
        DataError: features that don't fit together.
    """
    pairs = (
        ("--features-a", flags.features_a, "--features-b", flags.features_b),
        ("--samples", flags.samples, "--clip", flags.clip),
    )
    for name, value, other, beside in pairs:
        if (value is None) != (beside is None):
            raise ConfigError(
                f"{name if value is None else other} is missing beside {other if value is None else name}"
            )
    if flags.features_a is None and flags.samples is None:
        raise ConfigError("nothing to do: give --features-a and --features-b, or --samples and --clip, or both")
    _set_precision(flags)
    figures: dict[str, Any] = {}
    if flags.features_a is not None and flags.features_b is not None:
        figures |= _distances(flags.features_a, flags.features_b, flags)
    if flags.samples is not None and flags.clip is not None:
        from mindspeed_mm.tasks.generation.features import VisionModel, clip_scores

        scores = clip_scores(VisionModel(flags.clip, with_text=True), Path(flags.samples), frames=flags.frames)
        figures["clip_score"] = sum(score["clip_score"] for score in scores) / len(scores)
        figures["clip_scores"] = scores
    return figures


def _set_precision(flags: EvaluationFlags | FeatureFlags) -> None:
    from mindspeed_mm import accelerator

    if flags.allow_tf32:
        accelerator.current().allow_tf32()


def _distances(real: str, generated: str, flags: EvaluationFlags) -> dict[str, Any]:
    from mindspeed_mm.tasks.generation.distances import (
        frechet_distance,
        kernel_distance,
        precision_and_recall,
        read_features,
    )

    a, b = read_features(real), read_features(generated)
    mean, deviation = kernel_distance(a, b, subset=flags.subset, subsets=flags.subsets)
    figures: dict[str, Any] = {
        "samples_a": len(a),
        "samples_b": len(b),
        "frechet_distance": frechet_distance(a, b),
        "kernel_distance": mean,
        "kernel_distance_std": deviation,
    }
    if min(len(a), len(b)) > flags.neighbours:
        figures["precision"], figures["recall"] = precision_and_recall(a, b, neighbours=flags.neighbours)
    return figures


def _write_features(words: Sequence[str]) -> int:
    flags = _parse(FeatureFlags, words, "Features of pictures and videos by a vision model of transformers.")
    if flags is None:
        return 0
    from safetensors.torch import save_file

    from mindspeed_mm.tasks.generation.features import VisionModel, list_media, media_features

    directory = needed(flags.model, "--model", "the directory of a vision model")
    output = Path(needed(flags.output, "--output", "the .safetensors file to write"))
    if output.suffix != ".safetensors":
        raise ConfigError(f"--output is '{output}'; expected a file that ends in .safetensors")
    files = list_media(needed(flags.media, "--media", "a folder of pictures and videos"))
    refuse_unwritable(output.parent, "--output")
    _set_precision(flags)
    features = media_features(VisionModel(directory), files, frames=flags.frames)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file({_FEATURES: features}, working_file(output))
    os.replace(working_file(output), output)
    print(f"features of {len(features)} files, {features.shape[1]} each, in {output}")
    return 0


def _parse(group: type[FlagsT], words: Sequence[str], about: str) -> FlagsT | None:
    """Parse the flags of a group; None: help was requested and printed."""
    parser = build_parser((group,))
    parser.description = about
    if "-h" in words or "--help" in words:
        parser.print_help()
        return None
    words = spell_as_declared(parser, words)
    raise_all(unknown_flags(parser, words))
    parsed, extras = parser.parse_known_args(words)
    raise_all(stray_words(parser, words, extras))
    flags = group(**vars(parsed))
    _check_paths(flags)
    return flags


def _check_paths(flags: object) -> None:
    """Refuse paths to read that don't exist, before torch is imported."""
    for item in flags_of(type(flags)):
        path = getattr(flags, item.name)
        if item.path not in ("file", "directory") or path is None or Path(path).exists():
            continue
        if item.name in ("clip", "model"):
            raise CheckpointError(f"{item.spelling}: {describe_missing_model(path)}")
        raise ConfigError(f"{item.spelling}: {describe_missing(path)}")
