"""How the flags about the layout over ranks fit together on either backend."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs import layout_rules
from mindspeed_mm.configs.arguments import parse_args, validate_args
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.utils.errors import ConfigError

MINIMAL = "--mm-model model.json --mm-data data.json --micro-batch-size 2 --lr 1e-3 --train-iters 10"
TP2, PP2, VP2 = (f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline", "virtual-pipeline"))


def validated(words: str = "", world_size: int = 8, **keywords: Any) -> Namespace:
    args = parse_args(f"{MINIMAL} {words}".split(), backends=("ptd", "fsdp2"), **keywords)
    validate_args(args, world_size)
    return args


@pytest.mark.parametrize(
    "words, world_size, size",
    [("", 1, 1), ("", 8, 8), (TP2, 8, 4), (f"{TP2} {PP2}", 8, 2), (f"{TP2} {PP2}", 4, 1), (PP2, 6, 3)],
)
def test_data_parallel_ranks(run_folder: Path, words: str, world_size: int, size: int) -> None:
    args = validated(f"{words} --global-batch-size 48", world_size)
    assert args.data_parallel_size == size
    assert args.num_microbatches == 48 // (2 * size)


def test_the_default_global_batch_counts_data_parallel_ranks_only(run_folder: Path) -> None:
    assert validated(f"{TP2} {PP2}").global_batch_size == 4


def test_with_fsdp2_all_but_tensor_ranks_are_data_parallel(run_folder: Path) -> None:
    assert validated("--use-torch-fsdp2").data_parallel_size == 8
    assert validated(f"--use-torch-fsdp2 {TP2}").data_parallel_size == 4


@pytest.mark.parametrize(
    "words, world_size, parts",
    [
        (
            "--tensor-model-parallel-size 3 --pipeline-model-parallel-size 2",
            8,
            [
                "8 processes can't be split into groups of 6",
                "size 3 × --pipeline",
                "one of 1, 2, 4, 8",
                "multiple of 6",
            ],
        ),
        (TP2, 1, ["1 process can't be split into groups of 2", "one of 1"]),
        (
            "--context-parallel-size 2",
            8,
            ["--context-parallel-size 2: the Megatron backend has no context parallelism"],
        ),
        ("--expert-model-parallel-size 2", 8, ["--expert-model-parallel-size 2", "no expert parallelism"]),
        ("--expert-tensor-parallel-size 2", 8, ["--expert-tensor-parallel-size 2: an expert is not split over ranks"]),
        (VP2, 8, ["--virtual-pipeline-model-parallel-size 2 needs --pipeline-model-parallel-size 2 or more"]),
        (
            f"{PP2} {VP2} --global-batch-size 24",
            8,
            ["a step has 3 micro-batches", "24 ÷ 8 rows", "multiple of --pipeline-model-parallel-size 2", "16 or 32"],
        ),
        (f"{PP2} {VP2} --global-batch-size 8", 8, ["a step has 1 micro-batch (", "--global-batch-size: 16"]),
        (
            "--overlap-param-gather",
            8,
            ["--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"],
        ),
        ("--overlap-param-gather --use-distributed-optimizer", 8, ["needs --overlap-grad-reduce;"]),
        ("--overlap-param-gather --overlap-grad-reduce", 8, ["needs --use-distributed-optimizer;"]),
        (
            "--recompute-granularity selective --recompute-method block --recompute-num-layers 2",
            8,
            ["--recompute-method and --recompute-num-layers: only --recompute-granularity full", "it is selective"],
        ),
        ("--recompute-num-layers 2", 8, ["--recompute-num-layers: only --recompute-granularity full", "it is absent"]),
        ("--recompute-granularity full", 8, ["full needs --recompute-method: uniform"]),
        ("--recompute-granularity full --recompute-method block", 8, ["block needs --recompute-num-layers"]),
        (
            "--recompute-granularity full --recompute-activations --recompute-method uniform",
            8,
            ["--recompute-activations asks for selective"],
        ),
        (
            "--recompute-modules mlp",
            8,
            ["--recompute-modules names the parts of layers that --recompute-granularity selective", "it is absent"],
        ),
        (
            "--recompute-granularity selective --recompute-modules mlp moe",
            8,
            ["--recompute-modules moe: models with experts are not there yet on the Megatron backend; remove it"],
        ),
        (
            "--recompute-granularity selective --recompute-modules layernorm",
            8,
            ["--recompute-modules layernorm: Megatron-core recomputes norms with Transformer Engine's only"],
        ),
        ("--torch-compile", 8, ["--torch-compile compiles the blocks of the FSDP2 backend", "add --use-torch-fsdp2"]),
        ("--bf16 --fp16", 8, ["--bf16 and --fp16"]),
        (f"{PP2} --global-batch-size 12", 8, ["--global-batch-size 12 is not divisible by 8", "4 data-parallel ranks"]),
    ],
)
def test_what_does_not_fit(run_folder: Path, words: str, world_size: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(words, world_size)
    assert len(str(caught.value).splitlines()) == 1
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "words, name, value",
    [
        (f"{PP2} {VP2} --global-batch-size 16", "virtual_pipeline_model_parallel_size", 2),
        ("--virtual-pipeline-model-parallel-size 1", "virtual_pipeline_model_parallel_size", None),
        (f"{TP2} --sequence-parallel", "sequence_parallel", True),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--recompute-granularity selective", "recompute_granularity", "selective"),
        ("--recompute-granularity full --recompute-method uniform", "recompute_num_layers", 1),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "recompute_num_layers", 4),
        ("--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer", "overlap_param_gather", True),
        ("--ckpt-format torch_dist", "ckpt_format", "torch_dist"),
        ("--ckpt-format torch_dcp", "ckpt_format", "torch_dcp"),
    ],
)
def test_what_fits_is_settled_without_a_word(
    run_folder: Path, said: list[str], words: str, name: str, value: Any
) -> None:
    assert getattr(validated(words), name) == value
    assert said == []


@pytest.mark.parametrize(
    "words, start",
    [
        ("--sequence-parallel", "--sequence-parallel has no effect here: --tensor-model-parallel-size is 1"),
        ("--ckpt-format torch", "--ckpt-format torch has no effect here"),
        ("--fsdp2-config-path fsdp2.yaml", "--fsdp2-config-path has no effect here: it describes --use-torch-fsdp2"),
        ("--init-model-with-meta-device", "--init-model-with-meta-device has no effect here"),
        ("--enable-dummy-optimizer", "--enable-dummy-optimizer has no effect here: a stage with nothing to train"),
        ("--use-cpu-initialization", "--use-cpu-initialization has no effect here"),
    ],
)
def test_what_has_no_effect_is_said(run_folder: Path, said: list[str], words: str, start: str) -> None:
    args = validated(words)
    assert len(said) == 1 and said[0].startswith(start)
    assert args.sequence_parallel is False


@pytest.mark.parametrize(
    "words, start",
    [
        (
            "--recompute-granularity selective --recompute-skip-core-attention",
            "--recompute-skip-core-attention has no effect here without --recompute-granularity full; of what",
        ),
        (
            "--recompute-method block --recompute-num-layers 2",
            "--recompute-method and --recompute-num-layers have no effect here without --recompute-granularity full",
        ),
    ],
)
def test_recompute_that_fsdp2_has_not_is_said(run_folder: Path, said: list[str], words: str, start: str) -> None:
    validated(f"--use-torch-fsdp2 {words}")
    assert len(said) == 1 and said[0].startswith(start)


@pytest.mark.parametrize(
    "words", ["", "--recompute-method uniform", "--recompute-method block --recompute-num-layers 2"]
)
def test_full_recompute_with_fsdp2_needs_no_words(run_folder: Path, said: list[str], words: str) -> None:
    assert validated(f"--use-torch-fsdp2 --recompute-granularity full {words}").recompute_granularity == "full"
    assert said == []


@pytest.mark.parametrize(
    "words, part",
    [
        ("--recompute-method block", "--recompute-method block needs --recompute-num-layers"),
        ("--recompute-num-layers 2", "--recompute-num-layers needs --recompute-method: block recomputes so many"),
    ],
)
def test_full_recompute_with_fsdp2_knows_of_which_layers(run_folder: Path, words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        validated(f"--use-torch-fsdp2 --recompute-granularity full {words}")


def test_parts_to_recompute_with_fsdp2(run_folder: Path) -> None:
    words = "--use-torch-fsdp2 --recompute-activations --recompute-modules core_attn moe layernorm mlp"
    args = validated(words)
    assert args.recompute_granularity == "selective"
    assert args.recompute_modules == ["core_attn", "moe", "layernorm", "mlp"]
    with pytest.raises(ConfigError, match="--recompute-modules moe_act: with FSDP2 the experts of a layer are recomp"):
        validated(f"{words} moe_act")
    with pytest.raises(ConfigError, match="--recompute-activations asks for selective recompute"):
        validated("--use-torch-fsdp2 --recompute-activations --recompute-granularity full")


def dims(words: str, world_size: int = 8, **fsdp2: Any) -> Dims:
    args = validated(f"--use-torch-fsdp2 {words}", world_size)
    return layout_rules.dims_of(args, Fsdp2Config.from_dict(fsdp2, file="my.yaml"))


CP4 = "--context-parallel-size 4"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (CP4, Dims(dp=2, ulysses=4)),
        (f"{CP4} --context-parallel-algo ulysses_cp_algo --ulysses-degree-in-cp 4", Dims(dp=2, ulysses=4)),
        (f"{CP4} --context-parallel-algo megatron_cp_algo", Dims(dp=2, ring=4)),
        (f"{CP4} --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2", Dims(dp=2, ring=2, ulysses=2)),
        (f"{TP2} --sequence-parallel --context-parallel-size 2", Dims(dp=2, ulysses=2, tp=2)),
    ],
)
def test_sizes_with_fsdp2(run_folder: Path, said: list[str], words: str, expected: Dims) -> None:
    assert dims(words) == expected
    assert validated(f"--use-torch-fsdp2 {words}").data_parallel_size == expected.dp
    assert said == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (f"{CP4} --context-parallel-algo adaptive_cp_algo", ["adaptive_cp_algo is not there; expected one of ulysses"]),
        (f"{CP4} --context-parallel-algo hybrid_cp_algo", ["needs --ulysses-degree-in-cp", "1, 2, 4; it is absent"]),
        (f"{CP4} --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 3", ["one of 1, 2, 4; found 3"]),
        (f"{CP4} --ulysses-degree-in-cp 2", ["2 and --context-parallel-algo ulysses_cp_algo: only hybrid_cp_algo"]),
        (f"{TP2} {CP4} --expert-tensor-parallel-size 2", ["an expert is not split over ranks", "ep_fsdp_size"]),
        (f"{CP4} --tensor-model-parallel-size 4", ["groups of 16 (--tensor-", "4 × --context-parallel-size 4)"]),
    ],
)
def test_what_does_not_fit_with_fsdp2(run_folder: Path, words: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(f"--use-torch-fsdp2 {words}")
    assert len(str(caught.value).splitlines()) == 1 and all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("words", "notices"),
    [
        ("--sequence-parallel", ["--sequence-parallel has no effect here: --tensor-model-parallel-size is 1"]),
        ("--context-parallel-algo ulysses_cp_algo", []),
        (
            "--context-parallel-algo adaptive_cp_algo --ulysses-degree-in-cp 2",
            [
                "--context-parallel-algo adaptive_cp_algo and --ulysses-degree-in-cp 2 have no effect here: "
                "--context-parallel-size is 1"
            ],
        ),
        (f"{CP4} --cp-window-size 1 --moe-token-dispatcher-type alltoall", []),
        (f"{CP4} --cp-window-size 2", ["--cp-window-size has no effect here: there is one ring, whose order changes"]),
        (f"{CP4} --use-cp-send-recv-overlap", ["--use-cp-send-recv-overlap has no effect here: a ring sends while it"]),
        (
            "--moe-token-dispatcher-type allgather",
            ["--moe-token-dispatcher-type has no effect here: tokens reach their"],
        ),
    ],
)
def test_what_has_no_effect_with_fsdp2(run_folder: Path, said: list[str], words: str, notices: list[str]) -> None:
    assert validated(f"--use-torch-fsdp2 {words}").sequence_parallel is False
    assert len(said) == len(notices) and all(map(str.startswith, said, notices))


def test_the_number_of_expert_ranks_by_flag_and_file(run_folder: Path) -> None:
    assert dims("--expert-model-parallel-size 4") == Dims(dp=8, ep=4, ep_shard=2)
    assert dims("--expert-model-parallel-size 4", reshard_local_experts=False) == Dims(dp=8, ep=4)
    with pytest.raises(ConfigError, match=r"^--expert-model-parallel-size is 3, which does not divide the 8 processes"):
        dims("--expert-model-parallel-size 3")
    with pytest.raises(ConfigError, match=r"size is 4, and my.yaml's expert_parallel_size is 1; write one of the two"):
        dims("--expert-model-parallel-size 4", expert_parallel_size=1)
    with pytest.raises(ConfigError, match=r"size is 1, and my.yaml's expert_parallel_size is 4; write one of the two"):
        dims("--expert-model-parallel-size 1", expert_parallel_size=4)
