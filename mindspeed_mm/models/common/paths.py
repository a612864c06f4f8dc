"""Module paths in fsdp2.yaml and model.json: current ones, and those of older layouts that published files use.

transformers has moved the parts of its multimodal models, and published files use the paths of their time. Each older
path is listed here with its replacement: a path that is neither in the model nor in this list is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.parallel.patterns import expand_parameters, expand_patterns
from mindspeed_mm.utils.errors import ConfigError

#: published path → current path in the transformers model. The rest of an entry is kept, and must exist.
OLDER_PATHS: Mapping[str, str] = {
    # the documentation page of fsdp2.yaml; examples/qwen2.5vl/fsdp2_config.yaml
    "text_decoder.decoder.layers": "model.language_model.layers",
    "text_decoder.embedding": "model.language_model.embed_tokens",
    "text_decoder.rotary_pos_emb": "model.language_model.rotary_emb",
    "text_decoder.output_layer": "lm_head",
    "image_encoder": "model.visual",
    # the documentation page of fsdp2.yaml; examples/qwen3omni/qwen3omni_config_v1.yaml; transformers 4 (Qwen2.5-VL)
    "model.layers": "model.language_model.layers",
    "model.embed_tokens": "model.language_model.embed_tokens",
    "visual": "model.visual",
    "audio_tower": "model.audio_tower",
    # examples/qwen3_asr/qwen3_asr_1.7B_config.yaml; `thinker.visual`: transformers 4 (Qwen2.5-Omni, Qwen3-Omni)
    "thinker.model": "model.language_model",
    "thinker.audio_tower": "model.audio_tower",
    "thinker.visual": "model.visual",
    "thinker.lm_head": "lm_head",
    # examples/internvl3.5/fsdp2_config.yaml; `language_model.lm_head`: examples/kimik2_5/kimik2_5_config.yaml
    "vision_model.embeddings": "model.vision_tower.embeddings",
    "vision_model.encoder.layers": "model.vision_tower.encoder.layer",
    "language_model.model": "model.language_model",
    "language_model.lm_head": "lm_head",
    # examples/magistral-2509/fsdp2_config.yaml and fsdp2_lora_config.yaml
    "language_model.layers": "model.language_model.layers",
    "language_model.embed_tokens": "model.language_model.embed_tokens",
    "vision_tower.transformer.layers": "model.vision_tower.transformer.layers",
    "multi_modal_projector": "model.multi_modal_projector",
    # examples/kimik2_5/kimik2_5_config.yaml
    "vision_tower": "model.vision_tower",
    "vision_tower.encoder.blocks": "model.vision_tower.layers",
    "mm_projector": "model.mm_projector",
}


#: lists whose entries only save memory: they may match nothing where fsdp2.yaml's ignore_missing_modules says so
_MAY_BE_MISSING = (
    *("sub_modules_to_wrap", "recompute_modules"),
    *("activation_offload_modules", "chunk_mbs_modules", "chunk_mlp_modules"),
)


def find_modules(
    root: nn.Module, patterns: Iterable[str], *, where: str, ignore_missing: bool = False
) -> dict[str, nn.Module]:
    """Call `expand_patterns`; for a transformers model, paths of `OLDER_PATHS` are replaced, each with one notice."""
    older = OLDER_PATHS if as_trainable(root).is_transformers else {}
    return expand_patterns(root, patterns, where=where, older=older, ignore_missing=ignore_missing)


def listed_modules(
    root: nn.Module, config: Fsdp2Config, key: str, patterns: Iterable[str] | None = None
) -> dict[str, nn.Module]:
    """Return the modules that a list of fsdp2.yaml names.

    Args:
        root: the model that paths are relative to.
        config: the file.
        key: of the list.
        patterns: in place of the file's list; None: the file's, if it has one.
    """
    written: Iterable[str] | None = getattr(config, key) if patterns is None else patterns
    may_be_missing = config.ignore_missing_modules and key in _MAY_BE_MISSING
    return find_modules(root, written or (), where=f"{config.file}: {key}", ignore_missing=may_be_missing)


def freeze_paths(root: nn.Module, patterns: Iterable[str], *, where: str) -> list[str]:
    """Set requires_grad of the parameters that `patterns` name to False; return their names.

    Args:
        root: the transformers model that paths are relative to; older paths are replaced, as `find_modules` does.
        patterns: paths of modules or of parameters.
        where: file and key of the list, for messages.

    Raises:
        ConfigError: entries name no parameter.
    """
    older = OLDER_PATHS if as_trainable(root).is_transformers else {}
    named = expand_parameters(root, patterns, where=where, older=older)
    for parameter in named.values():
        parameter.requires_grad_(False)
    return list(named)


def check_paths(root: nn.Module, config: Fsdp2Config, keys: Iterable[str]) -> None:
    """Check that the entries of fsdp2.yaml's path lists `keys` match modules.

    Raises:
        ConfigError: entries match nothing; one message lists all of them, for all keys.
    """
    problems: list[str] = []
    for key in keys:
        try:
            listed_modules(root, config, key)
        except ConfigError as error:
            problems.append(str(error))
    raise_all(problems)
