"""Published model.json files, dataset types and flags of other entry scripts: which script they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mindspeed_mm.configs.older_keys import FLAGS_OF_OTHERS, SCRIPTS_HERE
from mindspeed_mm.configs.published import is_given
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.utils.log import notice

#: what an entry script's model.json and data.json describe
FileKind = Literal["language", "generation"]

#: published dataset type → its entry script; None: of models that have none any more
DATASET_TYPES: Mapping[str, str | None] = {
    **dict.fromkeys(("t2v", "i2v", "t2i", "dt2v", "feature", "vace", "lumina", "wan2_2"), "pretrain_sora.py"),
    "bagel": "pretrain_omni.py",
    **dict.fromkeys(
        ("qwen3tts", "mosstts_delay", "cosyvoice", "funasr", "FunASR", "ltx2_precomputed", "ltx2_3_precomputed"),
        "mindspeed_mm/fsdp/train/trainer.py",
    ),
    **dict.fromkeys(("audio", "rewardvideo", "deepseekvl2"), None),
}


#: those that pretrain_sora.py reads
GENERATION_TYPES = ("t2v", "i2v", "t2i", "feature")
#: name of a dataset type in older releases → its name now
OLDER_TYPES = {"image": "multimodal"}
_OF_LANGUAGE_MODELS = ("huggingface", "multimodal", "corpus")


class _Owner(NamedTuple):
    """Who takes a model.json that gives all of `all_of` and any of `any_of` (dotted keys, or key=value)."""

    script: str
    what: str
    any_of: tuple[str, ...]
    all_of: tuple[str, ...] = ()
    trained_as: FileKind | None = None  # the rest of the file describes a model that scripts of this kind train


# the first that fits
_OWNERS = (
    _Owner("evaluate_vlm.py", "a benchmark", ("evaluation_dataset", "evaluation_model"), trained_as="language"),
    _Owner("pretrain_omni.py", "a model that understands and makes images", ("mllm", "model_id=bagel")),
    _Owner("posttrain_sora_dpo.py", "preference training of a video model", ("dpo",), ("predictor",)),
    _Owner(
        "inference_sora.py",
        "making videos or images",
        ("pipeline_config", "pipeline_class"),
        ("predictor",),
        trained_as="generation",
    ),
    _Owner(
        "pretrain_sora.py",
        "a model that makes videos or images",
        ("predictor", "diffusion", "ae", "init_from_diffusers"),
    ),
    _Owner("inference_vlm.py", "answering prompts", ("generation_config", "pipeline_class"), trained_as="language"),
    _Owner("pretrain_transformers.py", "a model of transformers", ("init_from_hf_path", "model_id")),
    _Owner("pretrain_vlm.py", "a vision-language model", ("text_decoder", "image_encoder", "audio_encoder")),
)
#: scripts that train what each kind of file describes
_TRAINERS: Mapping[FileKind, tuple[str, ...]] = {
    "language": ("pretrain_vlm.py", "pretrain_transformers.py"),
    "generation": ("pretrain_sora.py",),
}
_THERE = (*_TRAINERS["language"], *_TRAINERS["generation"], "inference_sora.py", "inference_vlm.py", "evaluate_vlm.py")
_TRAINED_HERE: Mapping[FileKind, str] = {
    "language": "this script trains language, vision-language and audio models",
    "generation": "this script trains models that make videos or images",
}


def owner_problem(content: Mapping[str, Any], file: str, kind: FileKind = "language") -> str | None:
    """Return a sentence about a model.json whose model another entry script trains; None for all others.

    A file of inference or evaluation describes a model that can be trained: a notice names its script then.

    Args:
        content: of the file.
        file: its name, for messages.
        kind: what the entry script trains.
    """
    for owner in _OWNERS:
        marks = [key for key in owner.any_of if _has(content, key)]
        if not marks or not all(_has(content, key) for key in owner.all_of):
            continue
        if owner.script in _TRAINERS[kind]:
            return None
        keys = ", ".join(f"'{key.partition('=')[0]}'" for key in (*owner.all_of, *marks))
        start = f"{file}: {keys}: this file describes {owner.what} and belongs to {owner.script}"
        if owner.trained_as == kind:
            notice(f"{start}; its model is trained here, and what is for that script has no effect")
            return None
        not_there = "" if owner.script in _THERE else ", which is not there yet"
        return f"{start}{not_there}; {_TRAINED_HERE[kind]}"
    return None


def describes_generation(content: Mapping[str, Any]) -> bool:
    """Whether a model.json describes a model that makes images or videos."""
    for owner in _OWNERS:
        if any(_has(content, key) for key in owner.any_of) and all(_has(content, key) for key in owner.all_of):
            return owner.script in _TRAINERS["generation"] or owner.trained_as == "generation"
    return False


def _has(content: Mapping[str, Any], key: str) -> bool:
    name, equals, value = key.partition("=")
    found = content.get(name)
    return found == value if equals else is_given(found)


def dataset_type_problem(dataset_type: str, file: str, here: tuple[str, ...] = _OF_LANGUAGE_MODELS) -> str | None:
    """Return the sentence about a published dataset type that isn't one of those `here`; None for all others."""
    if dataset_type in OLDER_TYPES and dataset_type not in here:
        key = f"{file}: 'dataset_param.dataset_type' is {show(dataset_type)}; this name is of an older release"
        return f"{key}: write {OLDER_TYPES[dataset_type]}"
    if dataset_type in here or dataset_type not in (*DATASET_TYPES, *_OF_LANGUAGE_MODELS):
        return None
    script = DATASET_TYPES.get(dataset_type, "pretrain_vlm.py or pretrain_transformers.py")
    there = dataset_type in (*GENERATION_TYPES, *_OF_LANGUAGE_MODELS)
    belongs = (
        f" belongs to {script}" if there else " is not there yet" + (f": it belongs to {script}" if script else "")
    )
    return (
        f"{file}: 'dataset_param.dataset_type' is {show(dataset_type)}; this dataset type{belongs}; "
        f"expected {', '.join(here[:-1])} or {here[-1]}"
    )


def script_of_flag(name: str) -> str | None:
    """Return a clause that names which script or command a flag belongs to; None: to none that is known.

    Args:
        name: without dashes in front, underscores inside; a flag of mm-convert may begin with `cfg.`.
    """
    script = "mm-convert" if name.startswith("cfg.") else None
    script = script or next((other for other, names in FLAGS_OF_OTHERS.items() if name in names.split()), None)
    if script is None:
        return None
    there = "" if script in SCRIPTS_HERE or not script.endswith(".py") else ", which is not there yet"
    return f"belongs to {script}{there}"
