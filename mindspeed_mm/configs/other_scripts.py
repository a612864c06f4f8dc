"""Published model.json files and dataset types of other entry scripts: which script they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mindspeed_mm.configs.published import is_given
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.utils.log import notice

#: published dataset type → its entry script; None: of models that have none any more
DATASET_TYPES: Mapping[str, str | None] = {
    **dict.fromkeys(("t2v", "i2v", "t2i", "dt2v", "feature", "vace", "lumina", "wan2_2"), "pretrain_sora.py"),
    "bagel": "pretrain_omni.py",
    **dict.fromkeys(("qwen3_asr", "qwen3tts", "mosstts_delay", "cosyvoice", "funasr", "FunASR"), "train_fsdp2.py"),
    **dict.fromkeys(("ltx2_precomputed", "ltx2_3_precomputed"), "train_fsdp2.py"),
    **dict.fromkeys(("audio", "rewardvideo", "deepseekvl2"), None),
}


class _Owner(NamedTuple):
    """Who takes a model.json that gives all of `all_of` and any of `any_of` (dotted keys, or key=value)."""

    script: str
    what: str
    any_of: tuple[str, ...]
    all_of: tuple[str, ...] = ()
    can_train: bool = False  # what else the file holds describes a model of ours


# the first that fits
_OWNERS = (
    _Owner("evaluate_vlm.py", "a benchmark", ("evaluation_dataset", "evaluation_model"), can_train=True),
    _Owner("pretrain_omni.py", "a model that understands and makes images", ("mllm", "model_id=bagel")),
    _Owner("posttrain_sora_dpo.py", "preference training of a video model", ("dpo",), ("predictor",)),
    _Owner("inference_sora.py", "making videos or images", ("pipeline_config", "pipeline_class"), ("predictor",)),
    _Owner("pretrain_sora.py", "a model that makes videos or images", ("predictor", "diffusion", "ae")),
    _Owner("inference_vlm.py", "answering prompts", ("generation_config", "pipeline_class"), can_train=True),
)


def owner_problem(content: Mapping[str, Any], file: str) -> str | None:
    """Return a sentence about a model.json whose model another entry script trains; None for all others.

    A file of VLM inference or evaluation describes a model that can be trained: then it is only said whose file it is.
    """
    for owner in _OWNERS:
        marks = [key for key in owner.any_of if _has(content, key)]
        if not marks or not all(_has(content, key) for key in owner.all_of):
            continue
        keys = ", ".join(f"'{key.partition('=')[0]}'" for key in (*owner.all_of, *marks))
        start = f"{file}: {keys}: this file describes {owner.what} and belongs to {owner.script}"
        if owner.can_train:
            notice(f"{start}; its model is trained here, and what is for that script has no effect")
            return None
        return f"{start}, which is not there yet; this script trains language, vision-language and audio models"
    return None


def _has(content: Mapping[str, Any], key: str) -> bool:
    name, equals, value = key.partition("=")
    found = content.get(name)
    return found == value if equals else is_given(found)


def dataset_type_problem(dataset_type: str, file: str) -> str:
    """Return the sentence about a published dataset type that is not there yet."""
    script = DATASET_TYPES[dataset_type]
    belongs = f": it belongs to {script}" if script else ""
    return (
        f"{file}: 'dataset_param.dataset_type' is {show(dataset_type)}; this dataset type is not there yet{belongs}; "
        "expected huggingface or multimodal"
    )
