"""The multimodal YAML file: every key is seen in the Run, or answered by a notice or a refusal with its reason."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.sections import key_paths
from mindspeed_mm.configs.trainer_config import TrainerConfig
from mindspeed_mm.configs.trainer_keys import AS_HERE, PUBLISHED, TRAINER_NAMES, TRAINER_REFUSED
from mindspeed_mm.configs.yaml_run import YamlRun, in_words_of_the_file, split_yaml
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import forget_notices

#: of a small model with experts
CONFIG = {
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
    },
    "vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32, "out_hidden_size": 32},
}
LAYERS = "model.language_model.layers.{*}"
RUN = """\
parallel: {fsdp_plan: {param_dtype: bf16}}
model: {model_name_or_path: &HF hf}
data:
  dataset_param:
    dataset_type: huggingface
    basic_parameters: {dataset: rows.json, cutoff_len: 64}
    preprocess_parameters: {model_name_or_path: *HF}
  dataloader_param: {dataloader_mode: sampler}
features: {loss_cfg: {loss_type: per_token_loss}}
training: {train_iters: 100, save: out}
"""


class Seen(NamedTuple):
    """A value of a key, and what it changes.

    Attributes:
        value: other than the default.
        run: attribute of the Run → its value then.
        beside: other keys that it needs.
    """

    value: Any
    run: Mapping[str, Any]
    beside: Mapping[str, Any] = {}


def flag(path: str, value: Any, seen: Any = None) -> Seen:
    return Seen(value, {path: value if seen is None else seen})


def fsdp2(value: Any, key: str, seen: Any = None, **beside: Any) -> Seen:
    names = {name.replace("__", "."): other for name, other in beside.items()}
    return Seen(value, {f"fsdp2.{key}": value if seen is None else seen}, names)


def lora(value: Any, attribute: str, seen: Any = None) -> Seen:
    return Seen(value, {f"lora.{attribute}": value if seen is None else seen}, ADAPTERS)


ADAPTERS = {"training.lora.enable": True}
EP2 = {"parallel.expert_parallel_size": 2}
TP2 = {"parallel.tensor_parallel_size": 2}
RECOMPUTED = {"features.recompute": True}
CHUNKED_MBS = {"features.enable_chunk_mbs": True}
ON_LAYERS = {"features.recompute_plan.apply_modules": [LAYERS]}
CHUNKS_OF_LAYERS = {**CHUNKED_MBS, "features.chunkmbs_plan.apply_modules": [LAYERS]}
MUON = {"training.optimizer": "muon"}
HELD_OUT = {"dataset_type": "huggingface", "basic_parameters": {"dataset": "held_out.json"}}
VALIDATION = {"training.val_interval": 7, "data.val_dataset_param": HELD_OUT, "training.save": "elsewhere"}
SPEECH = {**VALIDATION, "training.eval_generate": "wer"}
ANSWERS = {**VALIDATION, "training.eval_generate": "anls"}
ONE_SCALE = [{"match": "visual.*", "scale": 0.1}, {"match": "lm_head", "scale": 0.1}]

SEEN: dict[str, Seen] = {
    "parallel.data_parallel_size": Seen(8, {}),
    "parallel.fully_shard_parallel_size": fsdp2(4, "sharding_size"),
    "parallel.fsdp_plan.apply_modules": fsdp2([LAYERS], "sub_modules_to_wrap"),
    "parallel.fsdp_plan.ignored_modules": fsdp2(["model.visual"], "ignored_modules"),
    "parallel.fsdp_plan.param_dtype": fsdp2("fp32", "param_dtype"),
    "parallel.fsdp_plan.reduce_dtype": fsdp2("bf16", "reduce_dtype"),
    "parallel.fsdp_plan.output_dtype": fsdp2("fp32", "output_dtype"),
    "parallel.fsdp_plan.cast_forward_inputs": fsdp2(False, "cast_forward_inputs"),
    "parallel.fsdp_plan.reshard_after_forward": fsdp2(False, "reshard_after_forward"),
    "parallel.fsdp_plan.num_to_forward_prefetch": fsdp2(3, "num_to_forward_prefetch"),
    "parallel.fsdp_plan.num_to_backward_prefetch": fsdp2(3, "num_to_backward_prefetch"),
    "parallel.fsdp_plan.cpu_offload": fsdp2(True, "offload_to_cpu"),
    "parallel.tensor_parallel_size": flag("dims.tp", 2),
    "parallel.tp_plan.colwise_parallel": Seen([f"{LAYERS}.q"], {"fsdp2.tp_colwise": [f"{LAYERS}.q"]}, TP2),
    "parallel.tp_plan.rowwise_parallel": Seen([f"{LAYERS}.o"], {"fsdp2.tp_rowwise": [f"{LAYERS}.o"]}, TP2),
    "parallel.ring_attention_size": Seen(2, {"dims.ring": 2, "dims.ulysses": 1}),
    "parallel.ulysses_parallel_size": Seen(2, {"dims.ring": 2, "dims.ulysses": 2}, {"parallel.ring_attention_size": 2}),
    "parallel.expert_parallel_size": Seen(2, {"dims.ep": 2, "dims.ep_shard": 4}),
    "parallel.expert_fully_shard_parallel_size": Seen(2, {"dims.ep_shard": 2}, EP2),
    "parallel.ep_plan.apply_modules": Seen([f"{LAYERS}.e"], {"fsdp2.moe_modules": [f"{LAYERS}.e"]}, EP2),
    "parallel.ep_plan.apply_efsdp_modules": Seen([], {}, EP2),
    "model.model_id": flag("model.model_id", "qwen3_vl_moe"),
    "model.model_name_or_path": flag("model.init_from_hf_path", "./hf"),
    "model.trust_remote_code": flag("trust_remote_code", True),
    "model.attn_implementation": flag("model.attn_implementation", "eager"),
    "model.freeze": flag("model.freeze", ["model.visual"]),
    "features.recompute": Seen(True, {"fsdp2.recompute_modules": [LAYERS], "fsdp2.use_reentrant": False}, ON_LAYERS),
    "features.recompute_plan.apply_modules": Seen([LAYERS], {"fsdp2.recompute_modules": [LAYERS]}, RECOMPUTED),
    "features.recompute_plan.use_reentrant": Seen(
        True, {"fsdp2.use_reentrant": True}, {**RECOMPUTED, "features.recompute_plan.apply_modules": [LAYERS]}
    ),
    "features.loss_cfg.loss_type": flag("model.loss_cfg.loss_type", "raw", "default"),
    "features.loss_cfg.router_aux_loss_coef": flag("model.loss_cfg.router_aux_loss_coef", 0.5),
    "features.enable_chunk_loss": flag("model.loss_cfg.compute_mode", True, "chunk"),
    "features.enable_dynamic_chunk_loss": flag("model.loss_cfg.compute_mode", True, "dynamic_chunk"),
    "features.chunkloss_plan.chunk_size": Seen(
        7, {"model.loss_cfg.chunk_size": 7}, {"features.enable_chunk_loss": True}
    ),
    "features.chunkloss_plan.total_chunk_size": Seen(
        7, {"model.loss_cfg.chunk_size": 7}, {"features.enable_dynamic_chunk_loss": True}
    ),
    "features.enable_activation_offload": Seen(
        True,
        {"fsdp2.activation_offload_modules": [LAYERS]},
        {"features.activation_offload_plan.apply_modules": [LAYERS]},
    ),
    "features.activation_offload_plan.apply_modules": Seen(
        [LAYERS], {"fsdp2.activation_offload_modules": [LAYERS]}, {"features.enable_activation_offload": True}
    ),
    "features.enable_chunk_mbs": Seen(
        True, {"fsdp2.chunk_mbs_modules": [LAYERS]}, {"features.chunkmbs_plan.apply_modules": [LAYERS]}
    ),
    "features.chunkmbs_plan.apply_modules": Seen([LAYERS], {"fsdp2.chunk_mbs_modules": [LAYERS]}, CHUNKED_MBS),
    "features.chunkmbs_plan.chunk_mbs": Seen(2, {"fsdp2.chunk_mbs_size": 2}, CHUNKS_OF_LAYERS),
    "features.chunkmbs_plan.batch_dim": Seen(1, {"fsdp2.chunk_mbs_batch_dim": 1}, CHUNKS_OF_LAYERS),
    "features.chunkmbs_plan.chunk_arg_indexs": Seen([1], {"fsdp2.chunk_mbs_args": [1]}, CHUNKS_OF_LAYERS),
    "features.chunkmbs_plan.chunk_kwarg_names": Seen(["a"], {"fsdp2.chunk_mbs_kwargs": ["a"]}, CHUNKS_OF_LAYERS),
    "training.micro_batch_size": Seen(3, {"batch.micro_batch_size": 3, "batch.global_batch_size": 24}),
    "training.gradient_accumulation_steps": Seen(3, {"batch.num_microbatches": 3, "batch.global_batch_size": 24}),
    "training.train_iters": flag("length.train_iters", 7),
    "training.train_epochs": Seen(
        2, {"length.train_epochs": 2, "length.train_iters": None}, {"training.train_iters": None}
    ),
    "training.seed": flag("process.seed", 7),
    "training.use_deter_comp": flag("process.deterministic_mode", True),
    "training.allow_hf32": flag("precision.allow_tf32", True),
    "training.lr": flag("optimizer.lr", 0.1),
    "training.lr_min": flag("schedule.min_lr", 1e-9),
    "training.lr_start": flag("schedule.lr_warmup_init", 1e-9),
    "training.lr_decay_style": flag("schedule.lr_decay_style", "cosine"),
    "training.lr_decay_ratio": flag("schedule.lr_decay_iters", 0.5, 50),
    "training.lr_warmup_ratio": Seen(
        0.1, {"schedule.lr_warmup_fraction": 0.2, "schedule.lr_decay_iters": 50}, {"training.lr_decay_ratio": 0.5}
    ),
    "training.lr_scaling_plan": Seen(
        ONE_SCALE, {"optimizer.lr_scale_modules": ("visual", "lm_head"), "optimizer.lr_mult": 0.1}
    ),
    "training.optimizer": Seen("adamw_swap", {"optimizer.optimizer": "adam", "optimizer.swap_optimizer": True}),
    "training.weight_decay": flag("optimizer.weight_decay", 0.1),
    "training.adam_beta1": flag("optimizer.adam_beta1", 0.1),
    "training.adam_beta2": flag("optimizer.adam_beta2", 0.1),
    "training.adam_eps": flag("optimizer.adam_eps", 0.1),
    "training.muon_momentum": Seen(0.5, {"optimizer.muon_momentum": 0.5}, MUON),
    "training.ns_steps": Seen(3, {"optimizer.ns_steps": 3}, MUON),
    "training.matched_adamw_rms": Seen(0.5, {"optimizer.matched_adamw_rms": 0.5}, MUON),
    "training.clip_grad": flag("optimizer.clip_grad", 0.0),
    "training.init_model_with_meta_device": flag("parallel.init_model_with_meta_device", True),
    "training.load": flag("checkpoint.load", "hf"),
    "training.load_strict": flag("checkpoint.no_strict_load", False, True),
    "training.no_load_optim": flag("checkpoint.no_load_optim", True),
    "training.no_load_rng": flag("checkpoint.no_load_rng", True),
    "training.save": flag("checkpoint.save", "elsewhere"),
    "training.save_interval": flag("checkpoint.save_interval", 7),
    "training.save_format": Seen("hf", {"checkpoint.save_hf": 7}, {"training.save_interval": 7}),
    "training.save_async": flag("checkpoint.async_save", True),
    "training.no_save_optim": flag("checkpoint.no_save_optim", True),
    "training.no_save_rng": flag("checkpoint.no_save_rng", True),
    "training.log_interval": flag("logging.log_interval", 7),
    "training.log_format": flag("logging.log_format", "short"),
    "training.report_to": flag("trackers.report_to", "wandb", ("wandb",)),
    "training.run_project": Seen("p", {"trackers.run_project": "p"}, {"training.report_to": ["wandb"]}),
    "training.run_name": Seen("n", {"trackers.run_name": "n"}, {"training.report_to": ["wandb"]}),
    "training.run_tags": Seen(["a", "b"], {"trackers.run_tags": ("a", "b")}, {"training.report_to": ["wandb"]}),
    "training.val_interval": flag("logging.eval_interval", 7),
    "training.val_micro_batch_size": Seen(1, {}, {"training.val_interval": 7}),  # another is a mistake, below
    "training.save_best": Seen("eval_loss", {"checkpoint.save_best": "loss"}, VALIDATION),
    "training.early_stop": Seen(7, {"length.early_stop": 7}, VALIDATION),
    "training.eval_generate": Seen("eval_wer", {"logging.eval_generate": "wer"}, VALIDATION),
    "training.eval_generate_language": Seen("en", {"logging.eval_generate_language": "en"}, SPEECH),
    "training.eval_generate_rows": Seen(7, {"logging.eval_generate_rows": 7}, ANSWERS),
    "training.eval_generate_batch_size": Seen(7, {"logging.eval_generate_batch_size": 7}, ANSWERS),
    "training.eval_max_new_tokens": Seen(7, {"logging.eval_max_new_tokens": 7}, ANSWERS),
    "training.manual_gc_interval": Seen(7, {"process.manual_gc": True, "process.manual_gc_interval": 7}),
    "training.lora.enable": Seen(True, {"lora.target_modules": ("q_proj", "k_proj", "v_proj")}),
    "training.lora.rank": lora(4, "r"),
    "training.lora.alpha": lora(4, "alpha"),
    "training.lora.target_modules": lora("q_proj, o_proj", "target_modules", ("q_proj", "o_proj")),
    "training.lora.dropout": lora(0.5, "dropout"),
    "training.lora.init_lora_weights": lora("gaussian", "init"),
    "training.lora.pretrained_lora_path": lora("hf", "start"),
    "training.lora.disable_peft_moe_conversion": Seen(False, {}, ADAPTERS),
    "training.plugin": flag("model.plugin", ["my/families"], ["my.families", "my.families.one"]),
    "data.dataset_param": flag("data.dataset_param.basic_parameters.cutoff_len", "{...}", 64),
    "data.val_dataset_param": Seen(
        {"dataset_type": "huggingface", "basic_parameters": {"dataset": "held_out.json", "max_samples": 5}},
        {
            "data.dataset_param.basic_parameters.val_dataset": ["held_out.json"],
            "data.dataset_param.basic_parameters.val_max_samples": 5,
        },
        {"training.val_interval": 7},
    ),
    "data.dataloader_param": flag("data.dataloader_param.drop_last", {"drop_last": False}, False),
    "tools": flag("tools.memory_profile.enable", {"memory_profile": {"enable": True}}, True),
}


@pytest.fixture
def run_yaml(run_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Path:
    (run_folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (run_folder / "my" / "families").mkdir(parents=True)
    for name in ("__init__", "one"):
        (run_folder / "my" / "families" / f"{name}.py").write_text("")
    (run_folder / "run.yaml").write_text(RUN)
    monkeypatch.setenv("WORLD_SIZE", "8")
    forget_notices()
    return run_folder / "run.yaml"


def described(values: Mapping[str, Any]) -> Run:
    words = ["run.yaml", *(f"{key}={json.dumps(value)}" for key, value in values.items() if value != "{...}")]
    with in_words_of_the_file(words):
        return describe(words, TRANSFORMERS)


@functools.cache
def described_once(values: str) -> Run:
    """The same in every test's folder."""
    return described(json.loads(values))


def look(run: Run, path: str) -> Any:
    found: Any = run
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found


def leaves() -> list[str]:
    """The keys of the file that hold values, and not further keys."""
    paths = key_paths(TrainerConfig)
    return [path for path in paths if not any(other.startswith(path + ".") for other in paths)]


def test_every_key_with_a_field_has_a_row() -> None:
    assert set(SEEN) == set(leaves())


@pytest.mark.parametrize("key", SEEN)
def test_a_key_is_seen_in_the_run(run_yaml: Path, key: str) -> None:
    row = SEEN[key]
    run = described({**row.beside, key: row.value})
    assert {path: look(run, path) for path in row.run} == row.run
    if row.run and key != "data.dataset_param":
        try:
            without = described_once(json.dumps(row.beside))
        except ConfigError as error:
            assert f"'{key}' names no modules" in str(error)  # a switch without its plan
        else:
            assert {path: look(without, path) for path in row.run} != row.run


#: key that is refused → a value that is
REFUSED_VALUES: dict[str, Any] = {
    "parallel.context_parallel_size": 2,
    "parallel.expert_data_parallel_size": 2,
    "parallel.tp_plan.sequence_parallel": [LAYERS],
    "parallel.recompute": True,
    "model.recompute": True,
    "model.enable_chunk_loss": True,
    "model.enable_activation_offload": True,
    "model.loss_cfg.loss_type": "default",
    "model.loss_cfg.router_aux_loss_coef": 0.1,
    "model.mtp_num_layers": 1,
    "model.dtype": "bf16",
    "model.models": {"a": 1},
    "training.no_decay_modules": ["norm"],
    "training.no_decay_params": ["bias"],
    "training.enable_full_determinism": True,
    "training.ckpt_manager": "bytecheckpoint",
    "training.load_checkpoint_path": "hf",
    "training.save_steps": 5,
    "training.max_steps": 5,
    "training.profile.enable": True,
    "training.save_ckpt_dtype": "bf16",
    "training.quantization_plan.recipe_name": "mxfp8",
    "training.quantization_plan.quant_converters": ["quantize.linear.mx"],
}


def read(*words: str) -> YamlRun:
    run, _ = split_yaml(["run.yaml", *words])
    assert run is not None
    return run


def test_refused_keys(run_yaml: Path) -> None:
    assert set(REFUSED_VALUES) == {rule.path for rule in TRAINER_REFUSED} <= PUBLISHED
    with pytest.raises(ConfigError) as caught:
        read(*(f"{key}={json.dumps(value)}" for key, value in REFUSED_VALUES.items()))
    lines = str(caught.value).splitlines()
    for line, rule in zip(lines, TRAINER_REFUSED, strict=True):
        assert line.startswith(f"run.yaml: '{rule.path}' is ") and line.endswith(f"; {rule.sentence}")


def test_every_other_published_key_has_a_notice(run_yaml: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys without a field, with a value that isn't refused; each reason is logged once."""
    harmless = {"model.dtype": "fp32", "training.ckpt_manager": "dcp", "training.save_ckpt_dtype": "fp32"}
    idle = {key: harmless.get(key, "x") for key in sorted(PUBLISHED) if key not in REFUSED_VALUES or key in harmless}
    assert AS_HERE.keys() <= PUBLISHED and AS_HERE.keys() - idle.keys() <= REFUSED_VALUES.keys()
    read(*(f"{key}={json.dumps(value)}" for key, value in idle.items()), "inference.seed=3")
    said = [record.getMessage() for record in caplog.records]
    for key in [*idle, "inference"]:
        assert len([line for line in said if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", line)]) == 1, key


def test_what_is_done_anyway_has_no_notice(run_yaml: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(*(f"{key}={json.dumps(value)}" for key, value in AS_HERE.items()))
    assert not caplog.records
    read("training.weight_decay=0.1")
    assert "norms and biases have none" in caplog.text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["training.train_epochs=2"], "'training.train_iters' and 'training.train_epochs' are both given"),
        (["training.lr_warmup_ratio=0.6", "training.lr_decay_ratio=0.5"], "warmup must end before the decay does"),
        (
            ["training.train_iters=null", "training.train_epochs=2", "training.lr_decay_ratio=0.5"],
            "write train_iters in place of train_epochs",
        ),
        (["features.recompute=true"], "'features.recompute_plan.apply_modules' names no modules"),
        (["features.enable_chunk_mbs=true"], "'features.chunkmbs_plan.apply_modules' names no modules"),
        (["features.enable_activation_offload=true"], "'features.activation_offload_plan.apply_modules' names no"),
        (["features.enable_chunk_loss=true", "features.enable_dynamic_chunk_loss=true"], "are both true; keep one"),
        (
            ["parallel.expert_parallel_size=2", "parallel.ep_plan.apply_efsdp_modules=[a]"],
            "'parallel.ep_plan.apply_efsdp_modules' is not the list of",
        ),
        (["training.val_interval=5", "training.val_micro_batch_size=2"], "micro-batches of the same size"),
        (["training.lr_scaling_plan=[{match: 'layers.[0-3]', scale: 0.1}]"], "a part of a parameter's name"),
        (["training.lr_scaling_plan=[{match: a, scale: 0.1}, {match: b}]"], "has several scales"),
        (
            ["training.val_interval=5", "data.val_dataset_param={basic_parameters: {dataset: a, cutoff_len: 65}}"],
            "'data.val_dataset_param.basic_parameters.cutoff_len' is 65 and 'data.dataset_param.basic_parameters",
        ),
        *(
            (
                [f"training.lora={{enable: true, init_lora_weights: {value}}}"],
                f"'training.lora.init_lora_weights' is {part}",
            )
            for value, part in (
                ("pissa_niter_4", "'pissa_niter_4'; adapters that begin as parts of the base model's weights"),
                (
                    "loftq",
                    "'loftq'; adapters that begin as parts of the base model's weights are not there; expected true",
                ),
                (
                    "gausian",
                    "'gausian'; expected true (kaiming), gaussian, or false (random, not the base model at first)",
                ),
                ("3", "3; expected true"),
            )
        ),
        (
            ["training.lora={enable: true, disable_peft_moe_conversion: false, target_modules: [q_proj, up_proj]}"],
            "'training.lora.disable_peft_moe_conversion' is false, by which up_proj would mean the routed experts",
        ),
        (["training.lrr=1"], "unknown key 'training.lrr' (value 1); did you mean 'lr'?"),
        (["parallel.fsdp_plan.apply_module=[a]"], "unknown key 'parallel.fsdp_plan.apply_module'"),
        (["model.gdn_implementatio=x"], "did you mean 'gdn_implementation' or"),
        (["featurs.recompute=true"], "unknown key 'featurs'"),
        (["training.lr=fast"], "'training.lr' is 'fast'; expected a number"),
        (["training.lr_decay_style=wsd"], "expected one of constant, linear, cosine"),
        (["model.model_id=kimi_k3"], "'model.model_id' is 'kimi_k3'; transformers has no class of Kimi-K3"),
    ],
)
def test_mistakes(run_yaml: Path, words: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert part in str(caught.value) and str(caught.value).startswith("run.yaml: ")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"training.lr_min": 1}, ["--min-lr 1 is greater than --lr 5e-05", "--min-lr is 'training.lr_min'"]),
        ({"parallel.data_parallel_size": 4}, ["--expected-data-parallel-size is 4", "give 8", "data_parallel_size'"]),
        ({"parallel.fully_shard_parallel_size": 3}, ["sharding_size is 'parallel.fully_shard_parallel_size'"]),
        ({"parallel.expert_parallel_size": 3}, ["expert_parallel_size is 'parallel.expert_parallel_size'"]),
        ({"model.freeze": "model.visual"}, ["'model.freeze' is 'model.visual'; expected a list"]),
    ],
)
def test_rules_speak_of_the_keys_of_the_file(run_yaml: Path, values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        described(values)
    for part in parts:
        assert part in str(caught.value)


def test_defaults_are_those_of_the_file(run_yaml: Path) -> None:
    """Where they differ from those of flags and fsdp2.yaml."""
    run = described({})
    assert (run.batch.micro_batch_size, run.batch.global_batch_size, run.process.seed) == (1, 8, 42)
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.schedule.lr_decay_style) == (5e-5, 0.0, "constant")
    assert (run.logging.log_interval, run.logging.eval_interval, run.checkpoint.save_interval) == (1, 0, 1)
    assert run.fsdp2 is not None and run.uses_fsdp2
    assert (run.fsdp2.sharding_size, run.fsdp2.num_to_backward_prefetch, run.fsdp2.sub_modules_to_wrap) == (
        "auto",
        0,
        None,
    )
    assert run.fsdp2.ignore_missing_modules is True
    assert described({"training.train_iters": None}).length.train_iters == 10_000


@pytest.mark.parametrize(
    ("value", "init"),
    [(True, "kaiming"), (False, "random"), ("true", "kaiming"), ("False", "random"), ("kaiming", "kaiming")],
)
def test_words_of_first_adapters(run_yaml: Path, value: object, init: str) -> None:
    run = described({"training.lora.enable": True, "training.lora.init_lora_weights": value})
    assert run.lora is not None and run.lora.init == init
    assert (run.lora.r, run.lora.alpha, run.lora.dropout, run.lora.start) == (8, 16, 0.0, None)


def test_adapters_that_are_off_say_so(run_yaml: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = described({"training.lora.rank": 4, "training.lora.init_lora_weights": "pissa"})
    assert run.lora is None
    assert "training.lora.rank, training.lora.init_lora_weights: training.lora.enable is off" in caplog.text


def test_plugins_of_the_published_system_are_built_in(run_yaml: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = described({"training.plugin": ["mindspeed_mm/fsdp/models/qwen3vl", "mine.one"], "model.width": 3})
    assert run.model is not None and list(run.model.plugin) == ["mine.one"]
    assert run.files.model.width == 3  # a key of the plugin's model
    assert (
        read("training.plugin=[mine.one]", "model.model_id=kimi_k3").sections["mm_model"].content["model_id"]
        == "kimi_k3"
    )
    assert "mindspeed_mm/fsdp/models/qwen3vl: families and data sets are built in" in caplog.text


def test_top_level_keys_that_define_values(run_yaml: Path) -> None:
    run_yaml.write_text("rows: &ROWS rows.json\n" + RUN.replace("dataset: rows.json", "dataset: *ROWS"))
    assert described({}).files.data.dataset_param.basic_parameters.dataset == "rows.json"


def test_names_are_keys_of_the_file() -> None:
    known = {
        *leaves(),
        *PUBLISHED,
        "data.dataloader_param.num_workers",
        "data.val_dataset_param.basic_parameters.dataset",
    }
    assert {part for key in TRAINER_NAMES.values() for part in key.split(" × ")} <= known


def test_an_anchor_may_be_defined_again(run_yaml: Path) -> None:
    """YAML's own rule: an alias means the last value before it."""
    run_yaml.write_text(RUN.replace("dataset: rows.json", "dataset: &HF ./hf"))
    assert described({}).files.data.dataset_param.preprocess_parameters.model_name_or_path == "./hf"
