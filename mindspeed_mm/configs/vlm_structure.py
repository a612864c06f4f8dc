"""From model.json's numbers to transformers' configuration of the model, beside or without a HF directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mindspeed_mm.configs.hf_directory import model_id_problem, read_hf_config
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from mindspeed_mm.configs.vlm_config import VLMModelConfig

_TEXT, _VISION, _PROJECTOR = "text_decoder", "image_encoder.vision_encoder", "image_encoder.vision_projector"
_NORM_EPSILON = 1e-6  # of tower and projector; transformers writes it into the class
_PADDING = 256  # rows by which a published vocabulary and that of the weights may differ: both are padded


@dataclass(frozen=True)
class _Number:
    """A key of model.json and the attribute of transformers' configuration that it means.

    Attributes:
        path: dotted key.
        place, name: which of the configurations, and the attribute in it.
        read: value in model.json → value of the attribute.
        wins: a value that differs from the HF directory's replaces it, with a notice, instead of being an error.
        default: without a HF directory; None: the key must be given.
    """

    path: str
    place: Literal["text", "vision", "top", "rope"]
    name: str
    read: Callable[[Any], Any] = lambda value: value
    wins: bool = False
    default: Any = None


_NUMBERS = (
    _Number(f"{_TEXT}.num_layers", "text", "num_hidden_layers"),
    _Number(f"{_TEXT}.hidden_size", "text", "hidden_size"),
    _Number(f"{_TEXT}.ffn_hidden_size", "text", "intermediate_size"),
    _Number(f"{_TEXT}.num_attention_heads", "text", "num_attention_heads"),
    _Number(f"{_TEXT}.num_query_groups", "text", "num_key_value_heads"),
    _Number(f"{_TEXT}.vocab_size", "text", "vocab_size"),
    _Number(f"{_TEXT}.max_position_embeddings", "text", "max_position_embeddings", wins=True, default=128000),
    _Number(f"{_TEXT}.layernorm_epsilon", "text", "rms_norm_eps", default=1e-6),
    _Number(f"{_TEXT}.attention_dropout", "text", "attention_dropout", wins=True, default=0.0),
    _Number(f"{_TEXT}.init_method_std", "text", "initializer_range", wins=True, default=0.02),
    _Number(f"{_TEXT}.rope_theta", "rope", "rope_theta", wins=True, default=1e6),
    _Number(f"{_TEXT}.mrope_section", "rope", "mrope_section", wins=True, default=[16, 24, 24]),
    _Number(
        f"{_TEXT}.untie_embeddings_and_output_weights", "top", "tie_word_embeddings", read=lambda untied: not untied
    ),
    _Number(f"{_VISION}.num_layers", "vision", "depth"),
    _Number(f"{_VISION}.hidden_size", "vision", "hidden_size"),
    _Number(f"{_VISION}.ffn_hidden_size", "vision", "intermediate_size"),
    _Number(f"{_VISION}.num_attention_heads", "vision", "num_heads"),
    _Number(f"{_VISION}.in_channels", "vision", "in_channels", default=3),
    _Number(f"{_VISION}.patch_size", "vision", "patch_size", default=14),
    _Number(f"{_VISION}.spatial_merge_size", "vision", "spatial_merge_size", default=2),
    _Number(f"{_VISION}.temporal_patch_size", "vision", "temporal_patch_size", default=2),
    _Number(f"{_VISION}.tokens_per_second", "vision", "tokens_per_second", default=2),
    _Number(f"{_VISION}.window_attn_size", "vision", "window_size", default=112),
    _Number(f"{_VISION}.fullatt_block_indexes", "vision", "fullatt_block_indexes", default=[7, 15, 23, 31]),
    _Number("video_token_id", "top", "video_token_id", default=151656),
    _Number("vision_start_token_id", "top", "vision_start_token_id", default=151652),
)
#: keys that say the same; the first goes before
_SYNONYMS = {
    f"{_VISION}.ffn_hidden_size": f"{_VISION}.intermediate_size",
    f"{_TEXT}.rope_theta": f"{_TEXT}.rotary_base",
}


def structure_of(described: VLMModelConfig) -> Any:
    """See `VLMModelConfig.hf_config`."""
    config = _read_directory(described) if described.init_from_hf_path else _from_numbers(described)
    text = config.get_text_config()
    if text is not config:
        text.tie_word_embeddings = config.tie_word_embeddings
    raise_all(list(_misfits(described, config, text)))
    return config


def _given(described: VLMModelConfig, number: _Number) -> Any:
    """What model.json says for an attribute, in transformers' terms; None where it says nothing."""
    value = described.value(number.path)
    other = _SYNONYMS.get(number.path)
    if other is not None and described.value(other) is not None:
        if value is not None and value != described.value(other):
            notice(
                f"{described.file}: '{other}' is {show(described.value(other))} and has no effect: '{number.path}' is "
                f"{show(value)}"
            )
        value = described.value(other) if value is None else value
    if number.name == "num_key_value_heads" and described.text_decoder.group_query_attention is False:
        value = described.text_decoder.num_attention_heads
    return None if value is None else number.read(value)


def _read_directory(described: VLMModelConfig) -> Any:
    """The directory's configuration, checked against model.json's numbers."""
    directory = Path(str(described.init_from_hf_path))
    source = directory / "config.json"
    config = read_hf_config(directory, f"{described.file}: init_from_hf_path", described.trust_remote_code)
    if described.model_id not in (None, config.model_type):
        raise ConfigError(model_id_problem(described.file, str(described.model_id), str(source), config.model_type))
    problems = [problem for number in _NUMBERS if (problem := _compare(described, number, config, source))]
    raise_all([*problems, *_compare_image_token(described, config, source)])
    return config


def _place_of(config: Any, number: _Number) -> Any:
    text = config.get_text_config()
    places = {"top": config, "text": text, "rope": text, "vision": getattr(config, "vision_config", None)}
    return places[number.place]


def _compare(described: VLMModelConfig, number: _Number, config: Any, source: Path) -> str | None:
    """Return a sentence if model.json contradicts the directory; put a value that wins in place, and say so."""
    value = _given(described, number)
    if value is None:
        return None
    place, file = _place_of(config, number), described.file
    if place is None:
        return f"{file}: '{number.path}' is {show(value)}, but {source} describes a model without a vision tower"
    found = place.rope_parameters.get(number.name) if number.place == "rope" else getattr(place, number.name, None)
    if _same(value, found):
        return None
    says = f"{file}: '{number.path}' is {show(described.value(number.path))}, {source}'s {number.name} is {show(found)}"
    if number.name == "mrope_section" and found is None:
        return f"{says}: the model has no such positions; remove the key"
    if number.wins:
        notice(f"{says}; {file}'s is taken")
        if number.place == "rope":
            place.rope_parameters[number.name] = value
        else:
            setattr(place, number.name, value)
        return None
    if number.name == "vocab_size" and abs(value - found) < _PADDING:
        notice(f"{says}, which is taken: the weights have so many rows, and the difference is padding")
        return None
    return f"{says}; remove the key, or name the directory that it belongs to"


def _same(value: object, found: Any) -> bool:
    if isinstance(value, list) and isinstance(found, (list, tuple)):
        return list(found) == value
    return value == found


def _compare_image_token(described: VLMModelConfig, config: Any, source: Path) -> list[str]:
    token, found = described.img_context_token_id, getattr(config, "image_token_id", None)
    if token is None or token == found:
        return []
    says = f"{described.file}: 'img_context_token_id' is {token}, {source}'s image_token_id is {show(found)}"
    if token == getattr(config, "video_token_id", None):
        notice(f"{says}, which is taken: {token} is the video token")
        return []
    return [f"{says}; remove the key, or name the directory that it belongs to"]


def _from_numbers(described: VLMModelConfig) -> Any:
    """The configuration of a Qwen2.5-VL that model.json describes by itself."""
    from transformers import Qwen2_5_VLConfig

    file, family = described.file, "qwen2_5_vl"
    if described.model_id not in (None, family):
        raise ConfigError(
            f"{file}: key 'init_from_hf_path' is missing: only {family} can be described by numbers alone, and "
            f"'model_id' is '{described.model_id}'"
        )
    values: dict[str, dict[str, Any]] = {"text": {}, "vision": {}, "top": {}, "rope": {"rope_type": "default"}}
    missing = []
    for number in _NUMBERS:
        value = _given(described, number)
        if value is None and number.default is None:
            missing.append(number.path)
        values[number.place][number.name] = number.default if value is None else value
    if missing:
        raise ConfigError(
            f"{file}: without 'init_from_hf_path' the numbers describe the model, and these are missing: "
            f"{', '.join(missing)}"
        )
    text, vision = values["text"], values["vision"]
    vision["out_hidden_size"] = text["hidden_size"]
    image_token = described.img_context_token_id
    if image_token is not None and image_token == values["top"]["video_token_id"]:
        notice(f"{file}: 'img_context_token_id' is {image_token}, the video token; {image_token - 1} is taken")
        image_token -= 1
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": values["rope"]},
        vision_config=vision,
        image_token_id=151655 if image_token is None else image_token,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **values["top"],
    )


def _misfits(described: VLMModelConfig, config: Any, text: Any) -> Iterator[str]:
    """Sentences about numbers that follow from others, and are given otherwise."""
    file = described.file
    heads, groups = text.num_attention_heads, text.num_key_value_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    facts: dict[str, tuple[Any, str]] = {
        f"{_TEXT}.kv_channels": (head_size, "the size of the language model's heads"),
        f"{_TEXT}.add_qkv_bias": (_has_qkv_bias(text), "what the family has"),
        f"{_TEXT}.qk_layernorm": (text.model_type.startswith("qwen3"), "what the family has"),
        f"{_TEXT}.use_qk_norm": (text.model_type.startswith("qwen3"), "what the family has"),
    }
    vision = getattr(config, "vision_config", None)
    if vision is not None and hasattr(vision, "depth"):
        merged = vision.hidden_size * vision.spatial_merge_size**2
        facts |= {
            f"{_VISION}.num_query_groups": (vision.num_heads, "the number of the tower's heads"),
            f"{_VISION}.kv_channels": (vision.hidden_size // vision.num_heads, "the size of the tower's heads"),
            f"{_VISION}.out_hidden_size": (text.hidden_size, "the language model's hidden size"),
            f"{_VISION}.layernorm_epsilon": (_NORM_EPSILON, "what the family has"),
            f"{_PROJECTOR}.num_layers": (1, "what the family has"),
            f"{_PROJECTOR}.input_size": (vision.hidden_size, "the tower's hidden size"),
            f"{_PROJECTOR}.ffn_hidden_size": (merged, "the tower's hidden size × spatial_merge_size²"),
            f"{_PROJECTOR}.hidden_size": (text.hidden_size, "the language model's hidden size"),
            f"{_PROJECTOR}.layernorm_epsilon": (_NORM_EPSILON, "what the family has"),
        }
    for path, (expected, why) in facts.items():
        given = described.value(path)
        if given is not None and given != expected:
            yield f"{file}: '{path}' is {show(given)}; expected {show(expected)}, {why}"
    if text.hidden_size % heads and not getattr(text, "head_dim", None):
        yield f"{file}: '{_TEXT}.hidden_size' is {text.hidden_size}, which {heads} attention heads don't divide"
    if heads % groups:
        yield f"{file}: '{_TEXT}.num_query_groups' is {groups}, which doesn't divide {heads} attention heads"
    section = text.rope_parameters.get("mrope_section")
    if section is not None and 2 * sum(section) != head_size:
        yield (
            f"{file}: '{_TEXT}.mrope_section' is {section}, {sum(section)} in all; expected half the size of a head, "
            f"{head_size // 2}"
        )
    if vision is not None and hasattr(vision, "depth") and vision.hidden_size % vision.num_heads:
        yield (
            f"{file}: '{_VISION}.hidden_size' is {vision.hidden_size}, which {vision.num_heads} attention heads don't "
            "divide"
        )


def _has_qkv_bias(text: Any) -> bool:
    return bool(getattr(text, "attention_bias", text.model_type.startswith("qwen2")))
