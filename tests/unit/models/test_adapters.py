"""Which layers get adapters, what is trained whole, and the sentences of targets that match nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.adapters import (
    AdapterPlan,
    draw_adapters,
    inject_adapters,
    plan_adapters,
    prepare_adapters,
)
from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.megatron_names import MEGATRON_LAYERS
from mindspeed_mm.models.contract import as_shardable
from mindspeed_mm.models.megatron.text_decoder.names import DecoderShape, decoder_tensor
from mindspeed_mm.models.megatron.vision.names import tower_tensor
from mindspeed_mm.optimizer.muon import matrix_names
from mindspeed_mm.utils.errors import ConfigError
from tests.support.tiny_diffusers import diffusers_class, diffusers_config


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(3, 8, 4))
        self.down_bias = nn.Parameter(torch.zeros(4))


class Model(nn.Module):
    """A tower, blocks with experts, and an output layer that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.experts = Experts()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


PARTS = {"vision_encoder": ["tower"], "text_decoder": ["layers", "experts"], "head": ["head"]}


def model(frozen: str | None = None) -> Model:
    with torch.device("meta"):
        made = Model()
    if frozen is not None:
        made.get_submodule(frozen).requires_grad_(False)
    return made


def plan(made: nn.Module, *targets: str, **options: Any) -> AdapterPlan:
    return plan_adapters(made, LoraOptions(target_modules=targets, **options), PARTS, {"proj_q": "q_proj"})


def test_names_ends_of_paths_and_patterns() -> None:
    blocks = ["tower.0", "tower.1", "layers.0", "layers.1"]
    assert plan(model(), "q_proj").modules == tuple(f"{block}.q_proj" for block in blocks)
    assert plan(model(), "proj_q").modules == plan(model(), "q_proj").modules  # the name in published scripts
    assert plan(model(), "layers.{1}.q_proj", "0.v_proj").modules == (
        "tower.0.v_proj",
        "layers.0.v_proj",
        "layers.1.q_proj",
    )
    assert plan(model("tower"), "q_proj").modules == ("layers.0.q_proj", "layers.1.q_proj")
    # a frozen part gets adapters if a path names it
    assert plan(model("tower"), "tower.{0}.q_proj").modules == ("tower.0.q_proj",)


def test_all_linear_leaves_out_the_output_layer_and_frozen_parts() -> None:
    found = plan(model("tower"), "all-linear").modules
    assert found == tuple(f"layers.{i}.{name}" for i in range(2) for name in ("q_proj", "v_proj"))
    assert "head" in plan(model(), "all-linear", "head").modules


def test_parts_that_get_adapters_and_parts_that_are_trained_whole() -> None:
    only = plan(model(), "q_proj", apply_to=("text_decoder",))
    assert only.modules == ("layers.0.q_proj", "layers.1.q_proj") and not only.whole
    mixed = plan(model("tower.0"), "q_proj", apply_to=("text_decoder",), mixed_training=True)
    assert mixed.modules == only.modules
    rest = {f"tower.1.{name}.{kind}" for name in ("q_proj", "v_proj", "norm") for kind in ("weight", "bias")}
    assert mixed.whole == {*rest, "embed.weight"}  # frozen parts stay frozen
    by_path = plan(model(), "q_proj", "tower.0.q_proj", apply_to=("text_decoder",), mixed_training=True)
    assert "tower.0.v_proj.weight" in by_path.whole and "tower.0.q_proj.weight" not in by_path.whole
    assert plan(model(), "q_proj", apply_to=("image_encoder",)).modules == ("tower.0.q_proj", "tower.1.q_proj")


@pytest.mark.parametrize("named", ["embed", "head"])
def test_a_tied_weight_is_trained_whole_by_either_name(named: str) -> None:
    found = plan(model(), "q_proj", modules_to_save=(named,))
    assert found.whole == {"embed.weight"} and set(found.saved_modules) == {"embed", "head"}


def test_what_is_trained_after_the_insertion() -> None:
    made = model()
    options = LoraOptions(("q_proj",), ("experts.gate_up_proj",), r=2, modules_to_save=("layers.0.norm",))
    inject_adapters(made, options, PARTS)
    trained = {name: tuple(p.shape) for name, p in made.named_parameters() if p.requires_grad}
    blocks = ["tower.0", "tower.1", "layers.0", "layers.1"]
    assert trained == {
        **{f"{block}.q_proj.lora_A.default.weight": (2, 4) for block in blocks},
        **{f"{block}.q_proj.lora_B.default.weight": (4, 2) for block in blocks},
        "experts.lora_A.default.weight": (3, 2, 4),
        "experts.lora_B.default.weight": (3, 8, 2),
        "layers.0.norm.weight": (4,),
        "layers.0.norm.bias": (4,),
    }


def test_what_muon_orthogonalises() -> None:
    made = model()
    inject_adapters(made, LoraOptions(("layers.{0}.q_proj", "head", "embed"), ("experts.gate_up_proj",)), PARTS)
    of_experts, of_layer = "experts", "layers.0.q_proj"
    assert matrix_names(made, made.head) == {
        f"{path}.lora_{kind}.default.weight" for path in (of_experts, of_layer) for kind in "AB"
    }


def test_names_of_megatron() -> None:
    """A fused layer's name means the transformers layers that it consists of, but those of frozen parts."""
    found = plan_adapters(model("tower"), LoraOptions(("linear_qkv",)), PARTS, MEGATRON_LAYERS)
    assert found.modules == ("layers.0.q_proj", "layers.0.v_proj", "layers.1.q_proj", "layers.1.v_proj")
    with pytest.raises(ConfigError, match="--lora-target-modules linear_fc1: no layer of Model has this name"):
        plan_adapters(model(), LoraOptions(("linear_fc1",)), PARTS, MEGATRON_LAYERS)


def test_names_of_megatron_are_those_of_its_layers() -> None:
    shape = DecoderShape(2, 1)
    found: dict[str, set[str]] = {}
    for layer in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        towers = [f"vision_encoder.blocks.layers.0.{layer}.weight"]
        towers += [f"vision_projector.{layer}.weight"] if layer.startswith("mlp") else []
        sources = [*decoder_tensor(f"decoder.layers.0.{layer}.weight", shape).sources]
        sources += [source for name in towers for source in tower_tensor(name, 2, 1).sources]
        found[layer.split(".")[1]] = {source.removesuffix(".weight") for source in sources}
    for name, paths in found.items():
        assert all(any(path.endswith(f".{end}") for end in MEGATRON_LAYERS[name]) for path in paths)
        assert all(any(path.endswith(f".{end}") for path in paths) for end in MEGATRON_LAYERS[name])


@pytest.mark.parametrize(
    ("targets", "options", "sentence"),
    [
        (("q_prj",), {}, "--lora-target-modules q_prj: no layer of Model has this name; did you mean 'q_proj'[?]"),
        (("up_proj",), {}, "its experts are single parameters: --lora-target-parameters experts.gate_up_proj"),
        (("tower.0",), {}, "--lora-target-modules tower.0: tower.0 is a Block; expected a linear, convolution or"),
        (("norm",), {}, "--lora-target-modules norm: no layer of Model has this name"),
        (("linear_qkv",), {}, "has this name; it is the Megatron backend's name: write q_proj v_proj"),
        (
            ("v_proj",),
            {"apply_to": ("head",)},
            "--lora-target-modules v_proj: Model has such layers, but not in --lora-apply-modules",
        ),
        (
            ("q_proj",),
            {"apply_to": ("audio",)},
            "--lora-apply-modules audio: Model has no such part; it has: vision_encoder, text_decoder, head, or all",
        ),
        (
            ("q_proj",),
            {"target_parameters": ("experts.gate_up",)},
            "--lora-target-parameters experts.gate_up: no parameter of Model has this name; did you mean",
        ),
        (
            ("q_proj",),
            {"target_parameters": ("experts.down_bias",)},
            "--lora-target-parameters experts.down_bias: experts.down_bias has 1 dimensions; expected 2 or 3",
        ),
        (
            (),
            {"target_parameters": ("q_proj.weight",)},
            "tower.0.q_proj.weight is the weight of a layer; name tower.0.q_proj in --lora-target-modules",
        ),
        (
            ("q_proj",),
            {"modules_to_save": ("layers.{0}",)},
            "--lora-target-modules and --lora-modules-to-save both name layers.0.q_proj; it gets adapters or",
        ),
        (("q_proj",), {"modules_to_save": ("embedding",)}, "--lora-modules-to-save embedding: no module of Model has"),
    ],
)
def test_sentences(targets: tuple[str, ...], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(model(), *targets, **options)


def test_layers_of_frozen_parts_only() -> None:
    made = model("tower")
    made.layers.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"q_proj: such layers are in frozen parts only \(tower.0.q_proj, …\); unfreeze"
    ):
        plan(made, "q_proj")


def test_first_magnitudes_are_pefts() -> None:
    """DoRA of a linear layer, a convolution and an embedding: with B zero, the model is the base model."""
    from peft import LoraConfig, inject_adapter_in_model

    def layers() -> nn.Module:
        torch.manual_seed(3)
        return nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Conv2d(3, 5, 2), "c": nn.Embedding(7, 6)})

    ours = layers()
    inject_adapters(ours, LoraOptions(("a", "b", "c"), r=2, use_dora=True), {})
    draw_adapters(ours, LoraOptions(("a", "b", "c"), r=2, use_dora=True), 1)
    config = LoraConfig(r=2, target_modules=["a", "b", "c"], use_dora=True)
    theirs = dict(inject_adapter_in_model(config, layers()).named_parameters())
    magnitudes = {name: p for name, p in ours.named_parameters() if "magnitude" in name}
    assert len(magnitudes) == 3
    for name, magnitude in magnitudes.items():
        torch.testing.assert_close(magnitude, theirs[name])


def test_frozen_weights_are_stored_as_they_compute() -> None:
    """In 16 bits, but what the model's library keeps in float32, and what is trained."""
    model = adapt_class(diffusers_class("wan")).from_config(diffusers_config("wan"))
    prepare_adapters(as_shardable(model), LoraOptions(("to_q",)), torch.bfloat16)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    wide = {"condition_embedder.time_embedder.linear_1.weight", "scale_shift_table", "blocks.0.norm2.weight"}
    wide |= {f"blocks.0.attn1.to_q.lora_{side}.default.weight" for side in "AB"}
    assert {dtypes[name] for name in wide} == {torch.float32}
    narrow = {"blocks.0.attn1.to_q.base_layer.weight", "blocks.0.attn1.to_k.weight", "proj_out.weight"}
    assert {dtypes[name] for name in narrow} == {torch.bfloat16}
