"""`mindspeed-mm data extract-features`: its flags, and the model and data that they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from mindspeed_mm.configs.arguments import GROUPS
from mindspeed_mm.configs.config import MMConfig, settle_caption_length, settle_remote_code
from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.flags.parser import build_parser, spell_as_declared, stray_words, unknown_flags
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.sections import Bool, Section, build_section, plain, raise_all
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.dry_run import asks_for_dry_run, print_answer
from mindspeed_mm.utils.errors import ConfigError, MMError, kind_of
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.files import refuse_unwritable
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from mindspeed_mm.configs.config import ConfigReader

_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class _Described:
    """Content of the flags and files: nothing has been opened that they name."""

    output: str
    needs_text: bool
    model: SoRAModelConfig
    data: GenerationDataConfig


class SoraFeature(Section):
    """tools.json: `sorafeature`."""

    save_path: str | None = Field(None, description="folder of the features, where --output doesn't say it")
    extract_video_feature: Bool = Field(True, description="must be true: clips become latents")
    extract_text_feature: Bool = Field(True, description="captions become text states; false = as --only video")


def add_extraction_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--mm-model", required=True, help="model.json: which frozen parts encode")
    parser.add_argument("--mm-data", required=True, help="data.json of the clips (t2v, i2v, t2i)")
    parser.add_argument("--mm-tool", help="tools.json: sorafeature.save_path, where --output isn't given")
    parser.add_argument("--output", help="folder of the features; what is there already is not made again")
    parser.add_argument("--only", choices=("video",), help="video: captions are encoded while training")
    parser.add_argument("--validation", action="store_true", help="the rows of val_data_path in place of data_path")
    parser.add_argument(
        "--dtype", choices=("as_encoded", "bf16", "fp32"), default="as_encoded", help="dtype that features are kept in"
    )
    parser.add_argument("--micro-batch-size", type=int, default=1, help="clips of one shape that are encoded together")
    parser.add_argument("--num-workers", type=int, default=2, help="processes of each rank that read clips")
    parser.add_argument("--seed", type=int, default=1234, help="of the training: decides which part of a clip is shown")
    parser.add_argument("--shard-megabytes", type=int, default=256, help="features are written when so much is made")


def main(argv: Sequence[str] | None = None, *, script: str = "get_sora_feature.py", family: str | None = None) -> int:
    """Extract features for published launch scripts, which pass flags of a training along with the command's own.

    Args:
        argv: words of the command line; None: those of this process.
        script: name of the entry script, for messages.
        family: predictor of a model.json without one, for the scripts of a family.

    Returns:
        the exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if asks_for_dry_run(words):
        return print_answer(lambda: _outline(_describe(_parse(words, script), family)))
    try:
        return extract_features(_parse(words, script), family)
    except MMError as error:
        print(f"{kind_of(error)}: {error}", file=sys.stderr)
        return 1


def _parse(words: Sequence[str], script: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=script, allow_abbrev=False)
    add_extraction_arguments(parser)
    training = build_parser(GROUPS)
    for action in parser._actions:
        if not set(action.option_strings) & training._option_string_actions.keys():
            training.add_argument(*action.option_strings, default=argparse.SUPPRESS)
    words = spell_as_declared(training, words)
    raise_all(unknown_flags(training, words))
    options, others = parser.parse_known_args(words)
    given, extras = training.parse_known_args(others)
    raise_all(stray_words(training, others, extras))
    if unused := vars(given).keys() - {"dry_run"}:
        names = ", ".join("--" + name.replace("_", "-") for name in vars(given) if name in unused)
        notice(f"no effect here, as nothing is trained: {names}")
    return options


def extract_by_words(words: Sequence[str]) -> int:
    """Run the words after `mindspeed-mm data extract-features`; return the exit status."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="mindspeed-mm data extract-features", description=description)
    add_extraction_arguments(parser)
    return extract_features(parser.parse_args(list(words)))


def extract_features(options: argparse.Namespace, family: str | None = None) -> int:
    """Extract the features of a data set; several processes (torchrun) share the rows.

    Args:
        options: flags of `add_extraction_arguments`.
        family: predictor of a model.json without one.

    Returns:
        0.

    Raises:
        ConfigError, DataError, CheckpointError: something can't be used; or the folder has features of other
            settings already.
    """
    described = _describe(options, family)
    output, needs_text, model, data = described.output, described.needs_text, described.model, described.data
    from mindspeed_mm import accelerator  # imports torch: a mistake in flags and files is reported before
    from mindspeed_mm.models.generation.sample_encoder import SampleEncoder
    from mindspeed_mm.models.generation.sora_model import generation_rule, resolve_predictor
    from mindspeed_mm.tools.feature_extraction.extract import Extraction, open_clips
    from mindspeed_mm.tools.feature_extraction.made_from import made_from

    predictor, _, _ = resolve_predictor(model)
    dataset = open_clips(data, generation_rule(model, options.seed), options.validation)
    tokenizers = data.dataset_param.tokenizer_dirs
    accelerator.current().set_device()
    launch = this_launch()
    extraction = Extraction(
        dataset,
        SampleEncoder(model, predictor, tokenizers, needs_text=needs_text),
        output,
        made_from(model, data, predictor, tokenizers, dataset, options, needs_text),
        rank=launch.rank,
        world_size=launch.world_size,
        needs_text=needs_text,
        dtype=options.dtype,
        batch_size=options.micro_batch_size,
        num_workers=options.num_workers,
        shard_bytes=options.shard_megabytes * _MEGABYTE,
    )
    extraction.run()
    return 0


def _describe(options: argparse.Namespace, family: str | None) -> _Described:
    require_extra("generation", "the extraction of features")
    for name in ("micro_batch_size", "shard_megabytes"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; expected 1 or more")
    output, needs_text = _settle(options)
    refuse_unwritable(output, "--output")
    files = MMConfig({"model": options.mm_model, "data": options.mm_data})
    settle_remote_code(False, files)  # the command has no flag for it
    settle_caption_length(files.model, files.data)
    data = GenerationDataConfig.from_dict(files.data, file=options.mm_data)
    if family is not None:
        _settle_predictor(files.model, family, data.dataset_param.dataset_type)
    return _Described(output, needs_text, SoRAModelConfig.from_dict(files.model, file=options.mm_model), data)


def _outline(described: _Described) -> dict[str, object]:
    """The answer of a dry run: nothing is opened that flags and files name."""
    param = described.data.dataset_param
    return {"output": described.output, "dataset_type": param.dataset_type, "text": described.needs_text}


def _settle_predictor(model: ConfigReader, family: str, dataset_type: str) -> None:
    """Set the predictor of the features, and its task, where model.json names neither."""
    if any(model.get(key) is not None for key in ("predictor", "init_from_diffusers")):
        return
    model["predictor"] = {"model_id": family}
    if model.get("task") is None and dataset_type in ("t2v", "i2v"):
        model["task"] = dataset_type
    task = f", and 'task' {model.get('task')}" if model.get("task") else ""
    notice(f"{model.config_file}: 'predictor' is missing; features are made for '{family}'{task}")


def _settle(options: argparse.Namespace) -> tuple[str, bool]:
    """Return the folder of the features, and whether captions are encoded."""
    feature = SoraFeature()
    if options.mm_tool:
        content: Any = plain(read_json(options.mm_tool))
        if isinstance(content, dict):
            asked = content.pop("sorafeature", {})
            feature, _ = build_section(SoraFeature, asked, f"{options.mm_tool}: sorafeature", "tools.json")
        ToolsConfig.from_dict(content, file=options.mm_tool)
    if not feature.extract_video_feature:
        raise ConfigError(
            f"{options.mm_tool}: 'sorafeature.extract_video_feature' is false; nothing trains on text states without "
            "latents, write true"
        )
    output = options.output or feature.save_path
    if not output:
        raise ConfigError("--output is missing: the folder of the features (or sorafeature.save_path in tools.json)")
    return output, feature.extract_text_feature and options.only != "video"
