"""Converters and directions of published `mm-convert` commands that don't exist here, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.utils.errors import ConfigError, did_you_mean

_TEXT = (
    "a run reads the HF directory as it is (init_from_hf_path in model.json, or --load) and --save-hf writes one; "
    "GenericDCPConverter hf_to_dcp and dcp_to_hf convert it, too"
)
_VIDEO = (
    "pretrain_sora.py reads the diffusers directory as it is (predictor.from_pretrained in model.json, or --load) and "
    "--save-hf writes one; GenericDCPConverter hf_to_dcp and dcp_to_hf convert it, too"
)
_NO_MODEL = "its model is not there yet either"

#: published converter → its replacement
_CONVERTERS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "ExpertMergeDcpConverter",
            "InternVLConverter",
            "Mistral3Converter",
            "Qwen2VLConverter",
            "Qwen2_5_OmniConverter",
            "Qwen35Converter",
            "Qwen3VLConverter",
            "Qwen3VLMegatronConverter",
            "Qwen3_OmniConverter",
        ),
        _TEXT,
    ),
    "WanConverter": _VIDEO,
    **dict.fromkeys(
        ("BagelConverter", "MOSSTTSConverter", "Qwen3TTSConverter", "VACEConverter", "VideoAlignConverter"), _NO_MODEL
    ),
}

#: published direction → its replacement
_DIRECTIONS: Mapping[str, str] = {
    "resplit": "it is not needed: a checkpoint fits every layout, so start the run from the folder as it is",
    "hf_to_mm_ldt": "it is not needed: a checkpoint fits every layout; write hf_to_mm",
    **dict.fromkeys(
        ("lora_hf_to_mm", "lora_mm_to_hf", "merge_lora_to_base", "merge_mm_lora_dcp_weight_to_base_hf"),
        "it is not there yet, as LoRA is not",
    ),
    "layerzero_to_mm": "it is not needed: no run here writes such folders",
}


def refuse_unknown(words: Sequence[str], commands: Mapping[str, Sequence[str]]) -> None:
    """Raise for a converter or a direction that doesn't exist, and name its replacement.

    Args:
        words: words of the command line.
        commands: command → its directions; () for one without.

    Raises:
        ConfigError: the first word isn't a command, or the second isn't one of its directions.
    """
    if not words or words[0].startswith("-"):
        return
    command = words[0]
    if command not in commands:
        if command in _CONVERTERS:
            raise ConfigError(f"'{command}' is not there yet: {_CONVERTERS[command]}")
        raise ConfigError(
            f"'{command}' is no command of mm-convert{did_you_mean(command, commands)}; expected one of "
            f"{', '.join(commands)}"
        )
    directions = commands[command]
    if not directions or len(words) < 2 or words[1].startswith("-") or words[1] in directions:
        return
    direction = words[1]
    instead = _DIRECTIONS.get(direction)
    raise ConfigError(
        f"{command} has no direction '{direction}'{did_you_mean(direction, directions) if instead is None else ''}; "
        + (instead or f"expected {' or '.join(directions)}")
    )
