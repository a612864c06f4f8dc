"""What a model may state is asked for in one place, and what is missing is a sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.models.common.family import TEXT_TRAITS
from mindspeed_mm.models.common.megatron_names import same
from mindspeed_mm.models.contract import as_shardable, as_staged, as_trainable
from mindspeed_mm.utils.errors import ConfigError


class Bare(nn.Linear):
    """A model that states nothing."""

    def __init__(self) -> None:
        super().__init__(2, 2)


class Inner(Bare):
    """A part that waits for weights of its own."""

    pending_weights = "inner/hf"


class Stating(Bare):
    """A model that delegates its sharding, and states all that a run on FSDP2 asks for."""

    traits, source, source_dtype, pending_weights, ema_decay = TEXT_TRAITS, "some/hf", torch.bfloat16, "some/hf", 0.9
    weights_come_later, expected_factor, config = False, None, {"a": 1}
    _no_split_modules, _repeated_blocks = ["Block"], None
    _keys_to_ignore_on_load_unexpected = ("talker",)

    def __init__(self) -> None:
        super().__init__()
        self.sharded_module, self.part = Bare(), Inner()
        self.said: list[Any] = []

    def fully_shard(self, process_group: Any, fsdp2_config_path: str | None) -> None:
        self.said.append((process_group, fsdp2_config_path))

    def freeze(self, config: Any) -> None:
        self.said.append(config)

    def check_packing(self) -> None:
        raise ConfigError("no packs")

    def export_layout(self) -> str:
        return "a pipeline"


def test_a_model_that_states_nothing() -> None:
    model = as_trainable(Bare())
    assert (model.name, model.config, model.traits, model.ema_decay) == ("Bare", None, None, None)
    assert model.weights == (None, None, None) and model.weights.absolute_source is None
    assert (model.is_transformers, model.block_classes, model.left_out) == (False, set(), ())
    assert model.final_export_layout() is None
    model.check_packing()
    model.freeze(None)
    with pytest.raises(
        ConfigError, match=r"--use-torch-fsdp2: Bare, .* has no fully_shard; derive its class from FSDP2"
    ):
        as_shardable(Bare())
    with pytest.raises(ConfigError, match=r"Bare, .* has no set_input_tensor or no config .* or add --use-torch-fsdp2"):
        as_staged(Bare())


def test_what_a_model_states() -> None:
    stating = Stating()
    model = as_shardable(stating)
    assert model.traits is TEXT_TRAITS and model.config == {"a": 1} and model.ema_decay == 0.9
    assert model.weights == ("some/hf", torch.bfloat16, Path("some/hf"))
    assert model.weights.absolute_source == str(Path("some/hf").absolute())
    assert (model.block_classes, model.left_out) == ({"Block"}, ("talker",))
    assert model.final_export_layout() == "a pipeline"  # type: ignore[comparison-overlap]
    assert list(model.waiting()) == [(stating.sharded_module, Path("some/hf")), (stating.part, Path("inner/hf"))]
    model.freeze("model.json")
    model.fully_shard(None, "fsdp2.yaml")
    assert stating.said == ["model.json", (None, "fsdp2.yaml")]
    model.set_weights_come_later(True)
    model.set_expected_factor(float)
    assert stating.weights_come_later and stating.expected_factor is float
    with pytest.raises(ConfigError, match="no packs"):
        model.check_packing()


def test_a_chunk_states_the_sources_of_its_parameters() -> None:
    """And one of plain Megatron-core modules keeps its own names, and the type that it has."""
    weight = nn.Parameter(torch.ones(1))
    chunk: Any = SimpleNamespace(set_input_tensor=print, config=None, model_type=1)
    staged = as_staged(chunk)
    assert (staged.meta_model, staged.param_mapping, staged.names_of("a"), staged.modalities_of("a")) == (
        None,
        None,
        ("a",),
        (),
    )
    assert staged.tied_copy() is None
    staged.set_model_type(2)
    assert chunk.model_type == 1
    chunk.param_mapping, chunk.modalities_of, chunk.meta_model = same, lambda name: ["image"], lambda: "meta model"
    chunk.share_embeddings_and_output_weights, chunk.pre_process, chunk.post_process = True, True, False
    chunk.shared_embedding_or_output_weight = lambda: weight
    del chunk.model_type
    staged.set_model_type(2)
    assert (staged.meta_model, staged.names_of("a"), staged.modalities_of("a")) == ("meta model", ("a",), ("image",))
    assert staged.tied_copy() is weight and chunk.model_type == 2
    chunk.post_process = True
    assert staged.has_tied_head and staged.tied_copy() is None
