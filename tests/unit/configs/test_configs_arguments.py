"""Flags: what a launch command may hold, what comes of it, and what is said about mistakes."""

from __future__ import annotations

import ast
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.arguments import parse_args, validate_args
from mindspeed_mm.configs.config import mm_extra_args_provider
from mindspeed_mm.configs.flags import GROUPS, parsed
from mindspeed_mm.configs.flags.parser import build_parser
from mindspeed_mm.configs.flags.spec import BACKENDS, BackendName, Flag, all_flags
from mindspeed_mm.utils.errors import ConfigError

MINIMAL = "--mm-model model.json --mm-data data.json --micro-batch-size 4 --lr 1e-3 --train-iters 10 --use-torch-fsdp2"

QUICKSTART = """
--use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml --ckpt-format torch_dcp --untie-embeddings-and-output-weights
--micro-batch-size 4 --global-batch-size 32 --seq-length 512 --train-iters 300 --lr 1.5e-3 --lr-decay-style cosine
--lr-warmup-fraction 0.1 --min-lr 1e-5 --weight-decay 0.01 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
--num-workers 1 --seed 42 --log-interval 1 --save-interval 100 --eval-interval 100 --eval-iters 5
--save runs/quickstart --save-hf --mm-data data.json --mm-model model.json --mm-tool tools.json
--distributed-backend nccl
"""

# Flag and values as the published launch scripts write them; shell variables replaced by numbers.
PUBLISHED = """
--adam-beta1 0.9 | --adam-beta2 0.95 | --adam-eps 1e-15 | --attention-mask-type general | --bf16 | --ckpt-format torch
--ckpt-format torch_dist | --clip-grad 0.0 | --context-parallel-algo ulysses_cp_algo | --context-parallel-size 1
--data-dir x | --data-path x | --distributed-backend nccl | --distributed-timeout-minutes 1000 | --downcast-to-bf16
--eval-interval 10000 | --eval-iters 5000 | --finetune | --fsdp2-config-path fsdp2.yaml | --global-batch-size 8
--init-model-with-meta-device | --layerzero | --layerzero-config x.yaml | --load ckpt | --log-interval 1 | --log-tps
--log_tps | --lora-alpha 16 | --lora-dropout 0 | --lora-r 8 | --lora-register-forward-hook patch_embedding
--lora-target-modules ffn.2 q_proj | --lr 1.0e-5 | --lr-decay-style constant | --lr-warmup-fraction 0.1
--lr-warmup-init 0 | --lr-warmup-iters 0 | --make-vocab-size-divisible-by 1 | --micro-batch-size 1 | --min-lr 1e-7
--no-gradient-accumulation-fusion | --no-initialization | --no-load-optim | --no-load-rng
--no-masked-softmax-fusion | --no-save-optim | --no-save-rng | --no-shuffle | --normalization RMSNorm
--num-workers 8 | --optimization-level 2 | --optimizer-selection fused_torch_adamw | --overlap-grad-reduce
--overlap-param-gather | --pipeline-model-parallel-size 1 | --recompute-granularity full | --recompute-method block
--recompute-num-layers 12 | --recompute-num-layers-skip-core-attention 7 | --recompute-skip-core-attention
--save out | --save-interval 10000 | --seed 1234 | --seq-length 1024 | --sequence-parallel | --swiglu
--tensor-model-parallel-size 1 | --tokenizer-type NullTokenizer | --train-iters 5000
--untie-embeddings-and-output-weights | --use-cpu-initialization | --use-distributed-optimizer | --use-flash-attn
--use-fused-rmsnorm | --use-fused-swiglu | --use-mcore-models | --use-multiparameter-pipeline-model-parallel
--use-torch-fsdp2 | --variable-seq-lengths | --virtual-pipeline-model-parallel-size 1 | --vocab-size 152064
--warmup-ratio 0 | --weight-decay 1e-2 | --expert-model-parallel-size 8 | --moe_grouped_gemm | --moe-permute-fusion
--moe-token-dispatcher-type alltoall | --jit-compile | --allow-tf32 | --data_balance_sorting_algo x
--lora-apply-modules all | --dpo-beta 0.1 | --ref-model x | --stage ray_grpo | --use-txt-dynamic-batching
--max-seq-len 2048 | --matched-adamw-rms .2 | --ns-steps 5 | --simulated-nnodes 2 | --hetero-parallel | --dist-train
--swap-attention | --auto-parallel-mm | --calculate-per-sample-loss | --npu-deterministic | --tensorboard-dir tb
"""


def parse(extra: str = "", base: str = MINIMAL, **keywords: Any) -> Namespace:
    return parse_args(f"{base} {extra}".split(), **keywords)


def words_for(item: Flag) -> list[str]:
    """A flag as one would write it, with a value that isn't its default."""
    spelling = item.spelling
    if item.kind is bool:
        return [spelling]
    if item.choices:
        return [spelling, str(next(choice for choice in item.choices if choice != item.default))]
    if item.kind is str:
        return [spelling, "x"]
    return [spelling, "0.5" if item.below is not None and item.below <= 3 else "3"]


def test_quickstart_command_is_typed(run_folder: Path) -> None:
    args = parse(base=QUICKSTART)
    assert (args.micro_batch_size, args.global_batch_size, args.seq_length, args.train_iters) == (4, 32, 512, 300)
    assert (args.lr, args.min_lr, args.adam_beta2, args.lr_warmup_fraction) == (1.5e-3, 1e-5, 0.95, 0.1)
    assert args.use_torch_fsdp2 is True and args.bf16 is False
    assert args.save_hf == 0 and args.save == "runs/quickstart" and args.load is None
    assert (args.params_dtype, args.rank, args.world_size, args.local_rank) == ("fp32", 0, 1, 0)


def test_defaults_are_megatrons(run_folder: Path) -> None:
    args = parse()
    assert (args.seed, args.weight_decay, args.adam_beta2, args.clip_grad) == (1234, 0.01, 0.999, 1.0)
    assert (args.num_workers, args.lr_decay_style, args.distributed_timeout_minutes) == (2, "linear", 10)
    assert (args.optimizer, args.optimizer_selection, args.ckpt_format) == ("adam", "fused_torch_adamw", "torch_dcp")
    assert args.save_hf is None and args.manual_gc_eval and args.check_for_nan_in_loss_and_grad
    assert args.lr_scale_modules == [] and args.exit_signal_handler


def test_a_list_default_is_not_shared_between_parses(run_folder: Path) -> None:
    parse().lr_scale_modules.append("x")
    assert parse().lr_scale_modules == []


@pytest.mark.parametrize(
    "words, name, value",
    [
        ("--adam_eps 1e-6", "adam_eps", 1e-6),
        ("--adam-eps=1e-6", "adam_eps", 1e-6),
        ("--adam_eps=1E-6", "adam_eps", 1e-6),
        ("--optimizer adamw", "optimizer", "adam"),
        ("--save-hf 50", "save_hf", 50),
        ("--eval-interval None", "eval_interval", None),
        ("--no-manual-gc-eval", "manual_gc_eval", False),
        ("--no-manual-gc-eval false", "manual_gc_eval", True),
        ("--manual-gc-eval false", "manual_gc_eval", False),
        ("--bf16 False", "bf16", False),
        ("--bf16 true", "params_dtype", "bf16"),
        ("--fp16", "params_dtype", "fp16"),
        ("--deterministic-mode", "use_deter_comp", True),
        ("--lr-scale-modules vision merger", "lr_scale_modules", ["vision", "merger"]),
        ("--lr-scale-modules a --lr-scale-modules b", "lr_scale_modules", ["a", "b"]),
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
        ("--lr 1 --lr 2", "lr", 2.0),
    ],
)
def test_ways_to_write_a_flag(run_folder: Path, words: str, name: str, value: object) -> None:
    assert getattr(parse(words), name) == value


def test_published_flags_all_parse(run_folder: Path) -> None:
    parser = build_parser(GROUPS)
    from mindspeed_mm.configs.flags.parser import spell_as_declared, unknown_flags

    for entry in PUBLISHED.replace("\n", " | ").split("|"):
        words = spell_as_declared(parser, entry.split())
        assert unknown_flags(parser, words) == []
        assert parser.parse_known_args(words)[1] == []


def on_backend(backend: BackendName) -> list[str]:
    """The minimal words of a launch on a backend."""
    return [*MINIMAL.split(), "--use-torch-fsdp2", "true" if backend == "fsdp2" else "false"]


@pytest.mark.parametrize(
    "item, backend", [(i, r) for i in all_flags(GROUPS) for r in i.no_effect], ids=lambda x: getattr(x, "name", x)
)
def test_a_flag_without_effect_is_said_exactly_once(
    run_folder: Path, said: list[str], item: Flag, backend: BackendName
) -> None:
    for _ in range(2):
        parse_args([*on_backend(backend), *words_for(item), *words_for(item)], backends=BACKENDS)
    assert said == [f"{item.spelling} has no effect here: {item.no_effect[backend]}"]


@pytest.mark.parametrize(
    "item, backend", [(i, r) for i in all_flags(GROUPS) for r in i.refused], ids=lambda x: getattr(x, "name", x)
)
def test_a_flag_that_cannot_be_neglected_is_refused(run_folder: Path, item: Flag, backend: BackendName) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args([*on_backend(backend), *words_for(item)], backends=BACKENDS)
    assert item.spelling in str(caught.value) and item.refused[backend] in str(caught.value)


def test_a_script_for_one_backend_has_that_backends_rules(run_folder: Path, said: list[str]) -> None:
    """Without --use-torch-fsdp2 it will be refused, and nothing is said about the backend that it can't take."""
    words = [*MINIMAL.split(), "--use-torch-fsdp2", "false", "--optimizer-selection", "fused_adamw"]
    assert parse_args(words).backends == ("fsdp2",) and said == []
    assert parse_args(words, backends=BACKENDS).backends == BACKENDS and len(said) == 1


MEGATRON_BACKEND_FLAGS = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2
--sequence-parallel --variable-seq-lengths --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--recompute-granularity full --recompute-method block --recompute-num-layers 3 --recompute-activations --bf16
--accumulate-allreduce-grads-in-fp32 --clip-grad 1.0
"""


def test_the_megatron_backends_flags_are_honoured_there_without_a_word(run_folder: Path, said: list[str]) -> None:
    args = parse_args([*on_backend("ptd"), *MEGATRON_BACKEND_FLAGS.split()], backends=BACKENDS)
    assert said == []
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    assert (*sizes, args.virtual_pipeline_model_parallel_size, args.recompute_num_layers) == (2, 2, 2, 3)
    for name in ("sequence_parallel", "variable_seq_lengths", "use_distributed_optimizer", "overlap_grad_reduce"):
        assert getattr(args, name) is True
    assert args.accumulate_allreduce_grads_in_fp32 is True and args.overlap_param_gather is True
    assert (args.recompute_granularity, args.recompute_method) == ("full", "block")


def test_the_other_backends_file_may_be_missing(run_folder: Path, said: list[str]) -> None:
    parse_args([*on_backend("ptd"), "--fsdp2-config-path", "gone.yaml"], backends=BACKENDS)
    assert len(said) == 1 and said[0].startswith("--fsdp2-config-path has no effect here")


def test_virtual_stages_come_from_the_environment_too(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VP_SIZE", "2")
    name, flag = "virtual_pipeline_model_parallel_size", ["--virtual-pipeline-model-parallel-size"]
    assert getattr(parse_args(on_backend("ptd"), backends=BACKENDS), name) == 2
    assert getattr(parse_args([*on_backend("ptd"), *flag, "2"], backends=BACKENDS), name) == 2
    assert getattr(parse_args(on_backend("fsdp2"), backends=BACKENDS), name) is None
    with pytest.raises(ConfigError, match=r"size is 3 and the variable VP_SIZE is 2; keep one"):
        parse_args([*on_backend("ptd"), *flag, "3"], backends=BACKENDS)
    for word in ("two", "0"):
        monkeypatch.setenv("VP_SIZE", word)
        with pytest.raises(ConfigError, match=rf"VP_SIZE is '{word}'; expected a whole number from 1 on"):
            parse_args(on_backend("ptd"), backends=BACKENDS)


def test_honoured_flags_say_nothing(run_folder: Path, said: list[str]) -> None:
    parse(base=QUICKSTART.replace("--untie-embeddings-and-output-weights", ""))
    parse("--bf16 --manual-gc --use-deter-comp --init-model-with-meta-device --tensor-model-parallel-size 1")
    assert said == []


def test_a_switch_that_is_off_asks_for_nothing(run_folder: Path, said: list[str]) -> None:
    parse("--use-flash-attn False --use-txt-dynamic-batching false --warmup-ratio 0")
    assert said == []


@pytest.mark.parametrize(
    "words, parts",
    [
        ("--lerning-rate 1", ["unknown flag '--lerning-rate'", "'--lr'"]),
        ("--max-grad-norm 1", ["unknown flag '--max-grad-norm'", "'--clip-grad'"]),
        ("--micro-batch 1", ["unknown flag '--micro-batch'", "'--micro-batch-size'"]),  # no abbreviations
        ("--nproc_per_node 2", ["'--nproc_per_node'", "torchrun"]),
        ("-lr 1", ["'-lr'", "two dashes", "'--lr'"]),
        ("--bf16 maybe", ["stray word 'maybe'", "--bf16"]),
        ("--lr 1e-5x", ["--lr", "'1e-5x'", "a number"]),
        ("--lr nan", ["--lr", "'nan'", "a number"]),
        ("--micro-batch-size 1.5", ["--micro-batch-size", "'1.5'", "a whole number"]),
        ("--micro-batch-size 0", ["--micro-batch-size", "'0'", "at least 1"]),
        ("--adam-beta2 1.0", ["--adam-beta2", "'1.0'", "less than 1"]),
        ("--lr-decay-style cosin", ["--lr-decay-style", "'cosin'", "'cosine'", "WSD"]),
        ("--train-iters", ["--train-iters", "expected a value"]),
        ("--clip-grad 1.0 2.0", ["stray word '2.0'", "'1.0'"]),
        ("run.yaml", ["'run.yaml'", "YAML"]),  # after a switch, which doesn't take it
        ("--bf16=maybe", ["--bf16", "'maybe'", "true or false"]),
        ("--train-epochs 2", ["--train-iters 10 and --train-epochs 2.0", "keep one"]),
        ("--mm-model modle.json", ["--mm-model", "modle.json does not exist", "'model.json'"]),
        ("--fsdp2-config-path conf/fsdp2.yaml", ["--fsdp2-config-path", "conf/fsdp2.yaml", "there is no"]),
        ("--mm-data hf", ["--mm-data hf is a folder", "expected a file"]),
        ("--save model.json", ["--save model.json is a file", "expected a folder"]),
        ("--load model.json", ["--load model.json is a file", "expected a folder"]),
    ],
)
def test_mistakes_are_sentences(run_folder: Path, words: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    for part in parts:
        assert part in str(caught.value)


def test_all_unknown_flags_are_told_together(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--sead") as caught:
        parse("--sead 1 --log-intervall 3")
    assert "'--seed'" in str(caught.value) and "'--log-interval'" in str(caught.value)


def test_all_missing_flags_are_named(run_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(["--seed", "1"])
    for name in ("--mm-model", "--mm-data", "--micro-batch-size", "--lr", "--train-iters, --train-epochs"):
        assert name in str(caught.value)


def test_a_script_of_ones_own_needs_fewer_flags(run_folder: Path) -> None:
    args = parse("--lr 1 --micro-batch-size 1", "--train-iters 1", required=("lr", "micro_batch_size"))
    assert args.mm_model is None


def test_empty_load_means_none_and_a_wrong_one_is_an_error(run_folder: Path) -> None:
    assert parse_args([*MINIMAL.split(), "--load", ""]).load is None
    with pytest.raises(ConfigError, match="/no/such/dir does not exist: there is no '/no'"):
        parse("--load /no/such/dir")


def test_extra_args_provider_and_defaults(run_folder: Path, said: list[str]) -> None:
    def provider(parser: ArgumentParser) -> ArgumentParser:
        group = mm_extra_args_provider(parser).add_argument_group("mine")
        group.add_argument("--my-depth", type=int, default=7)
        group.add_argument("--my-switch", action="store_true")
        group.add_argument("--seed", type=str, default="many")
        return parser

    words = [*MINIMAL.split(), "--my_depth", "3"]
    args = parse_args(words, provider, {"log_interval": 5, "lr": 9.0, "tokenizer_type": "NullTokenizer", "lrr": 1})
    assert (args.my_depth, args.my_switch, args.seed) == (3, False, "many")  # the script's own --seed replaces ours
    assert (args.log_interval, args.lr, args.mm_model, args.tokenizer_type) == (5, 1e-3, "model.json", "NullTokenizer")
    assert args.lrr == 1 and len(said) == 1 and "'lrr'" in said[0] and "'lr'" in said[0]
    with pytest.raises(ConfigError, match=r"--my-dept.*'--my-depth'"):
        parse_args([*MINIMAL.split(), "--my-dept", "3"], provider)


def test_a_flag_that_the_script_redefines_is_the_scripts_own(run_folder: Path, said: list[str]) -> None:
    def provider(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--swiglu", action="store_true")
        parser.add_argument("--lora-r", type=int, default=4)
        return parser

    args = parse_args([*MINIMAL.split(), "--swiglu"], provider)
    assert (args.swiglu, args.lora_r) == (True, 4) and said == []


def test_environment_gives_ranks(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    args = parse()
    assert (args.rank, args.world_size, args.local_rank) == (3, 4, 1)
    assert parse("--local-rank 0").local_rank == 0


def test_help_names_every_group(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    page = capsys.readouterr().out
    assert caught.value.code == 0 and "--lr-wsd-decay-style" in page and "Seed, determinism" in page


def test_names_and_spellings_are_unique() -> None:
    flags = list(all_flags(GROUPS))
    spellings = [spelling for item in flags for spelling in (*item.spellings, *item.off_spellings)]
    assert len({item.name for item in flags}) == len(flags) and len(set(spellings)) == len(spellings)


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = (
        "import sys, mindspeed_mm.configs.arguments, mindspeed_mm.configs.config, mindspeed_mm.configs.fsdp2_config;"
        "heavy = {'torch', 'transformers', 'megatron.core', 'numpy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["--use-torch-fsdp2", ""])
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--attention-dropout 0.1", "attention_dropout of its config.json"),
        ("--hidden-dropout 0.1", "attention_dropout of its config.json"),
        ("--moe-aux-loss-coeff 1e-3", "loss_cfg.router_aux_loss_coef"),
    ],
)
def test_numbers_that_only_a_script_of_ones_own_may_read(flag: str, words: str, backend: str) -> None:
    line = MINIMAL.replace("--use-torch-fsdp2", backend)
    command = ["--mm-model", __file__, "--mm-data", __file__, *line.split()[4:], *flag.split()]
    with pytest.raises(ConfigError, match=f"{flag.split()[0]} .*{words}"):
        parse_args(command, backends=BACKENDS)
    name, value = flag.split()[0].removeprefix("--").replace("-", "_"), float(flag.split()[1])
    assert getattr(parse_args(command, backends=BACKENDS, own_model=True), name) == value
    assert getattr(parse_args([*command[:-1], "0"], backends=BACKENDS), name) == 0


def test_a_type_checker_knows_every_attribute_of_the_parsed_flags(run_folder: Path) -> None:
    """It sees `ParsedFlags` inherit from all groups, and finds the attributes that come with them declared."""
    classes = [
        node for node in ast.walk(ast.parse(Path(parsed.__file__).read_text())) if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: [ast.unparse(base) for base in node.bases] for node in classes}
    assert bases["_Flags"] == [f"flags.{group.__name__}" for group in GROUPS]
    args = parse()
    validate_args(args, world_size=2)
    flags = {item.name for item in all_flags(GROUPS)}
    assert vars(args).keys() == flags | parsed.ParsedFlags.__annotations__.keys() - {"mm"}
    assert type(args) is parsed.ParsedFlags
