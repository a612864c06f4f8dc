"""Converters, directions and arguments of published `mm-convert` commands that can't be run here, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.utils.errors import ConfigError, did_you_mean

_LORA = (
    "adapters are PEFT's here, for every model: GenericDCPConverter merge_lora adds them to their base, lora_dcp_to_hf "
    "writes those of a checkpoint as a PEFT directory, and a run reads one as it is, with --lora-load"
)

_NO_CLASS = "{0} can't be trained here: neither transformers nor diffusers has a class for it"
_NO_PREDICTOR = "{0} can't be trained here: pretrain_sora.py has no predictor for it"

#: published converter → why it isn't there
_CONVERTERS: Mapping[str, str] = {
    "BagelConverter": _NO_CLASS.format("BAGEL"),
    "DeepSeekVLConverter": _NO_CLASS.format("DeepSeek-VL2"),
    "LuminaConverter": _NO_CLASS.format("Lumina-mGPT 2"),
    "MOSSTTSConverter": _NO_CLASS.format("MOSS-TTS (moss_tts)"),
    "MagiHumanConverter": _NO_CLASS.format("MagiHuman"),
    "OpenSoraConverter": _NO_PREDICTOR.format("OpenSora"),
    "OpenSoraPlanConverter": _NO_PREDICTOR.format("OpenSoraPlan"),
    "Qwen3TTSConverter": _NO_CLASS.format("Qwen3-TTS (qwen3_tts)"),
    "StepVideoConverter": _NO_PREDICTOR.format("StepVideo"),
    "VACEConverter": _NO_PREDICTOR.format("Wan's VACE (WanVACETransformer3DModel)"),
    "VideoAlignConverter": "VideoAlign can't be trained here: training reward models is not there yet",
}

#: published direction → why it isn't there
_DIRECTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "lora_dcp_to_hf",
            "lora_hf_to_dcp",
            "lora_hf_to_mm",
            "lora_mm_to_hf",
            "merge_lora",
            "merge_lora_to_base",
            "merge_mm_lora_dcp_weight_to_base_hf",
        ),
        _LORA,
    ),
    "layerzero_to_mm": (
        "no run here writes such folders; convert them to a diffusers directory where they were written, and pass that "
        "to --load"
    ),
    "source_to_mm": (
        "weights in their authors' own layout can't be read; take the checkpoint in diffusers' layout, and pass that "
        "to --load"
    ),
    "resplit": "a checkpoint fits every layout; pass the folder as it is to --load",
    **dict.fromkeys(("hf_to_mm", "mm_to_hf"), "this converter writes torch_dcp, which every backend starts from"),
}


def refuse_unknown(words: Sequence[str], commands: Mapping[str, Mapping[str, frozenset[str]]]) -> None:
    """Raise for a converter, a direction or an argument that doesn't exist, and name its replacement.

    Args:
        words: words of the command line.
        commands: command → direction → its arguments; {} for a command without directions.

    Raises:
        ConfigError: the first word isn't a command, the second isn't one of its directions, or an argument isn't one of
            that direction.
    """
    if not words or words[0].startswith("-"):
        return
    command = words[0]
    if command not in commands:
        if command in _CONVERTERS:
            raise ConfigError(f"{command}: {_CONVERTERS[command]}")
        raise ConfigError(
            f"'{command}' is no command of mm-convert{did_you_mean(command, [*commands, *_CONVERTERS])}; expected one "
            f"of {', '.join(commands)}"
        )
    directions = commands[command]
    if not directions or len(words) < 2 or words[1].startswith("-"):
        return
    direction = words[1]
    if direction in directions:
        _refuse_unknown_arguments(f"{command} {direction}", words[2:], directions[direction])
        return
    if direction in _DIRECTIONS:
        raise ConfigError(f"{command} {direction}: {_DIRECTIONS[direction]}")
    raise ConfigError(
        f"{command} has no direction '{direction}'{did_you_mean(direction, [*directions, *_DIRECTIONS])}; expected "
        f"{' or '.join(directions)}"
    )


def _refuse_unknown_arguments(place: str, words: Sequence[str], known: frozenset[str]) -> None:
    for word in words:
        name = word.partition("=")[0].removesuffix("+")
        if name.startswith("--") and name != "--" and name not in known:
            raise ConfigError(
                f"{place} has no argument '{name}'{did_you_mean(name, known)}; `mm-convert {place} --help` lists them"
            )
