"""Loading of text encoders: the class of transformers of a directory, and a check for missing weights."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.configs.sora_config import TextEncoderConfig
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import CheckpointError, ConfigError, did_you_mean

#: published model_id → the classes of transformers that it may be; none: whatever the directory holds
PUBLISHED_TEXT_ENCODERS: dict[str, tuple[str, ...]] = {
    "UMT5": ("UMT5EncoderModel",),
    "T5": ("T5EncoderModel",),
    "MT5": ("MT5EncoderModel",),
    "CLIP": ("CLIPTextModel",),
    "CLIPWithProjection": ("CLIPTextModelWithProjection",),
    "Auto": (),
    "HunyuanMLLmModel": ("LlamaModel", "LlavaForConditionalGeneration"),
    "Hunyuan15MLLmModel": ("Qwen2_5_VLTextModel", "Qwen2_5_VLForConditionalGeneration"),
    "Hunyuan15GlyphModel": ("T5EncoderModel",),
}
#: encoder-decoder models, of which only the encoder is loaded
_ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


def load_encoder(
    directory: Path, described: TextEncoderConfig, expected: Any, where: str, trust_remote_code: bool = False
) -> Any:
    """Load a text encoder, frozen and in evaluation mode.

    Args:
        directory: directory with config.json.
        described: entry of model.json's text_encoder.
        expected: class that the pipeline is written for; None: any.
        where: file and key, for messages.
        trust_remote_code: whether code in the directory may run.

    Raises:
        ConfigError: an unknown model_id, or one of another model than the directory's.
        CheckpointError: the directory can't be loaded, or lacks weights.
    """
    found = _find_class(directory, described.model_id, expected, where)
    model = _load(found, directory, described, trust_remote_code)
    if expected is not None and not isinstance(model, expected) and hasattr(model, "get_decoder"):
        # the language model of a multimodal model
        inner = model.get_decoder()
        model = inner if isinstance(inner, expected) else model
    if described.byT5_ckpt_path is not None:
        load_glyph_weights(model, Path(described.byT5_ckpt_path), where)
    model.requires_grad_(False)
    return model.eval()


def load_glyph_weights(model: Any, file: Path, where: str) -> None:
    """Load the `encoder` of a glyph checkpoint, under any prefix, into a T5 encoder.

    Such a checkpoint has rows for marks of colours and fonts behind the bytes; captions contain none of them, and the
    rows are loaded too.

    Args:
        model: model with `encoder`, a stack of blocks over embedded tokens.
        file: a torch checkpoint: tensors by name, or under `state_dict`.
        where: file and key, for messages.

    Raises:
        ConfigError: the model is no encoder of T5's kind.
        CheckpointError: the file can't be read as tensors, or lacks weights of the encoder, or has others.
    """
    if not hasattr(model, "encoder") or not hasattr(model, "resize_token_embeddings"):
        raise ConfigError(f"{where}: 'byT5_ckpt_path' is for an encoder of T5's kind, not for {type(model).__name__}")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{where}: byT5_ckpt_path '{file}' can't be read as a file of tensors: {reason}"
        ) from error
    tensors = content.get("state_dict", content) if isinstance(content, dict) else {}
    last = "embed_tokens.weight"
    starts = [name.removesuffix(last) for name in tensors if str(name).endswith(last) and "decoder" not in name]
    if not starts:
        raise CheckpointError(f"{where}: byT5_ckpt_path '{file}' holds no {last} of an encoder")
    start = min(starts, key=len)
    found = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    model.resize_token_embeddings(found[last].shape[0])
    problems = model.encoder.load_state_dict(found, strict=False)
    wrong = [*problems.missing_keys, *problems.unexpected_keys]
    if wrong:
        raise CheckpointError(
            f"{where}: byT5_ckpt_path '{file}' is not of this encoder: {len(problems.missing_keys)} of its weights are "
            f"missing, {len(problems.unexpected_keys)} are unknown, e.g. {wrong[0]}"
        )


def _find_class(directory: Path, model_id: str | None, expected: Any, where: str) -> Any:
    import transformers

    stated = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = str(stated.get("model_type", ""))
    names = [str(name) for name in stated.get("architectures") or [] if hasattr(transformers, name)]
    if model_id is not None and model_id not in PUBLISHED_TEXT_ENCODERS:
        return _named(model_id, kind, directory, where)
    indexed = _indexed(directory)
    if indexed is not None and hasattr(transformers, indexed):
        found = getattr(transformers, indexed)
    elif expected is not None and _fits(expected, kind, names):
        found = expected
    else:
        found = getattr(transformers, _ENCODERS.get(kind) or next(iter(names), "AutoModel"))
    wanted = PUBLISHED_TEXT_ENCODERS.get(model_id or "", ())
    if wanted and found.__name__ not in wanted:
        raise ConfigError(
            f"{where}: 'model_id' is '{model_id}' ({' or '.join(wanted)}), but '{directory}' holds a {found.__name__} "
            f"(model_type {kind!r}); write what it holds, or leave model_id out"
        )
    return found


def _named(model_id: str, kind: str, directory: Path, where: str) -> Any:
    """Return a class of transformers by its name."""
    import transformers

    found: Any = getattr(transformers, model_id, None)
    if not hasattr(found, "config_class"):
        known = (*PUBLISHED_TEXT_ENCODERS, *_ENCODERS.values(), "CLIPTextModel", "CLIPTextModelWithProjection")
        raise ConfigError(
            f"{where}: 'model_id' is '{model_id}'; expected one of {', '.join(PUBLISHED_TEXT_ENCODERS)}, or a "
            f"class of transformers{did_you_mean(model_id, known)}"
        )
    own = getattr(found.config_class, "model_type", kind)
    if _root(own) != _root(kind):
        raise ConfigError(
            f"{where}: 'model_id' is '{model_id}' (model_type {own!r}), but '{directory}' holds model_type {kind!r}; "
            "write what it holds, or leave model_id out"
        )
    return found


def _indexed(directory: Path) -> str | None:
    """Return the class that the pipeline around a directory states for it; None: none is stated."""
    index = directory.absolute().parent / "model_index.json"
    if not index.is_file():
        return None
    stated = json.loads(index.read_text(encoding="utf-8")).get(directory.name)
    return str(stated[1]) if isinstance(stated, list) and stated[0] == "transformers" else None


def _fits(expected: Any, kind: str, names: list[str]) -> bool:
    own = str(expected.config_class.model_type)
    if own == kind:
        return True
    # a part of a larger model that is stored whole: CLIP's text model is found in it, those of others are not
    return _root(own) == _root(kind) and (_root(kind) == "clip" or expected.__name__ in names)


def _root(kind: str) -> str:
    return kind.removesuffix("_model").removesuffix("_text")


def _load(found: Any, directory: Path, described: TextEncoderConfig, trust_remote_code: bool) -> Any:
    try:
        model, info = found.from_pretrained(
            str(directory),
            dtype=to_torch_dtype(described.dtype),
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"text encoder '{directory}' can't be loaded as {found.__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(f"text encoder '{directory}' has no weights for {shown} of {found.__name__}")
    return model
