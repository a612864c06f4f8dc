"""The keys of the multimodal YAML file of mindspeed_mm/fsdp/train/trainer.py, typed, with that file's own defaults.

`data.*` and `tools` have the keys of data.json and tools.json. What each key becomes, and which published keys beside
these have no effect or are refused, is in `configs/dialects/multimodal.py`.

Source: the configuration list that MindSpeed-MM publishes for its native FSDP2 backend.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.configs.fsdp2_config import ShardingSize
from mindspeed_mm.configs.model_config import Plugins
from mindspeed_mm.configs.sections import AtLeast0, Bool, Count, DtypeName, Float, Paths, Section, Size, Texts


def _read_optional_size(value: object) -> object:
    return 0 if value is None else value


def _read_names(value: object) -> object:
    return [value] if isinstance(value, str) else value


NameList = Annotated[list[str], BeforeValidator(_read_names)]
OptionalSize = Annotated[Size, BeforeValidator(_read_optional_size)]


class FsdpPlan(Section):
    """`parallel.fsdp_plan`."""

    apply_modules: Paths | None = Field(
        None, description="sub_modules_to_wrap; entries that match nothing are left out, with a notice"
    )
    ignored_modules: Paths = Field([], description="ignored_modules")
    param_dtype: DtypeName | None = Field(None, description="param_dtype")
    reduce_dtype: DtypeName | None = Field(None, description="reduce_dtype")
    output_dtype: DtypeName | None = Field(None, description="output_dtype")
    cast_forward_inputs: Bool = Field(True, description="cast_forward_inputs")
    reshard_after_forward: Bool = Field(True, description="reshard_after_forward")
    num_to_forward_prefetch: OptionalSize | None = Field(None, description="num_to_forward_prefetch")
    num_to_backward_prefetch: OptionalSize = Field(0, description="num_to_backward_prefetch")
    cpu_offload: Bool = Field(False, description="offload_to_cpu")


class TpPlan(Section):
    """`parallel.tp_plan`."""

    colwise_parallel: Paths = Field([], description="tp_colwise; [] = the family's own")
    rowwise_parallel: Paths = Field([], description="tp_rowwise; [] = the family's own")


class EpPlan(Section):
    """`parallel.ep_plan`."""

    apply_modules: Paths = Field([], description="moe_modules; [] = all modules of experts that are known")
    apply_efsdp_modules: Paths = Field([], description="must be those of apply_modules")


class TrainerParallel(Section):
    """`parallel`."""

    data_parallel_size: Count | None = Field(None, description="--expected-data-parallel-size")
    fully_shard_parallel_size: ShardingSize = Field("auto", description="sharding_size")
    fsdp_plan: FsdpPlan = Field(FsdpPlan(), description="sharding")
    tensor_parallel_size: Count = Field(1, description="--tensor-model-parallel-size")
    tp_plan: TpPlan = Field(TpPlan(), description="which layers tensor-parallel ranks split")
    ring_attention_size: Count = Field(1, description="ranks of the ring: --context-parallel-size and -algo")
    ulysses_parallel_size: Count = Field(1, description="ranks of Ulysses: --context-parallel-size and -algo")
    expert_parallel_size: Count = Field(1, description="expert_parallel_size")
    expert_fully_shard_parallel_size: Count | None = Field(None, description="ep_fsdp_size")
    ep_plan: EpPlan = Field(EpPlan(), description="which experts are split")


class TrainerModel(Section):
    """`model`."""

    model_id: str | None = Field(None, description="model_id")
    model_name_or_path: str | None = Field(None, description="init_from_hf_path; null = what training.load names")
    trust_remote_code: Bool = Field(False, description="--trust-remote-code")
    attn_implementation: str | None = Field(None, description="attn_implementation; absent = transformers' own choice")
    freeze: Paths = Field([], description="freeze: modules or parameters that are not trained")


class TrainerData(Section):
    """`data`; its parts have the keys of data.json."""

    dataset_param: dict[str, Any] = Field(description="dataset_param. Required")
    val_dataset_param: dict[str, Any] | None = Field(
        None, description="validation rows: val_dataset and val_max_samples; its other keys must be dataset_param's"
    )
    dataloader_param: dict[str, Any] = Field({}, description="dataloader_param; its num_workers is --num-workers")


class RecomputePlan(Section):
    """`features.recompute_plan`."""

    apply_modules: Paths = Field([], description="recompute_modules, with features.recompute")
    use_reentrant: Bool = Field(False, description="use_reentrant")


class TrainerLoss(Section):
    """`features.loss_cfg`."""

    loss_type: Literal["raw", "default", "per_sample_loss", "per_token_loss", "token_loss", "square_loss"] = Field(
        "raw",
        description="loss_cfg.loss_type; raw, the model's own loss, is default: a mean over a micro-batch's targets",
    )
    router_aux_loss_coef: AtLeast0 = Field(0.0, description="loss_cfg.router_aux_loss_coef; with raw, the model's own")


class ChunkLossPlan(Section):
    """`features.chunkloss_plan`."""

    chunk_size: Count | None = Field(None, description="with enable_chunk_loss: loss_cfg.chunk_size (1024)")
    total_chunk_size: Count = Field(4096, description="with enable_dynamic_chunk_loss: loss_cfg.chunk_size")


class OffloadPlan(Section):
    """`features.activation_offload_plan`."""

    apply_modules: Paths | None = Field(None, description="activation_offload_modules, with enable_activation_offload")


class ChunkMbsPlan(Section):
    """`features.chunkmbs_plan`."""

    apply_modules: Paths | None = Field(None, description="chunk_mbs_modules, with enable_chunk_mbs")
    chunk_mbs: Count = Field(1, description="chunk_mbs_size")
    batch_dim: Size = Field(0, description="chunk_mbs_batch_dim")
    chunk_arg_indexs: list[Size] = Field([0], description="chunk_mbs_args")
    chunk_kwarg_names: list[str] = Field([], description="chunk_mbs_kwargs")


class TrainerFeatures(Section):
    """`features`."""

    recompute: Bool = Field(False, description="recompute the modules of recompute_plan in the backward pass")
    recompute_plan: RecomputePlan = Field(RecomputePlan(), description="what is recomputed")
    loss_cfg: TrainerLoss = Field(TrainerLoss(), description="loss")
    enable_chunk_loss: Bool = Field(False, description="loss_cfg.compute_mode chunk")
    enable_dynamic_chunk_loss: Bool = Field(False, description="loss_cfg.compute_mode dynamic_chunk")
    chunkloss_plan: ChunkLossPlan = Field(ChunkLossPlan(), description="sizes of chunks")
    enable_activation_offload: Bool = Field(
        False, description="keep activations, of recomputed modules the inputs, in host memory"
    )
    activation_offload_plan: OffloadPlan = Field(OffloadPlan(), description="of which modules")
    enable_chunk_mbs: Bool = Field(False, description="run blocks on parts of the micro-batch, one after another")
    chunkmbs_plan: ChunkMbsPlan = Field(ChunkMbsPlan(), description="which blocks, and what of their arguments")


class TrainerLora(Section):
    """`training.lora`."""

    enable: Bool = Field(False, description="train adapters (LoRA), all other weights frozen")
    rank: Count = Field(8, description="--lora-r")
    alpha: Annotated[Float, Field(gt=0)] = Field(16, description="--lora-alpha")
    target_modules: NameList = Field(["q_proj", "k_proj", "v_proj"], description="--lora-target-modules")
    dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(0.0, description="--lora-dropout")
    init_lora_weights: Any = Field(
        True,
        description="--lora-init: true or kaiming, gaussian, false = random; methods that read the base are refused",
    )
    pretrained_lora_path: str | None = Field(None, description="--lora-load")
    disable_peft_moe_conversion: Bool = Field(
        True, description="names mean layers; false is refused where they could mean experts: --lora-target-parameters"
    )


class LrScale(Section):
    """An entry of `training.lr_scaling_plan`."""

    match: str = Field(description="part of the names of parameters")
    scale: AtLeast0 = Field(1.0, description="factor on their learning rate")


class TrainerTraining(Section):
    """`training`."""

    micro_batch_size: Count = Field(1, description="--micro-batch-size")
    gradient_accumulation_steps: Count | None = Field(None, description="--gradient-accumulation-steps")
    train_iters: Count | None = Field(None, description="--train-iters; absent = 10000, or train_epochs")
    train_epochs: Annotated[Float, Field(gt=0)] | None = Field(None, description="--train-epochs")
    seed: Size = Field(42, description="--seed")
    use_deter_comp: Bool = Field(False, description="--use-deter-comp")
    allow_hf32: Bool = Field(False, description="--allow-tf32")
    lr: AtLeast0 = Field(5e-5, description="--lr")
    lr_min: AtLeast0 = Field(0.0, description="--min-lr")
    lr_start: AtLeast0 = Field(0.0, description="--lr-warmup-init")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="--lr-decay-style")
    lr_decay_ratio: Annotated[Float, Field(gt=0, le=1)] = Field(
        1.0, description="--lr-decay-iters, as a share of train_iters"
    )
    lr_warmup_ratio: Annotated[Float, Field(ge=0, lt=1)] = Field(0.0, description="warmup, as a share of the run")
    lr_scaling_plan: list[LrScale] | None = Field(None, description="--lr-scale-modules and --lr-mult")
    optimizer: Literal["adamw", "adamw_swap", "adamw8bit", "muon"] = Field(
        "adamw", description="--optimizer; adamw_swap is adamw with --swap-optimizer, adamw8bit is adam8bit"
    )
    weight_decay: AtLeast0 = Field(0.0, description="--weight-decay, which leaves out norms and biases")
    adam_beta1: AtLeast0 = Field(0.9, description="--adam-beta1")
    adam_beta2: AtLeast0 = Field(0.999, description="--adam-beta2")
    adam_eps: AtLeast0 = Field(1e-8, description="--adam-eps")
    muon_momentum: AtLeast0 = Field(0.95, description="--muon-momentum")
    ns_steps: Count = Field(5, description="--ns-steps")
    matched_adamw_rms: AtLeast0 = Field(0.2, description="--matched-adamw-rms")
    clip_grad: AtLeast0 = Field(1.0, description="--clip-grad")
    init_model_with_meta_device: Bool = Field(False, description="--init-model-with-meta-device")
    load: str | None = Field(None, description="--load")
    load_strict: Bool | None = Field(None, description="false = --no-strict-load; absent = strict")
    no_load_optim: Bool = Field(False, description="--no-load-optim")
    no_load_rng: Bool = Field(False, description="--no-load-rng")
    save: str | None = Field(None, description="--save")
    save_interval: Count = Field(1, description="--save-interval")
    save_format: Literal["auto", "dcp", "hf"] = Field(
        "auto", description="hf = --save-hf too, every save_interval steps"
    )
    save_async: Bool = Field(False, description="--async-save")
    no_save_optim: Bool = Field(False, description="--no-save-optim")
    no_save_rng: Bool = Field(False, description="--no-save-rng")
    log_interval: Count = Field(1, description="--log-interval")
    log_format: Literal["auto", "full", "short", "live"] = Field("auto", description="ours: --log-format")
    report_to: Texts = Field(None, description="ours: --report-to")
    run_project: str | None = Field(None, description="ours: --run-project")
    run_name: str | None = Field(None, description="ours: --run-name")
    run_tags: Texts = Field(None, description="ours: --run-tags")
    val_interval: Size = Field(0, description="--eval-interval")
    val_micro_batch_size: Count | None = Field(None, description="must be micro_batch_size, where there is validation")
    save_best: str | None = Field(None, description="ours: --save-best")
    early_stop: Count | None = Field(None, description="ours: --early-stop")
    eval_generate: str | None = Field(None, description="ours: --eval-generate")
    eval_generate_language: str | None = Field(None, description="ours: --eval-generate-language")
    eval_generate_rows: Count = Field(64, description="ours: --eval-generate-rows")
    eval_generate_batch_size: Count = Field(8, description="ours: --eval-generate-batch-size")
    eval_max_new_tokens: Count = Field(128, description="ours: --eval-max-new-tokens")
    manual_gc_interval: Size = Field(0, description="--manual-gc and --manual-gc-interval")
    lora: TrainerLora = Field(TrainerLora(), description="adapters")
    plugin: Plugins = Field([], description="plugin; the published system's own are built in")


class TrainerConfig(Section):
    """A whole file."""

    parallel: TrainerParallel = Field(TrainerParallel(), description="layout")
    model: TrainerModel = Field(TrainerModel(), description="model")
    data: TrainerData = Field(description="data")
    features: TrainerFeatures = Field(TrainerFeatures(), description="loss and memory")
    training: TrainerTraining = Field(TrainerTraining(), description="training")
    tools: dict[str, Any] = Field({}, description="the keys of tools.json")
