"""Families that have no class here that trains: which one is missing, or what a family would have to do."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_mm.configs.scalars import show

_OWN_CODE = "transformers has no {name}, which is its authors' own code"

#: model_id → why it isn't trained
_FAMILIES: Mapping[str, str] = {
    "kimi_k3": _OWN_CODE.format(name="class of Kimi-K3 (KimiK3ForConditionalGeneration)"),
    "mimo_v25": "transformers has MiMo-V2-Flash, a text model, but no class of MiMo-V2.5 with its encoders "
    "(MiMoV2OmniForCausalLM)",
    "step3_vl": _OWN_CODE.format(name="class of Step3-VL-10B (StepVLForConditionalGeneration)"),
    "qwen3_tts": _OWN_CODE.format(name="class of Qwen3-TTS (Qwen3TTSForConditionalGeneration)"),
    "moss_tts_delay": _OWN_CODE.format(name="class of MOSS-TTS (MossTTSDelayModel)"),
    "cosyvoice3_lm": _OWN_CODE.format(name="class of CosyVoice3 (CosyVoice3LM)"),
    "funasr": "this file builds the FunASRNano of its authors' own code, with a CTC decoder that transformers' "
    "FunAsrNanoForConditionalGeneration doesn't have",
    **dict.fromkeys(
        ("ltx2", "ltx2_3"),
        "LTX-2 makes videos: it waits for training of its diffusers class (LTX2VideoTransformer3DModel) in "
        "pretrain_sora.py",
    ),
}
#: `model_type` in config.json → published model_id, where they differ
_MODEL_TYPES: Mapping[str, str] = {"step_robotics": "step3_vl", "mimo_v2": "mimo_v25", "mimo_v2_omni": "mimo_v25"}


def missing_class(model_id: object, file: str, key: str = "model_id") -> str | None:
    """Return the sentence about a family that can't be trained; None for all others.

    Args:
        model_id: as a file gives it, or the model_type of config.json.
        file, key: where, for the message.
    """
    why = _FAMILIES.get(_MODEL_TYPES.get(model_id, model_id)) if isinstance(model_id, str) else None
    return None if why is None else f"{file}: '{key}' is {show(model_id)}; {why}"
