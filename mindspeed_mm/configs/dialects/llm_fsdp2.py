"""The file of train_fsdp2.py: model, parallel, data and training in keys of their own (`configs/llm_config.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_mm.configs.files import FileSection
from mindspeed_mm.configs.llm_config import LlmConfig, LlmData, LlmModel, LlmParallel, LlmTraining
from mindspeed_mm.configs.published import NoEffect, Refused, is_given, is_on, log_no_effect, refusals
from mindspeed_mm.configs.sections import build_section, given_values, raise_all
from mindspeed_mm.configs.yaml_run import Dialect, FlagValue, YamlRun
from mindspeed_mm.utils.errors import ConfigError

_NEW_TOKENS = (
    "the vocabulary doesn't grow here: add the tokens beforehand with transformers (tokenizer.add_tokens, "
    "model.resize_token_embeddings, save_pretrained of both) and name that directory as model_name_or_path"
)
#: keys whose neglect would change what is trained
REFUSED = (
    Refused("model.resize_vocab", is_on, _NEW_TOKENS),
    Refused("model.add_tokens", is_given, _NEW_TOKENS),
    Refused("model.add_special_tokens", is_given, _NEW_TOKENS),
    Refused("model.new_special_tokens_config", is_given, _NEW_TOKENS),
    Refused(
        "model.quant_recipe_name",
        is_given,
        "there is no such recipe (launches by flags have fsdp2.yaml's float8_recipe, one scale a matrix or row); write "
        "null and parallel.param_dtype: bf16",
    ),
    Refused(
        "data.tool_format",
        is_given,
        "tool calls are written as the chat template writes them; write null, and choose the format by data.template",
    ),
    Refused(
        "training.fix_router",
        is_on,
        "experts chosen without regard to the tokens train another model, for measuring speed alone; write false",
    ),
)
_OF_A_CORPUS = (
    "split",
    "append_eod",
    "reset_position_ids",
    "reset_attention_mask",
    "create_attention_mask_in_dataloader",
    "no_shared_storage",
)
#: keys of `data` that are of turns, which a corpus hasn't
_OF_TURNS = ("template", "train_on_prompt", "mask_history", "default_system", "enable_thinking")
#: why keys have no effect, where they have none
NO_EFFECT = (
    NoEffect(r"model\.(cache_dir|model_revision)", "nothing is fetched: the directory is read as it is"),
    NoEffect(r"model\.init_special_tokens", "no tokens are added"),
    NoEffect(r"model\.quant_(apply|ignored)_modules", "quant_recipe_name is null"),
    NoEffect(r"parallel\.(ef|shard_pl).*", "FSDP2 chooses the dimension, which doesn't change what is computed"),
    NoEffect(r"parallel\.ep_dispatcher", "tokens go to their experts in one way, which computes the same"),
    NoEffect(r"parallel\.ep_.*", "parallel.ep_size is 1"),
    NoEffect(r"parallel\.tp_.*", "parallel.tp_size is 1"),
    NoEffect(r"parallel\.recompute_modules", "parallel.recompute is false"),
    NoEffect(r"parallel\.cp_type", "parallel.cp_size is 1"),
    NoEffect(r"data\.preprocessing_batch_size", "rows are tokenised one by one"),
    NoEffect(
        r"data\.(overwrite_cache|preprocessing_num_workers)",
        "rows are tokenised while training goes on, in the loader's workers; data.tokenized_path names a folder for "
        "tokens that are made before",
    ),
    NoEffect(r"data\.buffer_size", "data.streaming is false"),
    NoEffect(r"data\.packing", "samples of a row never see each other, as with neat_packing"),
    NoEffect(rf"data\.({'|'.join(_OF_A_CORPUS)})", "they belong to data_manager_type: mg"),
    NoEffect(rf"data\.({'|'.join(_OF_TURNS)})", "data.data_manager_type: mg reads documents, which have no turns"),
    NoEffect(r"data\.ignore_pad_token_for_loss", "padding is never a target"),
    NoEffect(r"training\.min_lr", "only lr_scheduler_type: cosine has a lowest learning rate"),
    NoEffect(r"training\.num_train_epochs", "training.max_steps is the length of the run"),
    NoEffect(r"training\.profile_export_type", "traces are text"),
    NoEffect(r"training\.profile_.*", "training.profile is false"),
    NoEffect(r"training\.use_flash_attn", "transformers chooses the attention kernel by device and model"),
    NoEffect(r"training\.moe_grouped_gemm", "the kernels are transformers' own"),
    NoEffect(r"training\.dataloader_(prefetch_factor|persistent_workers)", "training.dataloader_num_workers is 0"),
    NoEffect(r"inference\..*", "this script trains"),
)

#: key of `training` → flag, where the value is the flag's
_TRAINING_FLAGS = {
    "output_dir": "save",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "optimizer": "optimizer",
    "lr": "lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_eps",
    "max_grad_norm": "clip_grad",
    "lr_scheduler_type": "lr_decay_style",
    "seed": "seed",
    "save_steps": "save_interval",
    "save_epochs": "save_epochs",
    "save_total_limit": "save_total_limit",
    "save_async": "async_save",
    "save_best": "save_best",
    "early_stop": "early_stop",
    "eval_generate": "eval_generate",
    "eval_generate_language": "eval_generate_language",
    "eval_generate_rows": "eval_generate_rows",
    "eval_generate_batch_size": "eval_generate_batch_size",
    "eval_max_new_tokens": "eval_max_new_tokens",
    "save_hf_weights": "save_hf",
    "resume_from_checkpoint": "load",
    "logging_steps": "log_interval",
    "log_format": "log_format",
    "report_to": "report_to",
    "run_project": "run_project",
    "run_name": "run_name",
    "run_tags": "run_tags",
    "dataloader_num_workers": "num_workers",
    "use_fused_rmsnorm": "use_fused_rmsnorm",
    "use_fused_rotary_pos_emb": "use_fused_rotary_pos_emb",
}
#: name in our messages → key of this file
NAMES = {
    **{"--" + flag.replace("_", "-"): f"training.{key}" for key, flag in _TRAINING_FLAGS.items()},
    "--global-batch-size": "training.gradient_accumulation_steps",
    "--train-iters": "training.max_steps",
    "--train-epochs": "training.num_train_epochs",
    "--min-lr": "training.min_lr",
    "--lr-warmup-fraction": "training.warmup_ratio",
    "--no-save-optim": "training.save_only_model",
    "--seq-length": "data.cutoff_len",
    "--tensor-model-parallel-size": "parallel.tp_size",
    "--context-parallel-size": "parallel.cp_size",
    "--context-parallel-algo": "parallel.cp_type",
    "--expert-model-parallel-size": "parallel.ep_size",
    "sharding_size": "parallel.fsdp_size",
    "sub_modules_to_wrap": "parallel.fsdp_modules",
    "moe_modules": "parallel.ep_modules",
    "reshard_after_forward": "parallel.reshard_after_forward",
    "init_from_hf_path": "model.model_name_or_path",
    "loss_cfg.chunk_size": "training.chunk_loss_size",
    "dataset_param.basic_parameters.template": "data.template",
    "dataset_param.basic_parameters.dataset": "data.dataset",
    "dataset_param.preprocess_parameters.model_name_or_path": "model.tokenizer_name_or_path",
    "cache_dir": "data.tokenized_path",
    "val_dataset": "data.eval_dataset",
    "val_rate": "data.val_size",
    "dataloader_param.shuffle": "training.disable_shuffling",
    **{f"corpus.{key}": f"data.{key}" for key in _OF_A_CORPUS},
    **{key: f"data.{key}" for key in ("max_samples", "interleave_probs", "mix_strategy", "dataset_dir")},
    **{key: f"parallel.{key}" for key in ("ep_fsdp_size", "recompute_modules", "ignored_modules")},
    **{key: f"parallel.{key}" for key in ("tp_colwise", "tp_rowwise")},
    **{key: f"model.{key}" for key in ("model_id", "train_from_scratch")},
}
_LAYERS = "model.layers.{*}"
#: where *.q_proj and its kin are in a decoder layer
_PLACES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
#: values of tp_colwise and tp_rowwise that the published list gives where a file doesn't; the family's own plan then
_USUAL_SPLIT = {
    "tp_colwise": {"*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"},
    "tp_rowwise": {"*.o_proj", "*.down_proj"},
}
_UNTIL_THE_END = 2**31 - 1  # steps


def _read(content: Mapping[str, Any], path: str) -> YamlRun:
    config, _ = build_section(LlmConfig, content, path, path)
    given = given_values(config)
    raise_all([*refusals(given, REFUSED, path), *_contradictions(config, path)])
    sections = {
        "mm_model": FileSection(path, "model", _model(config.model, config.training)),
        "mm_data": FileSection(path, "data", _data(config)),
        "fsdp2_config_path": FileSection(path, "parallel", _fsdp2(config.parallel, path)),
    }
    if config.training.profile:
        sections["mm_tool"] = FileSection(path, "training", _tools(config.training))
    log_no_effect(_idle(config, given), NO_EFFECT, path)
    return YamlRun(path, list(_flags(config)), sections, NAMES)


def _contradictions(config: LlmConfig, path: str) -> list[str]:
    parallel, data = config.parallel, config.data
    if data.data_manager_type == "mg" and config.training.disable_shuffling:
        return [
            f"{path}: 'training.disable_shuffling' is true and 'data.data_manager_type' mg: a corpus is shuffled by "
            "training.seed; write false"
        ]
    if parallel.ep_size == 1 or parallel.ep_fsdp_modules is None or not parallel.ep_fsdp_modules:
        return []
    experts = parallel.ep_modules or [f"{_LAYERS}.mlp.experts"]
    others = [pattern for pattern in parallel.ep_fsdp_modules if pattern not in experts]
    if not others:
        return []
    return [
        f"{path}: 'parallel.ep_fsdp_modules' names '{others[0]}', which 'parallel.ep_modules' doesn't: what "
        "ep_fsdp_size shards are the experts; write the same list in both, or put the module into fsdp_modules"
    ]


def _makes_tokens_first(config: LlmConfig) -> bool:
    """Whether rows are tokenised before training: asked for, or packed rows whose epochs are counted."""
    data, training = config.data, config.training
    if data.tokenized_path is not None or data.data_manager_type == "mg":
        return True
    by_epochs = training.max_steps is None or ("save_epochs" in training.model_fields_set and training.save_epochs)
    return (data.packing or data.neat_packing) and not data.streaming and bool(by_epochs)


def _idle(config: LlmConfig, given: Mapping[str, Any]) -> list[str]:
    """The keys of a file that have no effect with its other values."""
    model, parallel, data, training = config.model, config.parallel, config.data, config.training
    profiles = [key for key in given if key.startswith("training.profile_")]
    is_corpus = data.data_manager_type == "mg"
    corpus = [f"data.{key}" for key in _OF_A_CORPUS]
    switches = ("use_flash_attn", "moe_grouped_gemm")
    idle = {
        "model.cache_dir": model.cache_dir is not None,
        "model.model_revision": model.model_revision not in (None, "main"),
        "model.init_special_tokens": model.init_special_tokens != "noise_init",
        "model.quant_apply_modules": model.quant_apply_modules is not None,
        "model.quant_ignored_modules": model.quant_ignored_modules is not None,
        "parallel.shard_placement_fn": parallel.shard_placement_fn is not None,
        "parallel.efsdp_shard_placement_fn": parallel.efsdp_shard_placement_fn is not None,
        "parallel.ep_dispatcher": parallel.ep_dispatcher != "eager",
        "parallel.ep_fsdp_size": parallel.ep_size == 1 and parallel.ep_fsdp_size > 1,
        "parallel.tp_colwise": parallel.tp_size == 1 and not _is_usual("tp_colwise", parallel.tp_colwise),
        "parallel.tp_rowwise": parallel.tp_size == 1 and not _is_usual("tp_rowwise", parallel.tp_rowwise),
        "parallel.recompute_modules": not parallel.recompute and parallel.recompute_modules is not None,
        "parallel.cp_type": parallel.cp_size == 1 and parallel.cp_type != "ulysses",
        "data.preprocessing_batch_size": data.preprocessing_batch_size != 1000,
        "data.overwrite_cache": data.overwrite_cache and not _makes_tokens_first(config),
        "data.preprocessing_num_workers": not _makes_tokens_first(config) and bool(data.preprocessing_num_workers),
        "data.buffer_size": not data.streaming,
        "data.packing": data.packing and not data.neat_packing and not is_corpus,
        **{f"data.{key}": is_corpus and key in data.model_fields_set for key in _OF_TURNS},
        "data.ignore_pad_token_for_loss": not data.ignore_pad_token_for_loss,
        **{key: is_on(given.get(key)) and not is_corpus for key in corpus if key != "data.split"},
        "data.split": is_given(data.split) and not is_corpus,
        "training.min_lr": training.lr_scheduler_type != "cosine" and training.min_lr is not None,
        "training.num_train_epochs": training.max_steps is not None,
        **{key: not training.profile for key in profiles},
        "training.profile_export_type": training.profile and training.profile_export_type != "text",
        **{f"training.{key}": getattr(training, key) for key in switches},
        "training.dataloader_prefetch_factor": not training.dataloader_num_workers,
        "training.dataloader_persistent_workers": not training.dataloader_num_workers
        and training.dataloader_persistent_workers,
        **{key: True for key in given if key.startswith("inference.")},
    }
    return [key for key in given if idle.get(key)]


def _model(model: LlmModel, training: LlmTraining) -> dict[str, Any]:
    """The content of model.json."""
    loss: dict[str, Any] = {"loss_type": "per_token_loss" if training.calculate_per_token_loss else "default"}
    if training.chunk_loss_size is not None:
        loss |= {"compute_mode": "chunk", "chunk_size": training.chunk_loss_size}
    return {
        "model_id": model.model_id,
        "plugin": model.plugin,
        "init_from_hf_path": model.model_name_or_path,
        "train_from_scratch": model.train_from_scratch,
        "ignore_weights": model.train_from_scratch,
        "loss_cfg": loss,
    }


def _fsdp2(parallel: LlmParallel, path: str) -> dict[str, Any]:
    """The content of fsdp2.yaml."""
    content: dict[str, Any] = {
        "sharding_size": parallel.fsdp_size,
        "sub_modules_to_wrap": parallel.fsdp_modules,
        "ignored_modules": parallel.ignored_modules,
        "reshard_after_forward": parallel.reshard_after_forward,
        "reduce_dtype": parallel.reduce_dtype,
        "num_to_forward_prefetch": parallel.num_to_forward_prefetch,
        "num_to_backward_prefetch": parallel.num_to_backward_prefetch,
    }
    if parallel.recompute:
        content["recompute_modules"] = parallel.recompute_modules or [_LAYERS]
    if parallel.ep_size > 1:
        shards = parallel.ep_fsdp_size if parallel.ep_fsdp_modules != [] else 1
        content |= {"moe_modules": parallel.ep_modules, "ep_fsdp_size": shards}
    if parallel.tp_size > 1:
        for key in ("tp_colwise", "tp_rowwise"):
            content[key] = _split_modules(key, getattr(parallel, key), path)
    return content


def _is_usual(key: str, patterns: list[str] | None) -> bool:
    return patterns is None or set(patterns) == _USUAL_SPLIT[key]


def _split_modules(key: str, patterns: list[str] | None, path: str) -> list[str] | None:
    """Module paths of a list with globs; None: the family's own."""
    if patterns is None or _is_usual(key, patterns):
        return None
    found = []
    for pattern in patterns:
        name = pattern.removeprefix("*.")
        if "*" not in pattern.replace("{*}", ""):
            found.append(pattern)
        elif name in _PLACES:
            found.append(f"{_LAYERS}.{_PLACES[name]}.{name}")
        else:
            raise ConfigError(
                f"{path}: 'parallel.{key}' names '{pattern}', and of names with *. in front only "
                f"{', '.join(_PLACES)} have a place that is known; write the path, such as "
                f"{_LAYERS}.self_attn.{name.rpartition('.')[2]}"
            )
    return found


def _data(config: LlmConfig) -> dict[str, Any]:
    """The content of data.json."""
    model, data, training = config.model, config.data, config.training
    taken = (
        "dataset_dir template train_on_prompt mask_history streaming buffer_size mix_strategy interleave_probs "
        "max_samples overwrite_cache preprocessing_num_workers packing neat_packing default_system enable_thinking"
    )
    is_corpus = data.data_manager_type == "mg"
    basic: dict[str, Any] = {key: getattr(data, key) for key in taken.split() if not (is_corpus and key in _OF_TURNS)}
    basic |= {"dataset": _named(data, data.dataset, training), "stage": training.stage}
    if data.eval_dataset:
        basic["val_dataset"] = _named(data, data.eval_dataset, training)
    if data.val_size:
        basic["val_size" if isinstance(data.val_size, int) else "val_rate"] = data.val_size
    if _makes_tokens_first(config):
        folder = data.tokenized_path or os.path.join(training.output_dir, "tokens")
        basic |= {"preprocess_on_fly": False, "cache_dir": folder}
    return {
        "dataset_param": {
            **_kind_of_data(data),
            "basic_parameters": basic,
            "preprocess_parameters": {
                "model_name_or_path": model.tokenizer_name_or_path or model.model_name_or_path,
                "use_fast_tokenizer": model.use_fast_tokenizer,
                "split_special_tokens": model.split_special_tokens,
            },
        },
        "dataloader_param": {
            "shuffle": not training.disable_shuffling,
            "drop_last": training.dataloader_drop_last,
            "pin_memory": training.dataloader_pin_memory,
            "prefetch_factor": training.dataloader_prefetch_factor,
            "persistent_workers": training.dataloader_persistent_workers,
        },
    }


def _kind_of_data(data: LlmData) -> dict[str, Any]:
    """dataset_type, and what a corpus needs beside it."""
    if data.data_manager_type == "lf":
        return {"dataset_type": "huggingface"}
    options = {key: getattr(data, key) for key in _OF_A_CORPUS if key != "split" or data.split is not None}
    return {"dataset_type": "corpus", "corpus": options}


def _named(data: LlmData, names: list[Any], training: LlmTraining) -> list[Any]:
    """Data sets as data.json writes them; entries of plain text that name no columns have theirs in `text`."""
    if training.stage != "pt" and data.data_manager_type != "mg":
        return names
    return [
        {**name, "pretrain": True} if isinstance(name, Mapping) and not name.get("columns") else name for name in names
    ]


def _tools(training: LlmTraining) -> dict[str, Any]:
    """The content of tools.json."""
    same = (
        "level",
        "with_stack",
        "with_memory",
        "record_shapes",
        "with_cpu",
        "save_path",
        "data_simplification",
    )
    static = {key: getattr(training, f"profile_{key}") for key in same}
    end = training.profile_step_end
    static |= {"start_step": training.profile_step_start, "end_step": _UNTIL_THE_END if end == -1 else end}
    return {
        "profile": {
            "enable": True,
            "profile_type": "static",
            "ranks": training.profile_ranks,
            "static_param": static,
        }
    }


def _flags(config: LlmConfig) -> Iterator[FlagValue]:
    """The flags, each with the key that gives its value."""
    model, parallel, data, training = config.model, config.parallel, config.data, config.training
    values: dict[str, tuple[str, Any]] = {
        "use_torch_fsdp2": ("parallel", True),
        "init_model_with_meta_device": ("model.init_model_with_meta_device", model.init_model_with_meta_device),
        "trust_remote_code": ("model.trust_remote_code", model.trust_remote_code),
        "bf16": ("parallel.param_dtype", parallel.param_dtype == "bf16"),
        "fp16": ("parallel.param_dtype", parallel.param_dtype == "fp16"),
        "tensor_model_parallel_size": ("parallel.tp_size", parallel.tp_size),
        "context_parallel_size": ("parallel.cp_size", parallel.cp_size),
        "expert_model_parallel_size": ("parallel.ep_size", parallel.ep_size),
        "seq_length": ("data.cutoff_len", data.cutoff_len),
        **{flag: (f"training.{key}", getattr(training, key)) for key, flag in _TRAINING_FLAGS.items()},
        "no_save_optim": ("training.save_only_model", training.save_only_model),
        "no_save_rng": ("training.save_only_model", training.save_only_model),
    }
    if parallel.cp_size > 1:
        algorithm = "megatron_cp_algo" if parallel.cp_type == "ring" else "ulysses_cp_algo"
        values["context_parallel_algo"] = ("parallel.cp_type", algorithm)
    if training.max_steps is not None:
        values["train_iters"] = ("training.max_steps", training.max_steps)
    else:
        values["train_epochs"] = ("training.num_train_epochs", training.num_train_epochs)
    if training.lr_scheduler_type == "cosine":
        lowest = min(1e-6, training.lr) if training.min_lr is None else training.min_lr
        values["min_lr"] = ("training.min_lr", lowest)
    if training.warmup_ratio:
        values["lr_warmup_fraction"] = ("training.warmup_ratio", training.warmup_ratio)
    if "save_epochs" not in training.model_fields_set and not _has_epochs(config):
        values["save_epochs"] = ("training.save_epochs", None)
    for flag, (key, value) in values.items():
        yield FlagValue(key, flag, value)


def _has_epochs(config: LlmConfig) -> bool:
    """Whether the steps of an epoch are known before training."""
    data = config.data
    return not data.streaming and (not (data.packing or data.neat_packing) or _makes_tokens_first(config))


#: with the keys that only this dialect has, a misplaced one of another dialect is told as an unknown one
_MARKS = frozenset({"parallel", "training", "training.output_dir", "parallel.fsdp_modules", "data.dataset"})
DIALECT = Dialect(_MARKS, "train_fsdp2.py", _read)
