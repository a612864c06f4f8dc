"""The options of inference_vlm.py: its flags, and the keys of model.json that are about answering.

A training model.json and a published inference file both work: keys about answering are taken out first, the rest
describes the model. A flag takes precedence over a key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.configs.files import YAML_SUFFIXES, read_json, read_yaml
from mindspeed_mm.configs.flags.spec import flag
from mindspeed_mm.configs.generation_keys import KEYS_WITHOUT_FIELD, GenerationKeys, idle_keys, refused_keys
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.published import NoEffect, Refused, is_given, log_no_effect, published_paths, refusals
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import Bool, Count, DtypeName, Section, Size, Texts, build_section, plain, raise_all
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.utils.errors import ConfigError


@dataclass
class AnswerFlags:
    """Answering prompts."""

    mm_model: Annotated[
        str | None, flag("model.json of inference or of a training; absent = --load says all of it", path="file")
    ] = None
    mm_data: Annotated[str | None, flag("data.json: rows to answer, and how media and texts are read", path="file")] = (
        None
    )
    load: Annotated[
        str | None,
        flag("HF directory, run folder, iter folder, export or PEFT adapter; absent = model.json's", path="directory"),
    ] = None
    ckpt_step: Annotated[
        int | Literal["best"] | None,
        flag("this iteration of the run folder, or the best one of --save-best; absent = the newest", minimum=0),
    ] = None
    ema: Annotated[bool, flag("a checkpoint's averaged weights in the place of the trained ones")] = False
    merge_adapter: Annotated[bool, flag("add a PEFT adapter to its base's weights before answering")] = False
    processor_path: Annotated[
        str | None,
        flag(
            "directory of processor or tokenizer; absent = the model's, or the one its run started from",
            path="directory",
        ),
    ] = None
    prompt: Annotated[str | None, flag("a prompt, answered on standard output")] = None
    image: Annotated[list[str] | None, flag("pictures of the prompt, before its text", path="file")] = None
    video: Annotated[list[str] | None, flag("videos of the prompt, before its text", path="file")] = None
    audio: Annotated[list[str] | None, flag("sounds of the prompt, before its text", path="file")] = None
    system: Annotated[str | None, flag("system text of prompts and rows without one")] = None
    data_path: Annotated[str | None, flag("file of rows to answer; takes precedence over data.json's", path="file")] = (
        None
    )
    output: Annotated[str | None, flag("file of answers, one JSON object a line", path="output")] = None
    overwrite: Annotated[bool, flag("answer anew, in the place of an earlier run's answers")] = False
    template: Annotated[str | None, flag("name of a chat template; absent = the processor's own")] = None
    enable_thinking: Annotated[bool | None, flag("passed to the chat template; absent = data.json's, else true")] = None
    image_max_pixels: Annotated[int | None, flag("larger images are scaled down to this area", minimum=1)] = None
    image_min_pixels: Annotated[int | None, flag("smaller images are scaled up to this area", minimum=0)] = None
    video_max_pixels: Annotated[int | None, flag("larger frames are scaled down to this area", minimum=1)] = None
    video_min_pixels: Annotated[int | None, flag("smaller frames are scaled up to this area", minimum=0)] = None
    video_fps: Annotated[float | None, flag("frames a second taken from a video", above=0)] = None
    video_maxlen: Annotated[int | None, flag("most frames taken from one video", minimum=1)] = None
    max_new_tokens: Annotated[
        int | None, flag("longest answer in tokens; absent = generation_config.json's, else 512", minimum=1)
    ] = None
    do_sample: Annotated[bool | None, flag("draw tokens at random; absent = the most likely one each time")] = None
    temperature: Annotated[float | None, flag("divides the logits when tokens are drawn", above=0)] = None
    top_p: Annotated[float | None, flag("share of the probability that tokens are drawn from", above=0, maximum=1)] = (
        None
    )
    top_k: Annotated[int | None, flag("number of tokens that are drawn from", minimum=1)] = None
    repetition_penalty: Annotated[float | None, flag("divides the score of tokens that were there", above=0)] = None
    num_beams: Annotated[int | None, flag("beams of a beam search; 1 = none", minimum=1)] = None
    stop: Annotated[list[str] | None, flag("texts that end an answer; they aren't part of it")] = None
    use_cache: Annotated[bool | None, flag("keep keys and values of earlier tokens; absent = yes")] = None
    batch_size: Annotated[
        int | None, flag("prompts answered at a time; absent = --micro-batch-size, else chosen by length", minimum=1)
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        flag("of the model; absent = model.json's, --bf16's, else config.json's on an accelerator, fp32 on the host"),
    ] = None
    seed: Annotated[int | None, flag("tokens are drawn by it and the row's number")] = None


class TokenizerKeys(Section):
    """`tokenizer`."""

    from_pretrained: str | None = Field(None, description="HF directory of tokenizer and processor; of the model, too")


class AnswerKeys(Section):
    """Keys of model.json that are about answering."""

    prompts: Texts = Field(None, description="a prompt, or several, which are answered one after the other")
    image_path: Texts = Field(None, description="picture of the prompt; of several prompts a list, one for each")
    video_path: Texts = Field(None, description="video of the prompt, likewise")
    min_pixels: Size | None = Field(None, description="as --image-min-pixels")
    max_pixels: Count | None = Field(None, description="as --image-max-pixels")
    dtype: DtypeName | None = Field(None, description="of the model")
    tokenizer: TokenizerKeys = Field(TokenizerKeys(), description="tokenizer, processor and configuration")
    generation_config: GenerationKeys = Field(GenerationKeys(), description="how an answer is generated")


class EvaluationKeys(Section):
    """Keys of model.json that are about a benchmark; evaluate_vlm.py reads them."""

    evaluation_dataset: str | None = Field(None, description="as --benchmark; published names such as ai2d_test, too")
    evaluation_model: str | None = Field(None, description="config.json says which model it is")
    dataset_path: str | None = Field(None, description="as --data-path of evaluate_vlm.py")
    result_output_path: str | None = Field(None, description="as --output of evaluate_vlm.py")


class InferenceKeys(Section):
    """`inference` of the YAML file that takes the place of flags and files."""

    load: str | None = Field(None, description="as --load")
    load_format: Literal["auto", "hf", "dcp"] | None = Field(None, description="found in the directory")
    seed: Size | None = Field(None, description="as --seed")
    init_model_with_meta_device: Bool = Field(False, description="models are always built so")
    plugin: list[str] = Field([], description="modules imported first; they may register models")
    adapter: str | None = Field(None, description="the family is that of config.json")
    processor_path: str | None = Field(None, description="as --processor-path")
    enable_thinking: Bool | None = Field(None, description="as --enable-thinking")
    data_path: str | None = Field(None, description="as --data-path")
    generation: GenerationKeys = Field(GenerationKeys(), description="how an answer is generated")


_OUTSIDE = ("pipeline_class", "device", "patch", "text_encoder", "video_encoder", "img_context_token_id")
REFUSED_ANSWER_KEYS = (
    Refused("text_encoder", is_given, "an encoder of captions belongs to models that make images; remove it"),
    *refused_keys("generation_config"),
    Refused("video_encoder", is_given, "videos go through the image encoder; remove it"),
)
_NO_EFFECT = (
    NoEffect(r"pipeline_class|model_id", "config.json says which model it is"),
    NoEffect(r"device", "the device is what this machine has (or MM_DEVICE)"),
    NoEffect(r"patch\..*|patch", "nothing is patched: attention is the fastest that the device has"),
    NoEffect(r"img_context_token_id", "the processor and config.json know the tokens"),
    *idle_keys("generation_config"),
    NoEffect(r"tokenizer\..*", "a directory says itself which class its tokenizer has"),
    NoEffect(r".*", "it is not about answering"),
)


@dataclass(frozen=True)
class AnswerConfig:
    """What the files of a launch say.

    Attributes:
        keys: about answering.
        model: the model of a training's model.json (its directory, kernels and plugins); None: there is none.
        numbers: the model's numbers of a published file, which config.json must agree with; None: there are none.
        inference: of a YAML file.
        evaluation: about a benchmark.
        file: name for messages.
    """

    keys: AnswerKeys = field(default_factory=AnswerKeys)
    model: TransformersModelConfig | None = None
    numbers: VLMModelConfig | None = None
    inference: InferenceKeys = field(default_factory=InferenceKeys)
    evaluation: EvaluationKeys = field(default_factory=EvaluationKeys)
    file: str = "model.json"

    @classmethod
    def from_file(cls, path: str | Path) -> AnswerConfig:
        """Read a model.json.

        Raises:
            ConfigError: unknown keys, wrong values, keys of other scripts.
        """
        content = read_json(Path(path))
        file = str(path)
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: found {show(content)}, expected an object with keys such as prompts")
        benchmark_names = EvaluationKeys.model_fields.keys()
        names_pipeline = str(content.get("model_id")).endswith("Pipeline")  # files of evaluate_vlm.py do
        own_names = (*AnswerKeys.model_fields, *_OUTSIDE, *benchmark_names, *(["model_id"] if names_pipeline else []))
        own = {key: value for key, value in content.items() if key in own_names and key not in benchmark_names}
        asked = {key: value for key, value in content.items() if key in benchmark_names}
        evaluation, _ = build_section(EvaluationKeys, asked, file, "model.json")
        rest = {key: value for key, value in content.items() if key not in own_names}
        published = published_paths("model") | {"video_path"}
        keys, sorted_keys = build_section(AnswerKeys, own, file, "model.json", published, "model")
        raise_all(refusals(sorted_keys.published, REFUSED_ANSWER_KEYS, file))
        log_no_effect(
            [path for path, value in sorted_keys.published.items() if _says_something(value)], _NO_EFFECT, file
        )
        if not rest:
            return cls(keys, evaluation=evaluation, file=file)
        if "init_from_hf_path" in rest or not {"text_decoder", "image_encoder"} & rest.keys():
            return cls(keys, TransformersModelConfig.from_dict(rest, file), evaluation=evaluation, file=file)
        return cls(keys, numbers=VLMModelConfig.from_dict(rest, file), evaluation=evaluation, file=file)

    @classmethod
    def from_yaml(cls, path: str) -> AnswerConfig:
        """Read the sections `inference` and `model` of a YAML file; the rest of it is a training's.

        Raises:
            ConfigError: no such section, unknown keys, wrong values.
        """
        content = read_yaml(path)
        if not isinstance(content, Mapping) or not isinstance(content.get("inference"), Mapping):
            raise ConfigError(f"{path}: the section 'inference' is missing: load, data_path, generation")
        published = {f"generation.{key}" for key in KEYS_WITHOUT_FIELD}
        inference, found = build_section(InferenceKeys, content["inference"], path, path, published)
        raise_all(refusals(found.published, refused_keys("generation"), path))
        idle = [key for key in ("load_format", "init_model_with_meta_device", "adapter") if key in content["inference"]]
        log_no_effect([*found.published, *idle], _YAML_NO_EFFECT, path)
        model = content.get("model")
        described = plain(model) if isinstance(model, Mapping) else {}
        path_of_model = described.get("model_name_or_path")
        trusts = {"trust_remote_code": described["trust_remote_code"]} if "trust_remote_code" in described else {}
        kernels = {"attn_implementation": value} if (value := described.get("attn_implementation")) else {}
        named = {"init_from_hf_path": path_of_model or inference.load, "plugin": list(inference.plugin)}
        others = sorted(key for key in content if key not in ("inference", "model"))
        log_no_effect(others, _YAML_NO_EFFECT, path)
        config = TransformersModelConfig.from_dict({**named, **trusts, **kernels}, path)
        return cls(model=config, inference=inference, file=path)


_YAML_NO_EFFECT = (
    NoEffect(r"load_format|init_model_with_meta_device|adapter", "it is found in the directory itself"),
    *idle_keys("generation"),
    NoEffect(r".*", "it belongs to training"),
)


def _says_something(value: object) -> bool:
    return value is not None and value is not False


def idle_keys_of_models() -> list[tuple[str, NoEffect]]:
    """Return the published keys about answering that have no effect, each with the reason."""
    refused = {rule.path for rule in REFUSED_ANSWER_KEYS if not rule.path.startswith("generation_config.")}
    names = (*_OUTSIDE, *(f"generation_config.{key}" for key in KEYS_WITHOUT_FIELD), "tokenizer.hub_backend")
    return [(n, next(r for r in _NO_EFFECT if re.fullmatch(r.pattern, n))) for n in names if n not in refused]


def is_yaml(word: str) -> bool:
    """Whether a word of a command line names a YAML file."""
    return word.lower().endswith(YAML_SUFFIXES) and not word.startswith("-")
