"""The keys of the multimodal YAML file: what they become, and why some have no effect or are refused.

Those whose value counts are typed in `configs/trainer_config.py`; `configs/dialects/multimodal.py` reads a file.
"""

from __future__ import annotations

from mindspeed_mm.configs.published import NoEffect, Refused, is_given, is_not_zero, is_on

#: key of `training` → flag, where the value is the flag's
TRAINING_FLAGS = {
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "seed": "seed",
    "use_deter_comp": "use_deter_comp",
    "allow_hf32": "allow_tf32",
    "lr": "lr",
    "lr_min": "min_lr",
    "lr_start": "lr_warmup_init",
    "lr_decay_style": "lr_decay_style",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_eps": "adam_eps",
    "clip_grad": "clip_grad",
    "init_model_with_meta_device": "init_model_with_meta_device",
    "load": "load",
    "no_load_optim": "no_load_optim",
    "no_load_rng": "no_load_rng",
    "save": "save",
    "save_interval": "save_interval",
    "save_async": "async_save",
    "no_save_optim": "no_save_optim",
    "no_save_rng": "no_save_rng",
    "log_interval": "log_interval",
    "log_format": "log_format",
    "report_to": "report_to",
    "run_project": "run_project",
    "run_name": "run_name",
    "run_tags": "run_tags",
    "val_interval": "eval_interval",
    "save_best": "save_best",
    "early_stop": "early_stop",
    "eval_generate": "eval_generate",
    "eval_generate_language": "eval_generate_language",
    "eval_generate_rows": "eval_generate_rows",
    "eval_generate_batch_size": "eval_generate_batch_size",
    "eval_max_new_tokens": "eval_max_new_tokens",
}
#: key of `training` → flag, with optimizer muon
MUON_FLAGS = {"muon_momentum": "muon_momentum", "ns_steps": "ns_steps", "matched_adamw_rms": "matched_adamw_rms"}
#: key of `training.lora` → flag
LORA_FLAGS = {
    "target_modules": "lora_target_modules",
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "pretrained_lora_path": "lora_load",
}
#: key of `parallel.fsdp_plan` → key of fsdp2.yaml
FSDP_PLAN = {
    "apply_modules": "sub_modules_to_wrap",
    "ignored_modules": "ignored_modules",
    "param_dtype": "param_dtype",
    "reduce_dtype": "reduce_dtype",
    "output_dtype": "output_dtype",
    "cast_forward_inputs": "cast_forward_inputs",
    "reshard_after_forward": "reshard_after_forward",
    "num_to_forward_prefetch": "num_to_forward_prefetch",
    "num_to_backward_prefetch": "num_to_backward_prefetch",
    "cpu_offload": "offload_to_cpu",
}
#: key of `features.chunkmbs_plan` → key of fsdp2.yaml
CHUNK_MBS = {
    "apply_modules": "chunk_mbs_modules",
    "chunk_mbs": "chunk_mbs_size",
    "batch_dim": "chunk_mbs_batch_dim",
    "chunk_arg_indexs": "chunk_mbs_args",
    "chunk_kwarg_names": "chunk_mbs_kwargs",
}
#: name in our messages → key of this file
TRAINER_NAMES = {
    **{"--" + flag.replace("_", "-"): f"training.{key}" for key, flag in (TRAINING_FLAGS | MUON_FLAGS).items()},
    **{"--" + flag.replace("_", "-"): f"training.lora.{key}" for key, flag in LORA_FLAGS.items()},
    "--lora-init": "training.lora.init_lora_weights",
    "--global-batch-size": "training.gradient_accumulation_steps",
    "--train-iters": "training.train_iters",
    "--train-epochs": "training.train_epochs",
    "--optimizer": "training.optimizer",
    "--lr-warmup-fraction": "training.lr_warmup_ratio",
    "--lr-decay-iters": "training.lr_decay_ratio",
    "--num-workers": "data.dataloader_param.num_workers",
    "--expected-data-parallel-size": "parallel.data_parallel_size",
    "--tensor-model-parallel-size": "parallel.tensor_parallel_size",
    "--context-parallel-size": "parallel.ulysses_parallel_size × parallel.ring_attention_size",
    "--expert-model-parallel-size": "parallel.expert_parallel_size",
    **{name: f"parallel.fsdp_plan.{key}" for key, name in FSDP_PLAN.items() if key != name},
    **{name: f"features.chunkmbs_plan.{key}" for key, name in CHUNK_MBS.items()},
    "sharding_size": "parallel.fully_shard_parallel_size",
    "expert_parallel_size": "parallel.expert_parallel_size",
    "ep_fsdp_size": "parallel.expert_fully_shard_parallel_size",
    "moe_modules": "parallel.ep_plan.apply_modules",
    "tp_colwise": "parallel.tp_plan.colwise_parallel",
    "tp_rowwise": "parallel.tp_plan.rowwise_parallel",
    "recompute_modules": "features.recompute_plan.apply_modules",
    "activation_offload_modules": "features.activation_offload_plan.apply_modules",
    "init_from_hf_path": "model.model_name_or_path",
    "loss_cfg.loss_type": "features.loss_cfg.loss_type",
    "val_dataset": "data.val_dataset_param.basic_parameters.dataset",
}

_INSTEAD = "features has it; what is written here is never read there, either: write false, or move it to {}"
_LOW_PRECISION = (
    "there is no such recipe (launches by flags have fsdp2.yaml's float8_recipe, a scale a matrix or row); remove the "
    "plan to compute in parallel.fsdp_plan.param_dtype"
)
_DEAD = "the published trainer never reads it: remove it, and write {}"
_MORE_COPIES = "write parallel.expert_fully_shard_parallel_size; how many copies there are follows from it"
_CONTEXT = "write parallel.ulysses_parallel_size or parallel.ring_attention_size, and 1 here"


def _is_above_1(value: object) -> bool:
    return value not in (None, 1, "1")


TRAINER_REFUSED = (
    Refused("parallel.context_parallel_size", _is_above_1, _CONTEXT),
    Refused("parallel.expert_data_parallel_size", _is_above_1, _MORE_COPIES),
    Refused(
        "parallel.tp_plan.sequence_parallel",
        is_given,
        "it is no list here: remove it, and write --sequence-parallel behind the file",
    ),
    Refused("parallel.recompute", is_on, _INSTEAD.format("features.recompute")),
    Refused("model.recompute", is_on, _INSTEAD.format("features.recompute")),
    Refused("model.enable_chunk_loss", is_on, _INSTEAD.format("features.enable_chunk_loss")),
    Refused("model.enable_activation_offload", is_on, _INSTEAD.format("features.enable_activation_offload")),
    Refused("model.loss_cfg.loss_type", is_given, "write features.loss_cfg.loss_type, which is the one that counts"),
    Refused("model.loss_cfg.router_aux_loss_coef", is_not_zero, "write features.loss_cfg.router_aux_loss_coef"),
    Refused("model.mtp_num_layers", is_not_zero, "multi-token prediction is not there yet; write 0"),
    Refused("model.dtype", lambda value: value not in (None, "fp32", "float32"), "master weights are fp32; write null"),
    Refused("model.models", is_given, "a model made of several directories is not there"),
    Refused("training.no_decay_modules", is_given, _DEAD.format("--weight-decay-exclude-modules behind the file")),
    Refused("training.no_decay_params", is_given, _DEAD.format("--weight-decay-exclude-modules behind the file")),
    Refused("training.enable_full_determinism", is_on, _DEAD.format("training.use_deter_comp")),
    Refused("training.ckpt_manager", lambda value: value not in (None, "dcp"), _DEAD.format("training.save_format")),
    Refused("training.load_checkpoint_path", is_given, _DEAD.format("training.load")),
    Refused("training.save_steps", is_not_zero, _DEAD.format("training.save_interval")),
    Refused("training.max_steps", is_not_zero, _DEAD.format("training.train_iters")),
    Refused("training.profile.enable", is_on, _DEAD.format("tools.profile")),
    Refused(
        "training.save_ckpt_dtype",
        lambda value: value not in (None, "fp32", "float32"),
        "checkpoints hold the fp32 weights that are trained; write null (--save-hf exports in the directory's dtype)",
    ),
    Refused("training.quantization_plan.recipe_name", is_given, _LOW_PRECISION),
    Refused("training.quantization_plan.quant_converters", is_given, _LOW_PRECISION),
)

_KERNELS = "the kernels are transformers' and PyTorch's own, which compute the same"
#: published keys without a field, refused values aside: accepted, with the reason; the first pattern that fits
TRAINER_IDLE = (
    NoEffect(r"parallel\.(fsdp_plan\.)?(pregather|hook_modules)", "units are gathered in the order in which they run"),
    NoEffect(r"parallel\.ep_plan\.(use_npu_fused_ops|dispatcher)", _KERNELS),
    NoEffect(r"parallel\.(context_parallel_size|expert_data_parallel_size)", "it is 1"),
    NoEffect(r"(parallel|model)\.(recompute.*|activation_offload_plan\..*)", "features has the plan that counts"),
    NoEffect(r"model\.(enable_chunk_loss|chunkloss_plan\..*|enable_activation_offload)", "features has what counts"),
    NoEffect(r"model\.loss_cfg\..*", "features.loss_cfg is the one that counts"),
    NoEffect(r"model\.mtp_.*", "no layers of multi-token prediction are trained"),
    NoEffect(r"model\.(\w+_implementation|use_grouped_expert_matmul|chunk_layer_\w+)", _KERNELS),
    NoEffect(r"model\.skip_\w+_recompute", "a recomputed module is recomputed whole, to the same values"),
    NoEffect(r"model\.(dtype|models)", "it is null"),
    NoEffect(r"features\.chunkloss_plan\..*", "the loss finds the output layer by itself, and computes the same"),
    NoEffect(r"features\.recompute_plan\.op_replay_scopes", "a recomputed module is recomputed whole"),
    NoEffect(r"features\.(enable_ep_balance|ep_balance_plan\..*)", "experts stay on their ranks: it only moves work"),
    NoEffect(r"features\.skip_moe_pad_tokens", "padding has no part in any loss"),
    NoEffect(r"features\.loss_cfg\.router_aux_loss_offload", "the load-balancing loss stays on the device"),
    NoEffect(r"features\.(swap_plan\..*|activation_offload_plan\.impl)", "it only says how memory is moved"),
    NoEffect(r"training\.(adam_fused|clip_grad_foreach)", "AdamW is PyTorch's fused one, and gradients have one norm"),
    NoEffect(r"training\.mem_fraction_static", "adamw_swap keeps all of the optimizer's state in host memory"),
    NoEffect(r"training\.(load_format|load_rank0_and_broadcast)", "what is loaded shows its own format"),
    NoEffect(r"training\.lora\.lora_target_modules_support", "the model says which layers there are"),
    NoEffect(r"training\.quantization_plan\..*", "there are no quant_converters"),
    NoEffect(r"training\..*", "it is off"),
    NoEffect(r"inference(\..*)?", "this script trains"),
)
#: published keys without a field → the value that says what is done anyway, which needs no notice
AS_HERE = {
    "parallel.context_parallel_size": 1,
    "parallel.expert_data_parallel_size": 1,
    "features.chunkloss_plan.apply_module": "lm_head",
    "training.adam_fused": True,
    "training.clip_grad_foreach": True,
    "training.load_format": "auto",
}
#: published keys without a field of `TrainerConfig`
PUBLISHED = frozenset(
    f"{prefix}.{name}"
    for prefix, names in {
        "parallel": "pregather hook_modules context_parallel_size expert_data_parallel_size recompute "
        "recompute_plan.apply_modules recompute_plan.use_reentrant",
        "parallel.fsdp_plan": "pregather hook_modules",
        "parallel.tp_plan": "sequence_parallel",
        "parallel.ep_plan": "use_npu_fused_ops dispatcher",
        "model": "mtp_num_layers mtp_loss_scaling_factor gdn_implementation causal_conv1d_implementation "
        "kda_implementation use_grouped_expert_matmul skip_gdn_recompute skip_kda_recompute "
        "skip_flash_attn_recompute chunk_layer_chunks chunk_layer_types dtype models recompute "
        "recompute_plan.apply_modules recompute_plan.use_reentrant enable_chunk_loss chunkloss_plan.apply_module "
        "chunkloss_plan.chunk_size enable_activation_offload activation_offload_plan.apply_modules "
        "loss_cfg.loss_type loss_cfg.router_aux_loss_coef",
        "features": "enable_ep_balance ep_balance_plan.max_dup_experts_num skip_moe_pad_tokens "
        "loss_cfg.router_aux_loss_offload recompute_plan.op_replay_scopes activation_offload_plan.impl "
        "chunkloss_plan.apply_module chunkloss_plan.impl_type chunkloss_plan.vocab_tile_size "
        "swap_plan.capacity_mb swap_plan.keep_rate swap_plan.enable_prefetch swap_plan.cpu_arena_slab_size_mb "
        "swap_plan.cpu_arena_pool_policy swap_plan.pin_memory swap_plan.eviction_policy",
        "training": "adam_fused clip_grad_foreach mem_fraction_static enable_full_determinism ckpt_manager "
        "save_steps max_steps load_checkpoint_path load_format load_rank0_and_broadcast save_ckpt_dtype "
        "no_decay_modules no_decay_params",
        "training.profile": "enable start_step end_step save_path record_shapes with_memory with_stack ranks",
        "training.lora": "lora_target_modules_support",
        "training.quantization_plan": "recipe_name quant_converters apply_modules ignored_modules "
        "enable_fsdp_low_precision_all_gather fsdp_low_precision_all_gather_mode",
    }.items()
    for name in names.split()
)
