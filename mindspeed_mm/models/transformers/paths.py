"""Module paths of fsdp2.yaml, as they are called today or as published files wrote them for older layouts.

transformers moved the parts of its multimodal models (`visual` became `model.visual`, `model.layers` of one with an
encoder `model.language_model.layers`), and published files name the parts of other implementations. A path that matches
nothing is read by the part that it begins with, and the blocks of a part by where these are in the model at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from mindspeed_mm.models.transformers.family import is_transformers_model, traits_of
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.patterns import expand_patterns
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

# what published files call a part; the first word that a path begins with and that leads to a module counts
_HEAD = ("lm_head", "thinker.lm_head", "language_model.lm_head", "llm.lm_head", "text_decoder.output_layer")
_DECODER = ("thinker.model", "thinker.language_model", "language_model.model", "model.language_model.model")
_DECODER += ("model.language_model", "language_model", "llm.model", "llm", "text_decoder.decoder", "text_decoder")
_DECODER += ("model",)
_VISION = ("thinker.visual", "model.visual", "visual", "model.vision_tower", "vision_tower", "model.vision_model")
_VISION += ("vision_model", "image_encoder.vision_encoder", "image_encoder.encoder", "image_encoder", "vision_encoder")
_AUDIO = ("thinker.audio_tower", "model.audio_tower", "audio_tower", "audio_encoder.audio_encoder", "audio_encoder")
_PROJECTOR = ("multi_modal_projector", "vision_projector", "image_encoder.projector", "mlp1")
_WORDS = {"embedding": "embed_tokens", "rotary_pos_emb": "rotary_emb", "final_layernorm": "norm"}


def find_modules(root: nn.Module, patterns: Iterable[str], *, where: str) -> dict[str, nn.Module]:
    """`expand_patterns`, also for paths of older layouts; each of those is said once, with the path of today.

    Args:
        root: a transformers model, or any other module (then paths are as written).
        patterns, where: as for `expand_patterns`.

    Raises:
        ConfigError: an entry matches nothing, neither as written nor by any part that it may mean.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        found |= _find(root, pattern, where)
    return found


def _find(root: nn.Module, pattern: str, where: str) -> dict[str, nn.Module]:
    try:
        return expand_patterns(root, [pattern], where=where)
    except ConfigError:
        if is_transformers_model(root) and isinstance(pattern, str):
            for candidate in _todays_paths(root, pattern.strip()):
                try:
                    modules = expand_patterns(root, [candidate], where=where)
                except ConfigError:
                    continue
                notice(f"{where}: '{pattern}' of an older layout is '{candidate}' in {_name(root)}; write that")
                return modules
        raise


def _todays_paths(model: Any, pattern: str) -> Iterator[str]:
    lists, parts = block_lists(model), list(_parts(model))
    if any(f"{pattern}.".startswith(f"{path}.") for _, path in parts):
        return  # written for today's layout, and misspelt
    for words, path in parts:
        for word in words:
            if pattern != word and not pattern.startswith(f"{word}."):
                continue
            rest = pattern[len(word) :]
            renamed = ".".join(_WORDS.get(segment, segment) for segment in rest.split("."))
            yield from dict.fromkeys((path + rest, path + renamed))
            blocks = [found for found in lists if found.startswith(f"{path}.")]
            if "{" in rest and len(blocks) == 1:
                yield f"{blocks[0]}.{rest[rest.index('{') :]}"


def _parts(model: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Published words for a part, and where it is in `model`."""
    traits, places = traits_of(model), {id(module): path for path, module in model.named_modules()}
    known = {part: paths[0] for part, paths in traits.parts.items() if paths}
    projector = known.get("vision_projector")
    for words, path in (
        (_HEAD, places.get(id(model.get_output_embeddings()))),
        (_PROJECTOR, projector),
        (_VISION, known.get("vision_encoder")),
        (_AUDIO, known.get("audio_encoder")),
        (_DECODER, traits.language_model or places.get(id(model.get_decoder()))),
    ):
        if path:
            yield words, path


def _name(model: nn.Module) -> str:
    return next(c.__name__ for c in type(model).__mro__ if not c.__name__.startswith("FSDP"))
