"""How flags fit together, and what follows from them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_mm.configs.arguments import parse_args, resolve_train_iters, validate_args
from mindspeed_mm.utils.errors import ConfigError
from tests.support.runs import run_of_args

MINIMAL = "--mm-model model.json --mm-data data.json --micro-batch-size 4 --lr 1e-3 --use-torch-fsdp2"
QUANTIZED = "--train-iters 9 --lora-target-modules q_proj --lora-quantize nf4"


def validated(extra: str = "--train-iters 10", world_size: int = 2) -> Namespace:
    args = parse_args(f"{MINIMAL} {extra}".split())
    validate_args(args, world_size)
    return args


def test_what_follows(run_folder: Path) -> None:
    args = validated("--train-iters 10 --global-batch-size 32")
    assert (args.world_size, args.data_parallel_size, args.num_microbatches) == (2, 2, 4)
    assert (args.lr_decay_iters, args.consumed_train_samples) == (10, 0)
    assert (args.start_weight_decay, args.end_weight_decay) == (0.01, 0.01)


def test_global_batch_size_defaults_to_one_micro_batch_a_rank(run_folder: Path) -> None:
    args = validated(world_size=3)
    assert (args.global_batch_size, args.num_microbatches) == (12, 1)


@pytest.mark.parametrize("words", ["", "--context-parallel-size 2", "--global-batch-size {rows}"])
def test_global_batch_size_follows_from_gradient_accumulation_steps(run_folder: Path, words: str) -> None:
    ranks = 3 if "context" in words else 6
    words = f"--train-iters 10 --gradient-accumulation-steps 5 {words.format(rows=4 * 5 * ranks)}"
    args = validated(words, world_size=6)
    assert (args.data_parallel_size, args.global_batch_size, args.num_microbatches) == (ranks, 4 * 5 * ranks, 5)


def test_consumed_samples_of_a_loaded_run_are_kept(run_folder: Path) -> None:
    args = parse_args(f"{MINIMAL} --train-iters 10".split())
    args.consumed_train_samples = 40
    validate_args(args, 1)
    assert args.consumed_train_samples == 40


@pytest.mark.parametrize(
    "words, parts",
    [
        ("--train-iters 9 --global-batch-size 30", ["--global-batch-size 30", "8", "2 data-parallel", "24 or 32"]),
        ("--train-iters 9 --global-batch-size 3", ["nearest valid: 8"]),
        (
            "--train-iters 9 --global-batch-size 16 --gradient-accumulation-steps 3",
            ["--global-batch-size 16 and --gradient-accumulation-steps 3", "makes 24 rows", "keep one of the two"],
        ),
        ("--train-iters 9 --pipeline-model-parallel-size 2", ["--pipeline-model-parallel-size 2", "pipeline"]),
        ("--train-iters 9 --virtual-pipeline-model-parallel-size 2", ["--virtual-pipeline-model-parallel-size 2"]),
        ("--train-iters 9 --use-torch-fsdp2 false", ["--use-torch-fsdp2 is missing", "starts from pretrain_vlm.py"]),
        ("--train-iters 9 --bf16 --fp16 --loss-scale 2", ["--bf16 and --fp16"]),
        ("--train-iters 9 --fp16 --min-loss-scale 8 --initial-loss-scale 4", ["4 is less than --min-loss-scale 8"]),
        ("--train-iters 9 --min-lr 1", ["--min-lr 1", "--lr 0.001"]),
        ("--train-iters 9 --lr-warmup-init 1", ["--lr-warmup-init 1", "--lr 0.001"]),
        ("--train-iters 9 --weight-decay-incr-style linear", ["--start-weight-decay", "--end-weight-decay"]),
        ("--train-iters 9 --start-weight-decay 0.5", ["--weight-decay-incr-style"]),
        (
            "--train-iters 9 --weight-decay-incr-style linear --start-weight-decay 2 --end-weight-decay 1",
            ["--start-weight-decay 2 is greater"],
        ),
        ("--train-iters 9 --lr-warmup-fraction .1 --lr-warmup-iters 2", ["--lr-warmup-fraction and --lr-warmup-iters"]),
        ("--train-iters 9 --lr-warmup-iters 9", ["warmup takes 9 steps", "ends after 9"]),
        ("--train-iters 9 --lr-decay-iters 5 --lr-warmup-iters 6", ["warmup takes 6", "ends after 5"]),
        ("--train-iters 9 --lr-decay-samples 9", ["--lr-decay-samples", "-iters"]),
        ("--train-samples 90 --lr-decay-iters 9", ["--lr-decay-iters", "-samples"]),
        ("--train-samples 7", ["--train-samples 7", "one global batch of 8"]),
        ("--train-iters 9 --lr-decay-style WSD", ["WSD", "--lr-wsd-decay-iters"]),
        (
            "--train-iters 9 --lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 2",
            ["warmup 2 + final decay 8", "schedule's 9"],
        ),
        (
            "--train-iters 9 --calculate-per-token-loss --calculate-square-loss",
            ["--calculate-per-token-loss and --calculate-square-loss"],
        ),
        ("--train-iters 9 --lora-quantize nf4", ["--lora-quantize: --lora-target-modules names the layers"]),
        (
            f"{QUANTIZED} --tensor-model-parallel-size 2",
            ["--lora-quantize nf4: layers in 4 bits are not split", "set --tensor-model-parallel-size to 1"],
        ),
        (f"{QUANTIZED} --no-strict-load", ["--lora-quantize nf4: a weight that is missing", "leave --no-strict-load"]),
        (f"{QUANTIZED} --lora-quantize nf3", ["--lora-quantize", "'nf3'", "nf4"]),
        ("--train-iters 9 --save-hf", ["--save-hf needs --save"]),
        ("--train-iters 9 --ckpt-step 3", ["--ckpt-step needs --load"]),
        ("--train-iters 9 --ckpt-step bes", ["found 'bes'; expected a whole number, or best"]),
        ("--train-iters 9 --save-best los", ["found 'los'; expected one of loss, exact_match", "did you mean 'loss'?"]),
        ("--train-iters 9 --save-best loss", ["--save-best loss needs --save"]),
        ("--train-iters 9 --save run --save-best wer", ["--save-best wer follows", "give --eval-generate wer"]),
        (
            "--train-iters 9 --save run --save-best eval_wer --eval-generate",
            ["--save-best wer follows", "--eval-generate computes exact_match"],
        ),
        ("--train-iters 9 --eval-generate bleu", ["'bleu'; expected one of exact_match, relaxed_accuracy, anls"]),
        ("--train-iters 9 --eval-generate --eval-interval 0", ["--eval-generate exact_match needs evaluations"]),
        ("--train-iters 9 --eval-generate-rows 8", ["--eval-generate-rows 8 belongs to --eval-generate"]),
        ("--train-iters 9 --eval-generate-language en", ["--eval-generate-language en belongs to --eval-generate"]),
        ("--train-iters 9 --eval-generate anls --eval-generate-language en", ["for wer; the score is anls"]),
        ("--train-iters 9 --eval-max-new-tokens 8", ["--eval-max-new-tokens 8 belongs to --eval-generate"]),
        ("--train-iters 9 --sample-interval 0", ["--sample-interval: found '0'; expected at least 1"]),
        ("--train-iters 9 --sample-interval 5", ["--sample-interval 5 needs --save"]),
        ("--train-iters 9 --save run --sample-interval 5 --no-report", ["--sample-interval 5", "--no-report leaves"]),
        ("--train-iters 9 --save run --sample-interval 5 --sample-size 8 8", ["--sample-size is 8 8; expected frames"]),
        ("--train-iters 9 --sample-inference-steps 5", ["--sample-inference-steps 5 belongs to --sample-interval"]),
        ("--train-iters 9 --early-stop 0", ["--early-stop: found '0'; expected at least 1"]),
        ("--train-iters 9 --early-stop 2 --eval-interval 0", ["--early-stop 2 needs", "--eval-interval is 0: give"]),
        ("--train-iters 9 --early-stop 2 --eval-interval None", ["--early-stop 2 needs", "--eval-interval is 0: give"]),
        ("--train-iters 9 --save run --save-best loss --eval-iters 0", ["--save-best loss needs", "--eval-iters is 0"]),
    ],
)
def test_what_does_not_fit(run_folder: Path, words: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(words)
    for part in parts:
        assert part in str(caught.value)


def test_the_megatron_backend_has_no_layers_in_4_bits(run_folder: Path) -> None:
    args = parse_args(f"{MINIMAL} false {QUANTIZED}".split(), backends=("fsdp2", "ptd"))
    with pytest.raises(ConfigError, match="--lora-quantize nf4: the Megatron backend has no layers in 4 bits"):
        validate_args(args, 1)


def test_everything_that_does_not_fit_is_told_together(run_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        validated("--train-iters 9 --global-batch-size 30 --lr-warmup-init 1 --min-lr 1")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "words, start",
    [
        ("--ckpt-format torch", "--ckpt-format torch has no effect"),
        ("--save-interval 5", "--save-interval has no effect"),
        ("--save-epochs 1", "--save-epochs has no effect"),
        ("--async-save", "--async-save has no effect"),
        ("--lr-mult 2", "--lr-mult has no effect"),
        ("--lr-scale-modules visual", "--lr-scale-modules has no effect"),
        ("--no-check-for-nan-in-loss-and-grad", "--no-check-for-nan-in-loss-and-grad has no effect"),
        ("--manual-gc-interval 2", "--manual-gc-interval has no effect"),
        ("--exit-signal-handler false", "--exit-signal-handler false has no effect"),
        ("--max-seq-len 512", "--max-seq-len has no effect"),
        ("--dynamic-batch-buffer-size 8", "--dynamic-batch-buffer-size has no effect"),
    ],
)
def test_what_has_no_effect_alone_is_said(run_folder: Path, said: list[str], words: str, start: str) -> None:
    validated("--train-iters 9 " + words)
    assert len(said) == 1 and said[0].startswith(start)


@pytest.mark.parametrize(
    "words, lengths",
    [
        ("--train-iters 300 --lr-warmup-fraction 0.1", (300, 30, 0)),
        ("--train-iters 10 --lr-warmup-fraction 0.25 --lr-decay-iters 50", (50, 12.5, 0)),
        ("--train-iters 10 --lr-warmup-iters 3", (10, 3, 0)),
        ("--train-iters 10 --lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-iters 1", (10, 1, 4)),
        ("--train-samples 100 --lr-warmup-samples 20", (12.5, 2.5, 0)),
        ("--train-samples 100 --lr-decay-samples 80 --lr-warmup-fraction 0.5", (10, 5, 0)),
    ],
)
def test_schedule_lengths(run_folder: Path, words: str, lengths: tuple[float, float, float]) -> None:
    assert run_of_args(validated(words)).schedule_lengths() == pytest.approx(lengths)


def test_train_samples_become_steps(run_folder: Path) -> None:
    args = validated("--train-samples 100")
    assert args.train_iters == 12 and resolve_train_iters(run_of_args(args).length, 5, 1.0) == 12


@pytest.mark.parametrize(
    "epochs, batches, steps",
    [(2, 2.5, 5), (0.07, 100, 7), (0.1, 30, 3), (0.1, 31, 4), (1, 0, 1), (0.001, 5, 1), (3, 7, 21), (1.5, 2.5, 4)],
)
def test_epochs_become_steps(run_folder: Path, epochs: float, batches: float, steps: int) -> None:
    args = validated(f"--train-epochs {epochs}")
    assert args.train_iters is None
    run = run_of_args(args)
    assert resolve_train_iters(run.length, rows=10, global_batches_per_epoch=batches) == steps
    longer = run.with_train_iters(steps)
    assert (longer.train_iters, longer.schedule.lr_decay_iters) == (steps, steps)


def test_warmup_is_checked_when_epochs_are_resolved(run_folder: Path) -> None:
    args = validated("--train-epochs 1 --lr-warmup-iters 20")
    with pytest.raises(ConfigError, match="warmup takes 20 steps and the decay ends after 5"):
        run_of_args(args).with_train_iters(5)


def test_epochs_of_nothing_are_refused(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        resolve_train_iters(validated("--train-epochs 1"), 0, 0)
