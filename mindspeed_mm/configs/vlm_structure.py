"""From model.json's numbers to transformers' configuration of the model, beside or without a HF directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.family_structure import FamilyStructure, ModelNumber, NumberPlace, find_structure
from mindspeed_mm.configs.hf_directory import model_id_problem, read_hf_config
from mindspeed_mm.configs.plugins import import_plugins
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mindspeed_mm.configs.vlm_config import VLMModelConfig

_TEXT, _VISION = "text_decoder", "image_encoder.vision_encoder"
_PADDING = 256  # rows by which a published vocabulary and that of the weights may differ: both are padded
_ALONE = "qwen2_5_vl"  # the family that published files describe by numbers alone, without naming it

_TEXT_NUMBERS = (
    ModelNumber(f"{_TEXT}.num_layers", "text", "num_hidden_layers"),
    ModelNumber(f"{_TEXT}.hidden_size", "text", "hidden_size"),
    ModelNumber(f"{_TEXT}.ffn_hidden_size", "text", "intermediate_size"),
    ModelNumber(f"{_TEXT}.num_attention_heads", "text", "num_attention_heads"),
    ModelNumber(f"{_TEXT}.num_query_groups", "text", "num_key_value_heads"),
    ModelNumber(f"{_TEXT}.vocab_size", "text", "vocab_size"),
    ModelNumber(f"{_TEXT}.max_position_embeddings", "text", "max_position_embeddings", wins=True),
    ModelNumber(f"{_TEXT}.layernorm_epsilon", "text", "rms_norm_eps"),
    ModelNumber(f"{_TEXT}.attention_dropout", "text", "attention_dropout", wins=True),
    ModelNumber(f"{_TEXT}.init_method_std", "text", "initializer_range", wins=True),
    ModelNumber(f"{_TEXT}.rope_theta", "rope", "rope_theta", wins=True),
    ModelNumber(f"{_TEXT}.mrope_section", "rope", "mrope_section", wins=True),
    ModelNumber(
        f"{_TEXT}.untie_embeddings_and_output_weights", "top", "tie_word_embeddings", read=lambda untied: not untied
    ),
)
_TOKENS = (
    ModelNumber("video_token_id", "top", "video_token_id"),
    ModelNumber("vision_start_token_id", "top", "vision_start_token_id"),
)
#: keys with the same meaning; the first takes precedence
_SYNONYMS = {
    f"{_VISION}.ffn_hidden_size": f"{_VISION}.intermediate_size",
    f"{_TEXT}.rope_theta": f"{_TEXT}.rotary_base",
}


def structure_of(described: VLMModelConfig) -> PretrainedConfig:
    """See `VLMModelConfig.hf_config`."""
    import_plugins(described.plugin)
    config = _read_directory(described) if described.init_from_hf_path else _from_numbers(described)
    family, text = find_structure(config.model_type), config.get_text_config()
    if text is not config:
        text.tie_word_embeddings = config.tie_word_embeddings
    raise_all(list(_misfits(described, family, config, text)))
    return config


def _given(described: VLMModelConfig, number: ModelNumber) -> Any:
    """Return model.json's value for an attribute, in transformers' terms; None where it has none."""
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


def _read_directory(described: VLMModelConfig) -> PretrainedConfig:
    """Return the directory's configuration, checked against model.json's numbers."""
    directory = Path(str(described.init_from_hf_path))
    source = directory / "config.json"
    config = read_hf_config(directory, f"{described.file}: init_from_hf_path", described.trust_remote_code)
    if described.model_id not in (None, config.model_type):
        raise ConfigError(model_id_problem(described.file, str(described.model_id), str(source), config.model_type))
    family = find_structure(config.model_type)
    problems = [p for number in _numbers_of(family) if (p := _compare(described, number, config, source))]
    if not family.tower_numbers:
        problems += _numbers_of_no_tower(described, source)
    raise_all([*problems, *_compare_image_token(described, config, source)])
    return config


def _numbers_of(family: FamilyStructure) -> tuple[ModelNumber, ...]:
    return (*_TEXT_NUMBERS, *family.tower_numbers, *_TOKENS)


def _numbers_of_no_tower(described: VLMModelConfig, source: Path) -> Iterator[str]:
    """Yield a sentence for each number of a vision tower in the model.json of a model that has none."""
    for path, value in described.tower_numbers().items():
        yield f"{described.file}: '{path}' is {show(value)}, but {source} describes a model without a vision tower"


def _place_of(config: PretrainedConfig, number: ModelNumber) -> PretrainedConfig:
    text = config.get_text_config()
    return config.vision_config if number.place == "vision" else config if number.place == "top" else text


def _compare(described: VLMModelConfig, number: ModelNumber, config: PretrainedConfig, source: Path) -> str | None:
    """Return a sentence if model.json contradicts the directory; log a value that wins, and set it in `config`."""
    value = _given(described, number)
    if value is None:
        return None
    place, file = _place_of(config, number), described.file
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


def _same(value: object, found: object) -> bool:
    if isinstance(value, list) and isinstance(found, (list, tuple)):
        return list(found) == value
    return value == found


def _compare_image_token(described: VLMModelConfig, config: PretrainedConfig, source: Path) -> list[str]:
    token, found = described.img_context_token_id, getattr(config, "image_token_id", None)
    if token is None or token == found:
        return []
    says = f"{described.file}: 'img_context_token_id' is {token}, {source}'s image_token_id is {show(found)}"
    if token == getattr(config, "video_token_id", None):
        notice(f"{says}, which is taken: {token} is the video token")
        return []
    return [f"{says}; remove the key, or name the directory that it belongs to"]


def _from_numbers(described: VLMModelConfig) -> PretrainedConfig:
    """Return the configuration of a model that model.json describes by itself."""
    file, name = described.file, described.model_id or _ALONE
    family = find_structure(name)
    if family.alone is None:
        raise ConfigError(
            f"{file}: key 'init_from_hf_path' is missing: only {_ALONE} can be described by numbers alone, and "
            f"'model_id' is '{described.model_id}'"
        )
    values: dict[NumberPlace, dict[str, Any]] = {"text": {}, "vision": {}, "top": {}, "rope": {"rope_type": "default"}}
    missing = []
    for number in _numbers_of(family):
        value = _given(described, number)
        if value is None:
            value = family.alone.defaults.get(number.path)
        if value is None and number.path not in family.alone.defaults:
            missing.append(number.path)
        values[number.place][number.name] = value
    if missing:
        raise ConfigError(
            f"{file}: without 'init_from_hf_path' the numbers describe the model, and these are missing: "
            f"{', '.join(missing)}"
        )
    return family.alone.build(described, values)


def _misfits(
    described: VLMModelConfig, family: FamilyStructure, config: PretrainedConfig, text: PretrainedConfig
) -> Iterator[str]:
    """Yield a sentence for each number that follows from others, and is given otherwise."""
    file = described.file
    heads, groups = text.num_attention_heads, text.num_key_value_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    facts: dict[str, tuple[object, str]] = {
        f"{_TEXT}.kv_channels": (head_size, "the size of the language model's heads"),
        f"{_TEXT}.add_qkv_bias": (family.has_qkv_bias(text), "what the family has"),
        f"{_TEXT}.qk_layernorm": (family.qk_norm, "what the family has"),
        f"{_TEXT}.use_qk_norm": (family.qk_norm, "what the family has"),
    }
    if family.tower_facts is not None:
        facts |= family.tower_facts(config)
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
    if family.tower_misfits is not None:
        yield from family.tower_misfits(file, config)
