"""Flags about the model, the loss and the precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mindspeed_mm.configs.flags.spec import flag, no_effect

_FSDP2_ONLY = no_effect(ptd="it describes --use-torch-fsdp2, which is not given")
_BUILT_ON_META = no_effect(ptd="a rank builds only its own part of the model, and reads or draws only that")


@dataclass(frozen=True)
class ModelArguments:
    """Model."""

    mm_model: Annotated[str | None, flag("model.json", path="file")] = None
    use_torch_fsdp2: Annotated[bool, flag("train with FSDP2; absent = Megatron-core's parallelism")] = False
    fsdp2_config_path: Annotated[str | None, _FSDP2_ONLY("fsdp2.yaml; absent = its defaults", path="file")] = None
    init_model_with_meta_device: Annotated[
        bool, _BUILT_ON_META("build without memory, then load or draw each shard")
    ] = False
    trust_remote_code: Annotated[
        bool, flag("run code that comes with a model or processor directory, in the whole run")
    ] = False
    untie_embeddings_and_output_weights: Annotated[
        bool,
        no_effect(
            fsdp2="the HF config says whether the embedding and the head are one",
            ptd="model.json's text_decoder or the HF config says whether the embedding and the head are one",
        )("Megatron's switch for separate embedding and head"),
    ] = False


@dataclass(frozen=True)
class ProcessArguments:
    """Seed, determinism and garbage collection."""

    seed: Annotated[int, flag("seed of weights, data order and dropout", minimum=0)] = 1234
    use_deter_comp: Annotated[
        bool, flag("deterministic kernels", spellings=("--use-deter-comp", "--npu-deterministic"))
    ] = False
    deterministic_mode: Annotated[bool, flag("the same, by Megatron's name")] = False
    manual_gc: Annotated[bool, flag("collect garbage at chosen steps, on all ranks at once")] = False
    manual_gc_interval: Annotated[int, flag("steps between two collections; 0 = only at the start", minimum=0)] = 0
    manual_gc_eval: Annotated[
        bool,
        flag(
            "with manual-gc: collect around evaluation too",
            spellings=("--manual-gc-eval",),
            off_spellings=("--no-manual-gc-eval",),
        ),
    ] = True


@dataclass(frozen=True)
class LossArguments:
    """Loss (model.json's loss_cfg may say the same)."""

    calculate_per_token_loss: Annotated[bool, flag("loss_type per_token_loss, which is the default")] = False
    calculate_per_sample_loss: Annotated[bool, flag("loss_type per_sample_loss")] = False
    calculate_square_loss: Annotated[bool, flag("loss_type square_loss")] = False
    calculate_token_loss: Annotated[bool, flag("loss_type token_loss")] = False


_FUSED = no_effect(ptd="the kernels are megatron-core's and PyTorch's own")


@dataclass(frozen=True)
class FusedKernelArguments:
    """Fused kernels of language models, by Liger on CUDA and torch_npu on Ascend (docs/performance.md)."""

    use_fused_rmsnorm: Annotated[bool, flag("a norm in one kernel")] = False
    use_fused_swiglu: Annotated[bool, _FUSED("the activation of a gated MLP, and its product, in one kernel")] = False
    use_fused_rotary_pos_emb: Annotated[bool, _FUSED("queries and keys rotated in one kernel")] = False


@dataclass(frozen=True)
class PrecisionArguments:
    """Precision (fsdp2.yaml's param_dtype takes precedence)."""

    bf16: Annotated[bool, flag("compute in bfloat16, over fp32 master weights")] = False
    fp16: Annotated[bool, flag("compute in float16, over fp32 master weights")] = False
    loss_scale: Annotated[
        float | None,
        flag("fp16: fixed factor on the step's mean loss; absent = dynamic, as the gradients allow", above=0),
    ] = None
    initial_loss_scale: Annotated[float, flag("dynamic loss scale: the first one", above=0)] = 2.0**32
    min_loss_scale: Annotated[float, flag("dynamic loss scale: the smallest one", above=0)] = 1.0
    loss_scale_window: Annotated[
        float, flag("dynamic loss scale: doubled after this many finite steps in a row", minimum=1)
    ] = 1000
    hysteresis: Annotated[
        int, flag("dynamic loss scale: halved from this overflow on, counted since it was last doubled", minimum=1)
    ] = 2
    accumulate_allreduce_grads_in_fp32: Annotated[
        bool,
        flag("gradients accumulated and reduced in fp32, which is the default; refuses another reduce_dtype"),
    ] = False
    downcast_to_bf16: Annotated[
        bool, flag("round the weights that a run starts from through bfloat16; they stay float32")
    ] = False
    allow_tf32: Annotated[
        bool,
        flag(
            "compute float32 products and convolutions in TF32 (HF32 on an NPU), with 10 bits after the binary point; "
            "absent = as PyTorch does, products exactly and convolutions as the device's default is"
        ),
    ] = False
