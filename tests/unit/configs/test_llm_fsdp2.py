"""The YAML of train_fsdp2.py: what each key of it changes in the run, and which keys are refused or without effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.llm_config import LlmConfig
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.sections import key_paths
from mindspeed_mm.configs.yaml_run import in_words_of_the_file
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.utils.errors import ConfigError

LAYERS = ["model.layers.{*}"]
MINIMAL: dict[str, Any] = {
    "model": {"model_name_or_path": "hf"},
    "parallel": {"fsdp_modules": LAYERS},
    "data": {"dataset": "alpaca_full"},
    "training": {"output_dir": "out"},
}


@pytest.fixture
def folder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("hf", "other"):
        (run_folder / name).mkdir(exist_ok=True)
        (run_folder / name / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    (run_folder / "run.yaml").write_text(yaml.safe_dump(MINIMAL))
    monkeypatch.setenv("WORLD_SIZE", "8")
    return run_folder


def run_with(*words: str) -> Run:
    return describe(["run.yaml", *words], TRANSFORMERS)


def basic(run: Run) -> Any:
    return run.data.dataset_param.basic_parameters  # type: ignore[union-attr]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught, in_words_of_the_file(["run.yaml", *words]):
        run_with(*words)
    return str(caught.value)


MG = "data.data_manager_type=mg"
#: words after the file → what they make of the run, and what it is without them
CHANGES: dict[str, tuple[str, Any, Any]] = {
    "model.model_name_or_path=other": ("model.init_from_hf_path", "hf", "other"),
    "model.model_id=qwen3_moe": ("model.model_id", None, "qwen3_moe"),
    "model.plugin=json": ("model.plugin", [], ["json"]),
    "model.tokenizer_name_or_path=other": ("preprocess.model_name_or_path", "hf", "other"),
    "model.init_model_with_meta_device=true": ("parallel.init_model_with_meta_device", False, True),
    "model.train_from_scratch=true": ("model.ignore_weights", False, True),
    "model.trust_remote_code=true": ("trust_remote_code", False, True),
    "model.use_fast_tokenizer=false": ("preprocess.use_fast_tokenizer", True, False),
    "model.split_special_tokens=true": ("preprocess.split_special_tokens", False, True),
    "parallel.fsdp_size=8": ("dims.dp_shard", 1, 8),
    "parallel.fsdp_modules=[lm_head]": ("fsdp2.sub_modules_to_wrap", LAYERS, ["lm_head"]),
    "parallel.ignored_modules=[lm_head]": ("fsdp2.ignored_modules", None, ["lm_head"]),
    "parallel.reshard_after_forward=false": ("fsdp2.reshard_after_forward", True, False),
    "parallel.tp_size=2": ("dims.tp", 1, 2),
    "parallel.tp_size=2 parallel.tp_colwise=['*.q_proj', lm_head]": (
        "fsdp2.tp_colwise",
        None,
        ["model.layers.{*}.self_attn.q_proj", "lm_head"],
    ),
    "parallel.tp_size=2 parallel.tp_rowwise=['*.down_proj']": (
        "fsdp2.tp_rowwise",
        None,
        ["model.layers.{*}.mlp.down_proj"],
    ),
    "parallel.ep_size=2": ("dims.ep", 1, 2),
    "parallel.ep_size=2 parallel.ep_modules=['model.layers.{0}.mlp.experts']": (
        "fsdp2.moe_modules",
        None,
        ["model.layers.{0}.mlp.experts"],
    ),
    "parallel.ep_size=2 parallel.ep_fsdp_size=4": ("dims.ep_shard", 1, 4),
    "parallel.ep_size=2 parallel.ep_fsdp_size=4 parallel.ep_fsdp_modules=[]": ("dims.expert_copies", 8, 4),
    "parallel.recompute=true": ("fsdp2.recompute_modules", None, LAYERS),
    "parallel.recompute=true parallel.recompute_modules=[lm_head]": ("fsdp2.recompute_modules", None, ["lm_head"]),
    "parallel.cp_size=2": ("dims.ulysses", 1, 2),
    "parallel.cp_size=2 parallel.cp_type=ring": ("dims.ring", 1, 2),
    "parallel.param_dtype=fp16": ("precision.fp16", False, True),
    "parallel.param_dtype=fp32": ("precision.bf16", True, False),
    "training.use_fused_rmsnorm=true": ("kernels.use_fused_rmsnorm", False, True),
    "training.use_fused_rotary_pos_emb=true": ("kernels.use_fused_rotary_pos_emb", False, True),
    "parallel.reduce_dtype=bf16": ("fsdp2.reduce_dtype", "fp32", "bf16"),
    "parallel.num_to_forward_prefetch=2": ("fsdp2.num_to_forward_prefetch", 1, 2),
    "parallel.num_to_backward_prefetch=3": ("fsdp2.num_to_backward_prefetch", 1, 3),
    "data.dataset=a, b": ("basic.dataset", ["alpaca_full"], ["a", "b"]),
    "data.dataset={file_name: rows.json, formatting: alpaca}": (
        "basic.dataset",
        ["alpaca_full"],
        [{"file_name": "rows.json", "formatting": "alpaca"}],
    ),
    "data.eval_dataset=a, b": ("basic.val_dataset", None, ["a", "b"]),
    "data.val_size=0.25": ("basic.val_rate", None, 0.25),
    "data.val_size=3": ("basic.val_size", None, 3),
    "data.dataset_dir=rows": ("basic.dataset_dir", "./configs/fsdp2/data", "rows"),
    "data.template=qwen3": ("basic.template", None, "qwen3"),
    "data.cutoff_len=64": ("batch.seq_length", 2048, 64),
    "data.train_on_prompt=true": ("basic.train_on_prompt", False, True),
    "data.mask_history=true": ("basic.mask_history", False, True),
    "data.streaming=true training.max_steps=3": ("basic.streaming", False, True),
    "data.streaming=true data.buffer_size=5": ("basic.buffer_size", 16384, 5),
    "data.mix_strategy=interleave_over": ("basic.mix_strategy", "concat", "interleave_over"),
    "data.interleave_probs='0.25, 0.75'": ("basic.interleave_probs", None, [0.25, 0.75]),
    "data.max_samples=7": ("basic.max_samples", None, 7),
    "data.tokenized_path=tokens": ("basic.cache_dir", None, "tokens"),
    "data.tokenized_path=tokens data.overwrite_cache=true": ("basic.overwrite_cache", False, True),
    "data.tokenized_path=tokens data.preprocessing_num_workers=2": ("basic.preprocessing_num_workers", None, 2),
    "data.packing=true": ("batch.packs", False, True),
    "data.neat_packing=true": ("batch.packs", False, True),
    "data.packing=true training.num_train_epochs=1": ("basic.cache_dir", None, "out/tokens"),
    "data.data_manager_type=mg": ("data.dataset_param.dataset_type", "huggingface", "corpus"),
    f"{MG} data.split='90,5,5'": ("corpus.split", None, [90.0, 5.0, 5.0]),
    f"{MG} data.append_eod=true": ("corpus.append_eod", None, True),
    f"{MG} data.append_eod=true data.reset_attention_mask=true": ("batch.packs", False, True),
    f"{MG} data.append_eod=true data.reset_attention_mask=true data.reset_position_ids=true": (
        "corpus.reset_position_ids",
        None,
        True,
    ),
    f"{MG} data.create_attention_mask_in_dataloader=true": ("corpus.create_attention_mask_in_dataloader", None, True),
    f"{MG} data.no_shared_storage=true": ("corpus.no_shared_storage", None, True),
    f"{MG} data.max_samples=7": ("basic.max_samples", None, 7),
    f"{MG} data.overwrite_cache=true": ("basic.overwrite_cache", False, True),
    f"{MG} data.preprocessing_num_workers=2": ("basic.preprocessing_num_workers", None, 2),
    f"{MG} data.tokenized_path=index": ("basic.cache_dir", None, "index"),
    f"{MG} training.num_train_epochs=1": ("basic.cache_dir", None, "out/tokens"),
    "data.default_system=hello": ("basic.default_system", None, "hello"),
    "data.enable_thinking=false": ("basic.enable_thinking", True, False),
    "training.output_dir=o": ("checkpoint.save", "out", "o"),
    "training.stage=pt": ("basic.stage", "sft", "pt"),
    "training.per_device_train_batch_size=2": ("batch.micro_batch_size", 1, 2),
    "training.gradient_accumulation_steps=3": ("batch.num_microbatches", 1, 3),
    "training.lr=2e-3": ("optimizer.lr", 1e-5, 2e-3),
    "training.weight_decay=0.1": ("optimizer.weight_decay", 0.01, 0.1),
    "training.adam_beta1=0.8": ("optimizer.adam_beta1", 0.9, 0.8),
    "training.adam_beta2=0.9": ("optimizer.adam_beta2", 0.95, 0.9),
    "training.adam_epsilon=1e-6": ("optimizer.adam_eps", 1e-8, 1e-6),
    "training.max_grad_norm=0.5": ("optimizer.clip_grad", 1.0, 0.5),
    "training.lr_scheduler_type=linear": ("schedule.lr_decay_style", "cosine", "linear"),
    "training.lr_scheduler_type=constant": ("schedule.min_lr", 1e-6, 0.0),
    "training.warmup_ratio=0.1": ("schedule.lr_warmup_fraction", None, 0.1),
    "training.min_lr=1e-7": ("schedule.min_lr", 1e-6, 1e-7),
    "training.lr=1e-8": ("schedule.min_lr", 1e-6, 1e-8),
    "training.num_train_epochs=0.5": ("length.train_epochs", 3.0, 0.5),
    "training.max_steps=9": ("length.train_iters", None, 9),
    "training.max_steps=-1 training.num_train_epochs=4": ("length.train_epochs", 3.0, 4.0),
    "training.disable_shuffling=1": ("data.dataloader_param.shuffle", True, False),
    "training.seed=7": ("process.seed", 42, 7),
    "training.save_steps=20": ("checkpoint.save_interval", 500, 20),
    "training.save_steps=-1": ("checkpoint.save_interval", 500, None),
    "training.save_epochs=2": ("checkpoint.save_epochs", 1, 2),
    "data.streaming=true training.max_steps=5": ("checkpoint.save_epochs", 1, None),
    "data.packing=true training.max_steps=5": ("checkpoint.save_epochs", 1, None),
    "training.save_total_limit=None": ("checkpoint.save_total_limit", 3, None),
    "data.val_size=2 training.save_best=loss": ("checkpoint.save_best", None, "loss"),
    "data.val_size=2 training.eval_generate=wer": ("logging.eval_generate", None, "wer"),
    "data.val_size=2 training.eval_generate=wer training.eval_generate_language=zh": (
        "logging.eval_generate_language",
        None,
        "zh",
    ),
    "data.val_size=2 training.eval_generate=wer training.eval_generate_rows=9": ("logging.eval_generate_rows", 64, 9),
    "data.val_size=2 training.eval_generate=wer training.eval_generate_batch_size=3": (
        "logging.eval_generate_batch_size",
        8,
        3,
    ),
    "data.val_size=2 training.eval_generate=wer training.eval_max_new_tokens=9": (
        "logging.eval_max_new_tokens",
        128,
        9,
    ),
    "data.val_size=2 training.early_stop=2": ("length.early_stop", None, 2),
    "training.save_only_model=true": ("checkpoint.no_save_optim", False, True),
    "training.save_async=true": ("checkpoint.async_save", False, True),
    "training.save_hf_weights=false": ("checkpoint.save_hf", 0, None),
    "training.resume_from_checkpoint=other": ("checkpoint.load", None, "other"),
    "training.logging_steps=5": ("logging.log_interval", 1, 5),
    "training.log_format=short": ("logging.log_format", "auto", "short"),
    "training.report_to=[wandb,tensorboard]": ("trackers.report_to", (), ("wandb", "tensorboard")),
    "training.report_to=wandb training.run_project=p": ("trackers.run_project", None, "p"),
    "training.report_to=wandb training.run_name=n": ("trackers.run_name", None, "n"),
    "training.report_to=wandb training.run_tags=[a,b]": ("trackers.run_tags", (), ("a", "b")),
    "training.calculate_per_token_loss=true": ("model.loss_cfg.loss_type", "default", "per_token_loss"),
    "training.dataloader_num_workers=3": ("batch.num_workers", 0, 3),
    "training.dataloader_num_workers=3 training.dataloader_prefetch_factor=4": (
        "data.dataloader_param.prefetch_factor",
        None,
        4,
    ),
    "training.dataloader_pin_memory=false": ("data.dataloader_param.pin_memory", True, False),
    "training.dataloader_num_workers=3 training.dataloader_persistent_workers=true": (
        "data.dataloader_param.persistent_workers",
        False,
        True,
    ),
    "training.dataloader_drop_last=true": ("data.dataloader_param.drop_last", False, True),
    "training.profile=true": ("tools.profile.enable", False, True),
    "training.profile=true training.profile_step_start=2": ("static.start_step", 10, 2),
    "training.profile=true training.profile_step_end=4": ("static.end_step", 11, 4),
    "training.profile=true training.profile_step_end=-1": ("static.end_step", 11, 2**31 - 1),
    "training.profile=true training.profile_ranks=[1]": ("tools.profile.ranks", [0, 1, 2, 3], [1]),
    "training.profile=true training.profile_level=level2": ("static.level", "level1", "level2"),
    "training.profile=true training.profile_data_simplification=true": ("static.data_simplification", False, True),
    "training.profile=true training.profile_with_cpu=false": ("static.with_cpu", True, False),
    "training.profile=true training.profile_with_stack=true": ("static.with_stack", False, True),
    "training.profile=true training.profile_with_memory=true": ("static.with_memory", False, True),
    "training.profile=true training.profile_record_shapes=true": ("static.record_shapes", False, True),
    "training.profile=true training.profile_save_path=p": ("static.save_path", "./npu_profiling", "p"),
    "training.chunk_loss_size=32": ("model.loss_cfg.effective_chunk_size", 1024, 32),
}
REFUSED = {
    "model.resize_vocab=true": "the vocabulary doesn't grow here",
    "model.add_tokens='<a>, <b>'": "'<a>, <b>'; the vocabulary doesn't grow here",
    "model.add_special_tokens='<a>'": "the vocabulary doesn't grow here",
    "model.new_special_tokens_config=t.json": "the vocabulary doesn't grow here",
    "model.quant_recipe_name=mxfp8": "there is no such recipe",
    "data.tool_format=qwen": "'data.tool_format' is 'qwen'; tool calls are written as the chat template writes them",
    "data.data_manager_type=mg training.disable_shuffling=true": "a corpus is shuffled by training.seed",
    "training.fix_router=true": "train another model",
    "training.save_best=los": "'training.save_best' is 'los'; expected one of loss, exact_match",
    "training.save_best=loss": "'dataset_param.basic_parameters' has no val_dataset, val_rate or val_size",
    "training.optimizer=lion": "'training.optimizer' is 'lion'; expected one of adamw, muon",
}
IDLE = {
    "model.cache_dir=c": "nothing is fetched",
    "model.model_revision=v2": "nothing is fetched",
    "model.init_special_tokens=desc_init": "no tokens are added",
    "model.quant_apply_modules=[a]": "quant_recipe_name is null",
    "model.quant_ignored_modules=[a]": "quant_recipe_name is null",
    "parallel.shard_placement_fn=a": "FSDP2 chooses the dimension",
    "parallel.efsdp_shard_placement_fn=shard_by_dim_1": "FSDP2 chooses the dimension",
    "parallel.ep_dispatcher=fused": "which computes the same",
    "parallel.ep_fsdp_size=2": "parallel.ep_size is 1",
    "parallel.tp_colwise=[a]": "parallel.tp_size is 1",
    "parallel.tp_rowwise=[a]": "parallel.tp_size is 1",
    "parallel.recompute_modules=[a]": "parallel.recompute is false",
    "parallel.cp_type=ring": "parallel.cp_size is 1",
    "data.preprocessing_batch_size=10": "one by one",
    "data.overwrite_cache=true": "data.tokenized_path names a folder",
    "data.preprocessing_num_workers=1": "data.tokenized_path names a folder",
    "data.buffer_size=10": "data.streaming is false",
    "data.packing=true": "never see each other",
    "data.split='90,5,5'": "data_manager_type: mg",
    "data.append_eod=true": "data_manager_type: mg",
    "data.reset_position_ids=true": "data_manager_type: mg",
    "data.reset_attention_mask=true": "data_manager_type: mg",
    "data.create_attention_mask_in_dataloader=true": "data_manager_type: mg",
    "data.no_shared_storage=true": "data_manager_type: mg",
    **{
        f"{MG} data.{word}": "documents, which have no turns"
        for word in (
            "template=gpt",
            "train_on_prompt=true",
            "mask_history=true",
            "default_system=a",
            "enable_thinking=0",
        )
    },
    "data.ignore_pad_token_for_loss=false": "padding is never a target",
    "training.lr_scheduler_type=linear training.min_lr=0": "only lr_scheduler_type: cosine",
    "training.max_steps=4 training.num_train_epochs=2": "training.max_steps is the length",
    "training.profile_level=level1": "training.profile is false",
    "training.profile=true training.profile_export_type=db": "traces are text",
    "training.use_flash_attn=true": "chooses the attention kernel",
    "training.moe_grouped_gemm=true": "transformers' own",
    "training.dataloader_prefetch_factor=2": "training.dataloader_num_workers is 0",
    "inference.infer_backend=huggingface": "this script trains",
    "inference.max_new_tokens=3": "this script trains",
    "inference.do_sample=true": "this script trains",
}


def words_of(text: str) -> list[str]:
    """The words of a row; a value may hold spaces."""
    parts = text.split(" ")
    words: list[str] = []
    for part in parts:
        if "=" in part and "." in part.split("=")[0]:
            words.append(part)
        else:
            words[-1] += " " + part
    return words


def found(run: Run, path: str) -> Any:
    starts = {
        "basic": basic(run),
        "preprocess": run.data.dataset_param.preprocess_parameters,  # type: ignore[union-attr]
        "corpus": run.data.dataset_param.corpus,  # type: ignore[union-attr]
        "static": run.tools.profile.static_param,
    }
    first, *rest = path.split(".")
    value = starts[first] if first in starts else getattr(run, first)
    for name in rest:
        value = getattr(value, name) if value is not None else None
    return value


def test_each_key_is_in_a_table() -> None:
    named = {word.partition("=")[0] for row in (*CHANGES, *REFUSED, *IDLE) for word in words_of(row)}
    every = {path for path in key_paths(LlmConfig) if "." in path}
    assert every - named == set() and named - every == set()


def test_what_each_key_changes(folder: Path) -> None:
    before = run_with()
    wrong = {}
    for words, (path, was, becomes) in CHANGES.items():
        values = (found(before, path), found(run_with(*words_of(words)), path))
        if values != (was, becomes):
            wrong[words] = values
    assert wrong == {}


def test_what_is_refused(folder: Path) -> None:
    for words, sentence in REFUSED.items():
        assert sentence in refusal(*words_of(words)), words


def test_what_has_no_effect_is_said(folder: Path, said: list[str]) -> None:
    run_with()
    assert said == []
    for words, sentence in IDLE.items():
        said.clear()
        run_with(*words_of(words))
        key = words_of(words)[-1].partition("=")[0]
        assert any(key in line and sentence in line for line in said), (words, said)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("training.learning_rate=1", "unknown key 'training.learning_rate'"),
        ("training.logging_step=1", "did you mean 'logging_steps'"),
        ("training.fsdp_size=1", "'fsdp_size' belongs at 'parallel.fsdp_size'"),
        ("trainin.lr=1", "unknown key 'trainin' (value {'lr': 1}); did you mean 'training'"),
        ("training.lr=fast", "'training.lr' is 'fast'; expected a number"),
        ("training.output_dir=null", "'training.output_dir' is null; expected text"),
        ("parallel.fsdp_modules=[]", "'parallel.fsdp_modules' is []; expected a list of module paths"),
        ("parallel.fsdp_size=3", "sharding_size is 'parallel.fsdp_size'"),
        ("training.min_lr=1", "'min_lr' 1 is greater than 'lr' 1e-05"),
        ("data.train_on_prompt=true data.mask_history=true", "'train_on_prompt' and 'mask_history' are both true"),
        ("data.eval_dataset=a data.val_size=2", "'eval_dataset' and 'val_size' 2 are both given"),
        ("data.val_size=1.5", "'data.val_size' is 1.5; expected a number of rows, or a share"),
        ("data.streaming=true data.val_size=2", "'val_size' needs the number of rows"),
        (f"{MG} data.split=90,5,4", "corpus.split is 'data.split'"),
        (f"{MG} data.split=90,5,4", "the shares add up to 99; expected 100"),
        (f"{MG} data.split=[100]", "expected three shares"),
        (f"{MG} data.split=0,100,0", "no document is left to train on"),
        (f"{MG} data.reset_position_ids=true", "set both, or neither"),
        (f"{MG} data.reset_attention_mask=true", "set 'append_eod' to true"),
        (f"{MG} data.streaming=true", "a corpus is indexed before training; set it to false"),
        (f"{MG} data.neat_packing=true", "rows of a corpus are full by themselves"),
        (f"{MG} data.val_size=0.5", "documents for validation are the second share of corpus.split"),
        (f"{MG} data.eval_dataset=a", "val_dataset is 'data.eval_dataset'"),
        (f"{MG} data.mix_strategy=interleave_over", "come one after the other, and are shuffled; write concat"),
        ("parallel.tp_size=2 parallel.tp_colwise=['*.wi']", "write the path, such as model.layers.{*}.self_attn.wi"),
        ("parallel.ep_size=2 parallel.ep_fsdp_modules=[lm_head]", "'parallel.ep_fsdp_modules' names 'lm_head'"),
        ("training.per_device_train_batch_size=3 --global-batch-size=20", "'training.per_device_train_batch_size'"),
        ("model.model_name_or_path=hff", "init_from_hf_path is 'model.model_name_or_path'"),
        ("training.resume_from_checkpoint=outt", "run.yaml: 'training.resume_from_checkpoint': "),
    ],
)
def test_faults_are_in_the_words_of_the_file(folder: Path, words: str, sentence: str) -> None:
    assert sentence in refusal(*words.split(" "))


def test_missing_sections_and_keys(folder: Path) -> None:
    for section, key in {"model": "model_name_or_path", "parallel": "fsdp_modules", "training": "output_dir"}.items():
        (folder / "run.yaml").write_text(yaml.safe_dump({**MINIMAL, section: {}}))
        assert f"run.yaml: key '{section}.{key}' is missing: " in refusal()
    (folder / "run.yaml").write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != "data"}))
    assert "run.yaml: key 'data' is missing: on what" in refusal()


def test_a_key_of_another_dialect_is_an_unknown_one(folder: Path) -> None:
    training = {**MINIMAL["training"], "micro_batch_size": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump({**MINIMAL, "training": training}))
    assert "run.yaml: unknown key 'training.micro_batch_size'" in refusal()


def test_flags_after_the_file_go_before(folder: Path) -> None:
    run = run_with("training.lr=1e-4", "--lr", "2e-4", "--train-iters", "4", "--bf16", "false")
    assert (run.optimizer.lr, run.length.train_iters, run.length.train_epochs) == (2e-4, 4, None)
    assert run.precision.bf16 is False


def test_none_is_null(folder: Path) -> None:
    run = run_with("model.tokenizer_name_or_path=None", "data.template=None", "parallel.ignored_modules=None")
    assert run.data is not None and basic(run).template is None and run.fsdp2 is not None
    assert run.fsdp2.ignored_modules is None


def test_plain_text_without_columns(folder: Path) -> None:
    run = run_with("training.stage=pt", "data.dataset={file_name: a.parquet}")
    assert basic(run).dataset == [{"file_name": "a.parquet", "pretrain": True}]
    entry = "{file_name: a.json, columns: {prompt: body}}"
    assert basic(run_with("training.stage=pt", f"data.dataset={entry}")).dataset[0]["columns"] == {"prompt": "body"}
