"""Flags about LoRA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag, no_effect


@dataclass(frozen=True)
class LoraArguments:
    """LoRA."""

    lora_target_modules: Annotated[
        list[str],
        flag(
            "layers that get adapters, while all other weights are frozen: names or ends of paths (q_proj, "
            "mlp.up_proj), paths as in fsdp2.yaml (model.layers.{0-3}.self_attn.q_proj), or all-linear; frozen parts "
            "get none unless a path names them; absent = no LoRA"
        ),
    ] = field(default_factory=list)
    lora_target_parameters: Annotated[
        list[str],
        flag("parameters that get adapters where they are not a layer's, the experts': mlp.experts.gate_up_proj"),
    ] = field(default_factory=list)
    lora_apply_modules: Annotated[
        list[str], flag("parts of the model that lora-target-modules are looked for in: text_decoder, …, or all")
    ] = field(default_factory=lambda: ["all"])
    lora_mixed_training: Annotated[
        bool, flag("parts outside of lora-apply-modules are trained whole, unless model.json freezes them")
    ] = False
    lora_r: Annotated[int, flag("rank of adapters", minimum=1)] = 8
    lora_alpha: Annotated[float, flag("an adapter's output is multiplied by lora-alpha / lora-r", above=0)] = 16
    lora_dropout: Annotated[float, flag("dropout of the inputs of adapters", minimum=0, below=1)] = 0.0
    lora_use_rslora: Annotated[bool, flag("ours: multiply by lora-alpha / √lora-r instead")] = False
    lora_use_dora: Annotated[bool, flag("ours: train each output's magnitude apart from its direction (DoRA)")] = False
    lora_modules_to_save: Annotated[
        list[str],
        flag("ours: modules that are trained whole and saved with the adapters (embed_tokens, lm_head for new tokens)"),
    ] = field(default_factory=list)
    lora_init: Annotated[
        Literal["kaiming", "gaussian", "random"],
        flag(
            "ours: distribution of A before training, uniform as in a linear layer or normal with 1 / r, while B is "
            "zero; random = A and B as in linear layers, so that training doesn't start at the base model"
        ),
    ] = "kaiming"
    lora_quantize: Annotated[
        Literal["nf4"] | None,
        flag("ours: frozen linear layers are stored in 4 bits (QLoRA) and computed in the run's dtype; FSDP2 only"),
    ] = None
    lora_load: Annotated[
        str | None,
        flag(
            "ours: adapters that training starts from: a PEFT directory (adapter_config.json), pytorch_lora_weights."
            "safetensors of diffusers, another file of adapters, or a checkpoint of adapters",
            path="file or directory",
        ),
    ] = None
    lora_register_forward_hook: Annotated[
        list[str], no_effect("gradients reach the adapters of recomputed blocks without hooks")("modules for a hook")
    ] = field(default_factory=list)
    load_base_model: Annotated[
        str | None,
        flag(
            "HF directory or torch_dcp folder of the base model, where load is a checkpoint of adapters",
            path="directory",
        ),
    ] = None
