"""The file of mindspeed_mm/fsdp/train/trainer.py: parallel, model, data, features, training and tools.

Its typed keys are in `configs/trainer_config.py`; the tables of `configs/trainer_keys.py` say what they become, and why
other published keys have no effect or are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.families_not_there import missing_class
from mindspeed_mm.configs.files import FileSection, top_level_anchors
from mindspeed_mm.configs.lora import lora_init
from mindspeed_mm.configs.published import log_no_effect, refusals
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import build_section, given_values, raise_all
from mindspeed_mm.configs.trainer_config import (
    TrainerConfig,
    TrainerFeatures,
    TrainerLora,
    TrainerModel,
    TrainerParallel,
    TrainerTraining,
)
from mindspeed_mm.configs.trainer_data import data_section
from mindspeed_mm.configs.trainer_keys import (
    AS_HERE,
    CHUNK_MBS,
    FSDP_PLAN,
    LORA_FLAGS,
    MUON_FLAGS,
    PUBLISHED,
    TRAINER_IDLE,
    TRAINER_NAMES,
    TRAINER_REFUSED,
    TRAINING_FLAGS,
)
from mindspeed_mm.configs.yaml_run import Dialect, FlagValue, YamlRun
from mindspeed_mm.utils.log import notice

SCRIPT = "mindspeed_mm/fsdp/train/trainer.py"
_BUILT_IN = "mindspeed_mm/fsdp/"
_ITERS = 10_000
_OF_LORA = tuple(key for key in TrainerLora.model_fields if key != "enable")
#: layers that PEFT takes for the experts' parameters in models with experts
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_PLAN_OFF = "the switch beside the plan is off"


def _read(content: Mapping[str, Any], path: str) -> YamlRun:
    if not _has_own_plugin(content):
        model = content.get("model")
        model_id = model.get("model_id") if isinstance(model, Mapping) else None
        raise_all([sentence] if (sentence := missing_class(model_id, path, "model.model_id")) else [])
    content, own = _without_own_keys(_without_variables(content, path))
    config, keys = build_section(TrainerConfig, content, path, path, {*PUBLISHED, "inference"})
    raise_all([*refusals(keys.published, TRAINER_REFUSED, path), *_contradictions(config, path)])
    log_no_effect(
        [key for key, value in keys.published.items() if not _asks_for_nothing(key, value)], TRAINER_IDLE, path
    )
    given = given_values(config)
    for why, idle in _idle(config).items():
        found = [key for key in idle if any(name == key or name.startswith(key + ".") for name in given)]
        if found:
            notice(f"{path}: no effect here: {', '.join(found)}: {why}")
    if config.training.weight_decay:
        notice(f"{path}: 'training.weight_decay' is {config.training.weight_decay:g}: norms and biases have none")
    if config.training.val_interval:
        notice(f"{path}: a validation takes --eval-iters global batches, 100 unless the flag follows the file")
    data, workers = data_section(config.data, path, validates=config.training.val_interval > 0)
    sections = {
        "mm_model": FileSection(path, "model", {**own, **_model(config, path)}),
        "mm_data": FileSection(path, "data", data),
        "fsdp2_config_path": FileSection(path, "parallel", _fsdp2(config.parallel, config.features)),
    }
    if config.tools:
        sections["mm_tool"] = FileSection(path, "tools", config.tools)
    return YamlRun(path, [*_flags(config), *workers], sections, TRAINER_NAMES)


def _without_variables(content: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The content without top-level keys that only define a value for other places of the file."""
    anchors, referred = top_level_anchors(path)
    known = {*TrainerConfig.model_fields, "inference"}
    return {key: value for key, value in content.items() if key in known or anchors.get(key) not in referred}


def _without_own_keys(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content without keys of `model` that a user's plugin may read, and these keys."""
    model = content.get("model")
    if not isinstance(model, Mapping) or not _has_own_plugin(content):
        return content, {}
    known = {path.split(".")[1] for path in PUBLISHED if path.startswith("model.")} | set(TrainerModel.model_fields)
    own = {key: value for key, value in model.items() if key not in known}
    return {**content, "model": {key: value for key, value in model.items() if key not in own}}, own


def _has_own_plugin(content: Mapping[str, Any]) -> bool:
    """Whether a file names a plugin of the user's own, which may bring any class and read any key of `model`."""
    training = content.get("training")
    named = training.get("plugin") if isinstance(training, Mapping) else None
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return any(not _is_built_in(str(name)) for name in names)


def _is_built_in(plugin: str) -> bool:
    return plugin.replace(".", "/").removeprefix("/").startswith(_BUILT_IN)


def _asks_for_nothing(key: str, value: object) -> bool:
    """Whether a key without effect is off, or says what is done anyway."""
    return value in (None, False, "", [], {}) or (key in AS_HERE and AS_HERE[key] == value)


def _contradictions(config: TrainerConfig, path: str) -> list[str]:
    training, features, parallel = config.training, config.features, config.parallel
    problems = []
    if training.train_iters is not None and training.train_epochs is not None:
        problems.append("'training.train_iters' and 'training.train_epochs' are both given; keep one of them")
    if training.lr_decay_ratio < 1 and training.train_epochs is not None:
        problems.append(
            f"'training.lr_decay_ratio' is {training.lr_decay_ratio:g}, a share of training.train_iters, which is "
            "absent; write train_iters in place of train_epochs, or 1"
        )
    if training.lr_warmup_ratio >= training.lr_decay_ratio:
        problems.append(
            f"'training.lr_warmup_ratio' is {training.lr_warmup_ratio:g} and 'training.lr_decay_ratio' "
            f"{training.lr_decay_ratio:g}; warmup must end before the decay does"
        )
    for switch, plan in (
        ("recompute", "recompute_plan"),
        ("enable_activation_offload", "activation_offload_plan"),
        ("enable_chunk_mbs", "chunkmbs_plan"),
    ):
        if getattr(features, switch) and not getattr(features, plan).apply_modules:
            problems.append(f"'features.{switch}' is true, and 'features.{plan}.apply_modules' names no modules")
    if features.enable_chunk_loss and features.enable_dynamic_chunk_loss:
        problems.append("'features.enable_chunk_loss' and 'features.enable_dynamic_chunk_loss' are both true; keep one")
    experts = parallel.ep_plan
    if parallel.expert_parallel_size > 1 and experts.apply_efsdp_modules not in ([], experts.apply_modules):
        problems.append(
            "'parallel.ep_plan.apply_efsdp_modules' is not the list of 'parallel.ep_plan.apply_modules'; what is "
            "sharded further are the experts that are split: write the same list in both"
        )
    if training.val_interval and training.val_micro_batch_size not in (None, training.micro_batch_size):
        problems.append(
            f"'training.val_micro_batch_size' is {training.val_micro_batch_size} and 'training.micro_batch_size' "
            f"{training.micro_batch_size}; validation has micro-batches of the same size: remove it"
        )
    problems += [*_scaling_problems(training), *_lora_problems(training.lora)]
    return [f"{path}: {problem}" for problem in problems]


def _lora_problems(lora: TrainerLora) -> list[str]:
    if not lora.enable:
        return []
    problems = []
    try:
        lora_init(lora.init_lora_weights)
    except ValueError as error:
        problems.append(f"'training.lora.init_lora_weights' is {show(lora.init_lora_weights)}; {error}")
    experts = [name for name in lora.target_modules if name.rpartition(".")[2] in _OF_EXPERTS]
    if not lora.disable_peft_moe_conversion and experts:
        problems.append(
            f"'training.lora.disable_peft_moe_conversion' is false, by which {', '.join(experts)} would mean the "
            "routed experts of some models; write true, and name experts behind the file: --lora-target-parameters "
            "mlp.experts.gate_up_proj mlp.experts.down_proj"
        )
    return problems


def _scaling_problems(training: TrainerTraining) -> list[str]:
    plan = training.lr_scaling_plan or []
    problems = [
        f"'training.lr_scaling_plan[{number}].match' is {show(item.match)}; expected a part of a parameter's name, as "
        "no expression is matched here"
        for number, item in enumerate(plan)
        if set(_part_of_name(item.match)) & set("*+?[](){}|^$\\")
    ]
    if len({item.scale for item in plan}) > 1:
        problems.append("'training.lr_scaling_plan' has several scales; there is one for all names here")
    return problems


def _part_of_name(match: str) -> str:
    return match.removeprefix("^").removeprefix(".*").removesuffix("$").removesuffix(".*").replace("\\.", ".")


def _idle(config: TrainerConfig) -> dict[str, list[str]]:
    """Reason → keys with a field that have no effect beside the file's other values."""
    parallel, features, training = config.parallel, config.features, config.training
    experts, tensor, muon = parallel.expert_parallel_size, parallel.tensor_parallel_size, training.optimizer == "muon"
    chunks = {"chunk_size": features.enable_chunk_loss, "total_chunk_size": features.enable_dynamic_chunk_loss}
    plans = {
        "recompute_plan": features.recompute,
        "activation_offload_plan": features.enable_activation_offload,
        "chunkmbs_plan": features.enable_chunk_mbs,
        **{f"chunkloss_plan.{key}": on for key, on in chunks.items()},
    }
    rows = ("val_micro_batch_size",) if not training.val_interval else ()
    return {
        "parallel.expert_parallel_size is 1": ["parallel.ep_plan", "parallel.expert_fully_shard_parallel_size"]
        if experts == 1
        else [],
        "parallel.tensor_parallel_size is 1": ["parallel.tp_plan"] if tensor == 1 else [],
        _PLAN_OFF: [f"features.{plan}" for plan, on in plans.items() if not on],
        "training.optimizer is not muon": [] if muon else [f"training.{key}" for key in MUON_FLAGS],
        "training.lora.enable is off": [] if training.lora.enable else [f"training.lora.{key}" for key in _OF_LORA],
        "training.val_interval is 0": [f"training.{key}" for key in rows],
    }


def _model(config: TrainerConfig, path: str) -> dict[str, Any]:
    """The content of model.json."""
    model, features = config.model, config.features
    content: dict[str, Any] = {
        "model_id": model.model_id,
        "init_from_hf_path": model.model_name_or_path,
        "attn_implementation": model.attn_implementation,
        "freeze": model.freeze,
        "loss_cfg": _loss(features, path),
    }
    own: list[str] = []
    built_in: list[str] = []
    for name in config.training.plugin:
        (built_in if _is_built_in(name) else own).append(name)
    if built_in:
        notice(f"{path}: 'training.plugin': {', '.join(built_in)}: families and data sets are built in")
    if own:
        content["plugin"] = [module for name in own for module in _modules_of(name)]
    return content


def _modules_of(plugin: str) -> list[str]:
    """The modules of a plugin, which may be a path or a folder, whose files are all imported."""
    folder = Path(plugin)
    files = sorted(folder.rglob("*.py")) if folder.is_dir() and not folder.is_absolute() else [folder]
    found = []
    for file in files:
        parts = [part for part in file.with_suffix("").parts if part not in ("", ".")] if file.suffix == ".py" else []
        name = ".".join(parts) if parts else str(file).strip("./").replace("/", ".")
        found.append(name.removesuffix(".__init__"))
    return found


def _loss(features: TrainerFeatures, path: str) -> dict[str, Any]:
    loss_type = features.loss_cfg.loss_type
    content: dict[str, Any] = {"loss_type": "default" if loss_type == "raw" else loss_type}
    if loss_type == "raw":
        notice(
            f"{path}: 'features.loss_cfg.loss_type' is raw, the model's own loss: a mean over each micro-batch's "
            "targets, as default is; per_token_loss doesn't depend on how rows are split"
        )
    else:
        content["router_aux_loss_coef"] = features.loss_cfg.router_aux_loss_coef
    if features.enable_chunk_loss:
        content |= {"compute_mode": "chunk", "chunk_size": features.chunkloss_plan.chunk_size or 1024}
    elif features.enable_dynamic_chunk_loss:
        content |= {"compute_mode": "dynamic_chunk", "chunk_size": features.chunkloss_plan.total_chunk_size}
    return content


def _fsdp2(parallel: TrainerParallel, features: TrainerFeatures) -> dict[str, Any]:
    """The content of fsdp2.yaml."""
    content: dict[str, Any] = {name: getattr(parallel.fsdp_plan, key) for key, name in FSDP_PLAN.items()}
    content["ignored_modules"] = parallel.fsdp_plan.ignored_modules or None
    content |= {"sharding_size": parallel.fully_shard_parallel_size, "ignore_missing_modules": True}
    if parallel.expert_parallel_size > 1:
        content["expert_parallel_size"] = parallel.expert_parallel_size
        content["ep_fsdp_size"] = parallel.expert_fully_shard_parallel_size
        content["moe_modules"] = parallel.ep_plan.apply_modules or None
    if parallel.tensor_parallel_size > 1:
        content["tp_colwise"] = parallel.tp_plan.colwise_parallel or None
        content["tp_rowwise"] = parallel.tp_plan.rowwise_parallel or None
    if features.recompute:
        content["recompute_modules"] = features.recompute_plan.apply_modules
        content["use_reentrant"] = features.recompute_plan.use_reentrant
    if features.enable_activation_offload:
        content["activation_offload_modules"] = features.activation_offload_plan.apply_modules
    if features.enable_chunk_mbs:
        content |= {name: getattr(features.chunkmbs_plan, key) for key, name in CHUNK_MBS.items()}
    return content


#: value of training.optimizer → of --optimizer
_OPTIMIZERS = {"adamw": "adam", "adamw_swap": "adam", "adamw8bit": "adam8bit"}


def _flags(config: TrainerConfig) -> Iterator[FlagValue]:
    """The flags, each with the key that gives its value."""
    training = config.training
    yield FlagValue("parallel", "use_torch_fsdp2", True)
    yield FlagValue("model.trust_remote_code", "trust_remote_code", config.model.trust_remote_code)
    yield from _sizes(config.parallel)
    for key, flag in TRAINING_FLAGS.items():
        if key == "save_interval" and training.save is None:
            continue
        yield FlagValue(f"training.{key}", flag, getattr(training, key))
    if training.train_epochs is not None:
        yield FlagValue("training.train_epochs", "train_epochs", training.train_epochs)
    else:
        yield FlagValue("training.train_iters", "train_iters", training.train_iters or _ITERS)
    yield FlagValue("training.optimizer", "optimizer", _OPTIMIZERS.get(training.optimizer, training.optimizer))
    yield FlagValue("training.optimizer", "swap_optimizer", training.optimizer == "adamw_swap")
    if training.optimizer == "muon":
        for key, flag in MUON_FLAGS.items():
            yield FlagValue(f"training.{key}", flag, getattr(training, key))
    yield from _lora(training.lora)
    yield from _schedule(training)
    if training.load_strict is not None:
        yield FlagValue("training.load_strict", "no_strict_load", not training.load_strict)
    if training.save_format == "hf":
        yield FlagValue("training.save_format", "save_hf", training.save_interval)
    if training.manual_gc_interval:
        yield FlagValue("training.manual_gc_interval", "manual_gc", True)
        yield FlagValue("training.manual_gc_interval", "manual_gc_interval", training.manual_gc_interval)


def _lora(lora: TrainerLora) -> Iterator[FlagValue]:
    if not lora.enable:
        return
    for key, flag in LORA_FLAGS.items():
        yield FlagValue(f"training.lora.{key}", flag, getattr(lora, key))
    yield FlagValue("training.lora.init_lora_weights", "lora_init", lora_init(lora.init_lora_weights))


def _sizes(parallel: TrainerParallel) -> Iterator[FlagValue]:
    ring, ulysses = parallel.ring_attention_size, parallel.ulysses_parallel_size
    yield FlagValue("parallel.data_parallel_size", "expected_data_parallel_size", parallel.data_parallel_size)
    yield FlagValue("parallel.tensor_parallel_size", "tensor_model_parallel_size", parallel.tensor_parallel_size)
    key = "parallel.ring_attention_size" if ring > 1 else "parallel.ulysses_parallel_size"
    yield FlagValue(key, "context_parallel_size", ring * ulysses)
    if ring > 1:
        both = ulysses > 1
        yield FlagValue(key, "context_parallel_algo", "hybrid_cp_algo" if both else "megatron_cp_algo")
        if both:
            yield FlagValue("parallel.ulysses_parallel_size", "ulysses_degree_in_cp", ulysses)


def _schedule(training: TrainerTraining) -> Iterator[FlagValue]:
    if training.lr_decay_ratio < 1:
        steps = int((training.train_iters or _ITERS) * training.lr_decay_ratio)
        yield FlagValue("training.lr_decay_ratio", "lr_decay_iters", max(1, steps))
    if training.lr_warmup_ratio:
        # the flag is a share of the decay's steps
        share = training.lr_warmup_ratio / training.lr_decay_ratio
        yield FlagValue("training.lr_warmup_ratio", "lr_warmup_fraction", share)
    if training.lr_scaling_plan:
        names = [_part_of_name(item.match) for item in training.lr_scaling_plan]
        yield FlagValue("training.lr_scaling_plan", "lr_scale_modules", names)
        yield FlagValue("training.lr_scaling_plan", "lr_mult", training.lr_scaling_plan[0].scale)


#: keys that only this dialect has
MARKS = frozenset(
    {
        "features.loss_cfg",
        "features.recompute_plan",
        "parallel.fsdp_plan",
        "parallel.fully_shard_parallel_size",
        "parallel.ulysses_parallel_size",
        "training.train_iters",
        "training.micro_batch_size",
        "training.plugin",
    }
)
DIALECT = Dialect(MARKS, SCRIPT, _read)
