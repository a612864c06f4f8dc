"""Module paths of published files, for today's layouts and for older ones, on models without storage."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.paths import OLDER_PATHS, find_modules
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.models.transformers.meta_model import build_meta_model, config_for
from mindspeed_mm.utils import log
from mindspeed_mm.utils.errors import ConfigError
from tests.support.families import families
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir

FAMILIES = families()
WHERE = "fsdp2.yaml: sub_modules_to_wrap"
VISUAL, DECODER = "model.visual.blocks.0", "model.language_model.layers.0"
AUDIO = "model.audio_tower.layers.0"
THINKER = {"thinker.model.layers.{*}": DECODER, "thinker.lm_head": "lm_head", "thinker.audio_tower.layers.{*}": AUDIO}

#: family → entry of a published file → the first module that it names today
OLD = {
    "qwen2_5_vl": {
        "visual": "model.visual",
        "visual.blocks.{*}": VISUAL,
        "visual.merger": "model.visual.merger",
        "model.layers.{*}": DECODER,
        "model.layers.{0-1}.mlp": f"{DECODER}.mlp",
        "model.embed_tokens": "model.language_model.embed_tokens",
        "text_decoder.decoder.layers.{*}": DECODER,
        "text_decoder.output_layer": "lm_head",
        "text_decoder.embedding": "model.language_model.embed_tokens",
        "text_decoder.rotary_pos_emb": "model.language_model.rotary_emb",
        "image_encoder": "model.visual",
    },
    "qwen3_vl": {"visual.blocks.{*}": VISUAL, "language_model.layers.{*}": DECODER},
    "qwen3_vl_moe": {"model.layers.{*}.mlp.experts": f"{DECODER}.mlp.experts"},
    "qwen2_5_omni": {**THINKER, "thinker.visual.blocks.{*}": VISUAL},
    "qwen3_omni_moe": {**THINKER, "thinker.visual.blocks.{*}": VISUAL, "audio_tower": "model.audio_tower"},
    "qwen3_asr": {**THINKER, "thinker.audio_tower.positional_embedding": "model.audio_tower.positional_embedding"},
    "internvl": {
        "vision_model.embeddings": "model.vision_tower.embeddings",
        "vision_model.encoder.layers.{*}": "model.vision_tower.encoder.layer.0",
        "language_model.model.layers.{*}": DECODER,
        "language_model.lm_head": "lm_head",
    },
    "mistral3": {
        "vision_tower.transformer.layers.{*}": "model.vision_tower.transformer.layers.0",
        "language_model.embed_tokens": "model.language_model.embed_tokens",
        "language_model.layers.{*}": DECODER,
        "multi_modal_projector.linear_1": "model.multi_modal_projector.linear_1",
    },
    "glm4v_moe": {"visual.blocks.{*}": VISUAL, "visual.merger": "model.visual.merger"},
    "kimi_k25": {
        "vision_tower": "model.vision_tower",
        "vision_tower.encoder.blocks.{*}": "model.vision_tower.layers.0",
        "mm_projector": "model.mm_projector",
        "language_model.model.layers.{*}.mlp.experts": "model.language_model.layers.1.mlp.experts",
    },
}

#: family → entry that no published file has → the nearest path
WRONG = {
    "qwen2_5_vl": {
        "model.vision.blocks.{*}": "model.visual.blocks.{*}",
        "model.visual.block.{0-1}": "model.visual.blocks.{0-1}",
        "visual.blokcs.{*}": "model.visual.blocks.{*}",
        "visuals.blocks.{*}": "model.visual.blocks.{*}",
        "model.layer.{*}": "model.language_model.layers.{*}",
        "model.language_model.layers.{*}.mpl": "model.language_model.layers.{*}.mlp",
        "model.language.layers.{*}": "model.language_model.layers.{*}",
        "text_decoder.layers.{*}": None,
        "image_encoder.encoder.blocks.layers.{*}": None,
    },
    "qwen3": {"language_model.model.layers.{*}": "model.layers.{*}", "model.decoder.layers.{0}": "model.layers.{0}"},
    "internvl": {"model.vision_tower.encoder.layers.{*}": "model.vision_tower.encoder.layer.{*}", "mlp1": None},
}


@functools.cache
def model_of(name: str) -> Any:
    make = {"qwen2_5_vl": tiny_qwen2_5_vl_dir, "qwen3": tiny_qwen3_dir}.get(name)
    with tempfile.TemporaryDirectory() as folder:
        path = make(folder) if make is not None else FAMILIES[name].make(Path(folder))
        config = AutoConfig.from_pretrained(path)
    model_class = ModelHub.get(FAMILIES[name].model.get("model_id") if make is None else None, config)
    return build_meta_model(model_class, config_for(model_class, config))


@pytest.mark.parametrize("name", FAMILIES)
def test_todays_wrap_list_is_taken_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's list names modules without a notice, and each list of blocks that it names is found by itself."""
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    wrap = FAMILIES[name].wrap
    assert find_modules(model_of(name), wrap, where=WHERE) and not said
    assert {p.removesuffix(".{*}") for p in wrap if p.endswith(".layers.{*}")} <= set(block_lists(model_of(name)))


@pytest.mark.parametrize(("name", "entry"), [(name, entry) for name, entries in OLD.items() for entry in entries])
def test_entry_of_an_older_layout(name: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    assert next(iter(find_modules(model_of(name), [entry], where=WHERE))) == OLD[name][entry]
    (text,) = said
    assert text.startswith(f"{WHERE}: '{entry}' of an older layout is '") and text.endswith("; write that")


@pytest.mark.parametrize(("name", "entry"), [(name, entry) for name, entries in WRONG.items() for entry in entries])
def test_what_matches_nothing_is_refused_with_the_nearest_path(name: str, entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_modules(model_of(name), [entry], where=WHERE)
    message, nearest = str(caught.value), WRONG[name][entry]
    assert message.startswith(f"{WHERE}: entry '{entry}' matches nothing: ")
    assert nearest is None or message.endswith(f"; did you mean '{nearest}'?")


def test_the_published_paths_are_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/models.md").read_text()
    assert all(f"| `{older}` | `{today}` |" in text for older, today in OLDER_PATHS.items())


def test_modules_of_ones_own_are_named_as_they_are() -> None:
    own = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])})})
    assert list(find_modules(own, ["model.layers.{*}"], where=WHERE)) == ["model.layers.0"]
    for entry in ("layers.{*}", "language_model.layers.{*}"):
        with pytest.raises(ConfigError, match=r"matches nothing.*; did you mean 'model\.layers\.\{\*\}'\?"):
            find_modules(own, [entry], where=WHERE)
