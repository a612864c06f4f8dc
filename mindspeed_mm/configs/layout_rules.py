"""How the flags about the layout over ranks fit together, on the FSDP2 backend and on the Megatron backend."""

from __future__ import annotations

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of, backends_of
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_PARALLEL_SIZES = {
    "tensor_model_parallel_size": "tensor parallelism",
    "pipeline_model_parallel_size": "pipeline parallelism",
    "virtual_pipeline_model_parallel_size": "pipeline parallelism",
    "context_parallel_size": "context parallelism",
    "expert_model_parallel_size": "expert parallelism",
}
_NOT_ON_FSDP2 = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
_SPREADS = "fsdp2.yaml's sharding_size spreads the model over ranks"
_CONTEXT_ALGORITHMS = ("ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo")
_EXPERTS = "expert_model_parallel_size"
_NO_EXPERTS = "models with experts are not there yet on the Megatron backend"
_INSIDE_EXPERTS = "with FSDP2 the experts of a layer are recomputed with their router, by moe"
#: backend → word of --recompute-modules → why it can't be recomputed there
_PARTS_NOT_RECOMPUTED = {
    "fsdp2": {
        "moe_act": _INSIDE_EXPERTS,
        "shared_experts": _INSIDE_EXPERTS,
        "mla_up_proj": "with FSDP2 products with weights are kept, those of latent attention too, by core_attn",
    },
    "ptd": {
        **dict.fromkeys(("moe", "moe_act", "shared_experts"), _NO_EXPERTS),
        "layernorm": "Megatron-core recomputes norms with Transformer Engine's only, and this backend has its own",
        "mla_up_proj": "models with latent attention are not there yet on the Megatron backend",
    },
}
_NOT_ON_MEGATRON = ("context_parallel_size", _EXPERTS)


def settle_layout(args: ParsedFlags) -> None:
    """Give flags about the layout their one meaning.

    `sequence_parallel` is off where there is one tensor-parallel rank. On the Megatron backend
    `virtual_pipeline_model_parallel_size` is None without interleaving, `recompute_activations` becomes
    `recompute_granularity`, and `recompute_num_layers` is 1 where uniform recompute names none.
    """
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        notice("--sequence-parallel has no effect here: --tensor-model-parallel-size is 1")
        args.sequence_parallel = False
    if args.recompute_activations and args.recompute_granularity is None:
        args.recompute_granularity = "selective"
    if backend_of(args) != "ptd":
        return
    if args.virtual_pipeline_model_parallel_size == 1:
        args.virtual_pipeline_model_parallel_size = None
    if args.recompute_granularity == "full" and args.recompute_method == "uniform" and not args.recompute_num_layers:
        args.recompute_num_layers = 1


def data_parallel_size(args: ParsedFlags) -> int:
    """Return how many ranks read rows of their own; at least 1, also where the sizes don't fit (see `check_layout`)."""
    return max(1, args.world_size // _model_parallel_size(args))


def dims_of(args: ParsedFlags, fsdp2: Fsdp2Config | None) -> Dims:
    """Return the sizes of the parallelisms of a launch.

    Args:
        args: flags that have passed `check_layout`.
        fsdp2: fsdp2.yaml; None on the Megatron backend.

    Raises:
        ConfigError: sizes that don't fit the number of processes, or flags and file that disagree.
    """
    tensor = args.tensor_model_parallel_size
    if fsdp2 is None:
        return Dims.of(args.world_size, pp=args.pipeline_model_parallel_size, tp=tensor)
    experts = _expert_parallel_size(args, fsdp2)
    ring, ulysses = context_parallel_sizes(args)
    return Dims.of(
        args.world_size,
        ring=ring,
        ulysses=ulysses,
        tp=tensor,
        ep=experts,
        ep_shard=fsdp2.expert_sharding_size,
        sharding_size=fsdp2.sharding_size,
        where=fsdp2.file,
        ep_name="expert_parallel_size" if args.expert_model_parallel_size is None else _spelled(_EXPERTS),
    )


def context_parallel_sizes(args: ParsedFlags) -> tuple[int, int]:
    """Return the sizes of the ring and of Ulysses, whose product is --context-parallel-size."""
    size, algorithm = args.context_parallel_size, args.context_parallel_algo
    if algorithm == "ulysses_cp_algo":
        return 1, size
    if algorithm == "megatron_cp_algo":
        return size, 1
    ulysses = args.ulysses_degree_in_cp or 1
    return size // ulysses, ulysses


def _expert_parallel_size(args: ParsedFlags, fsdp2: Fsdp2Config) -> int:
    flag, key = args.expert_model_parallel_size, fsdp2.expert_parallel_size
    in_file = "expert_parallel_size" in fsdp2.model_fields_set
    if flag is not None and in_file and flag != key:
        raise ConfigError(
            f"--expert-model-parallel-size is {flag}, and {fsdp2.file}'s expert_parallel_size is {key}; write one of "
            "the two, or the same number in both"
        )
    return key if flag is None else flag


def check_layout(args: ParsedFlags) -> list[str]:
    """Return a sentence for each problem of the layout over ranks."""
    return _check_backend(args) or _check_expected(args)


def _check_expected(args: ParsedFlags) -> list[str]:
    expected = args.expected_data_parallel_size
    if expected is None or expected == args.data_parallel_size:
        return []
    return [
        f"--expected-data-parallel-size is {expected}, and {args.world_size} processes with the other sizes give "
        f"{args.data_parallel_size}; start another number of processes, or remove it"
    ]


def _check_backend(args: ParsedFlags) -> list[str]:
    if not args.use_torch_fsdp2 and "ptd" not in backends_of(args):
        return [
            "--use-torch-fsdp2 is missing; this script trains with FSDP2 only, and the Megatron backend, which has no "
            "such flag, starts from pretrain_vlm.py",
            *_sizes_of_fsdp2(args),
            *_layers_to_recompute(args),
        ]
    if backend_of(args) == "fsdp2":
        return [*_sizes_of_fsdp2(args), *_layers_to_recompute(args)]
    return [
        *_sizes_of_megatron(args),
        *_check_pipeline(args),
        *_check_overlap(args),
        *_check_compile(args),
        *_check_recompute(args),
    ]


def _sizes_of_fsdp2(args: ParsedFlags) -> list[str]:
    problems = [
        f"{_spelled(name)} {size}: the FSDP2 backend has no {_PARALLEL_SIZES[name]}; set it to 1 ({_SPREADS})"
        for name in _NOT_ON_FSDP2
        if (size := getattr(args, name)) is not None and size > 1
    ]
    problems += [*_check_context(args), *_check_expert_tensor(args)]
    model_size = _model_parallel_size(args)
    if not problems and args.world_size % model_size:
        fitting = ", ".join(str(n) for n in range(1, args.world_size + 1) if args.world_size % n == 0)
        problems.append(
            f"{args.world_size} process{'es' if args.world_size > 1 else ''} can't be split into groups of "
            f"{model_size} (--tensor-model-parallel-size {args.tensor_model_parallel_size} × --context-parallel-size "
            f"{args.context_parallel_size}); start a multiple of {model_size} processes, or choose sizes whose product "
            f"is one of {fitting}"
        )
    return problems


def _check_context(args: ParsedFlags) -> list[str]:
    size, algorithm, ulysses = args.context_parallel_size, args.context_parallel_algo, args.ulysses_degree_in_cp
    if size == 1:
        return []
    if algorithm not in _CONTEXT_ALGORITHMS:
        return [f"--context-parallel-algo {algorithm} is not there; expected one of {', '.join(_CONTEXT_ALGORITHMS)}"]
    if algorithm != "hybrid_cp_algo":
        if ulysses in (None, size if algorithm == "ulysses_cp_algo" else 1):
            return []
        return [
            f"--ulysses-degree-in-cp {ulysses} and --context-parallel-algo {algorithm}: only hybrid_cp_algo has "
            "Ulysses groups in a ring; write hybrid_cp_algo, or remove --ulysses-degree-in-cp"
        ]
    if ulysses is not None and size % ulysses == 0:
        return []
    fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    found = "it is absent" if ulysses is None else f"found {ulysses}"
    return [
        f"--context-parallel-algo hybrid_cp_algo needs --ulysses-degree-in-cp, a divisor of --context-parallel-size "
        f"{size}: one of {fitting}; {found}"
    ]


def _check_expert_tensor(args: ParsedFlags) -> list[str]:
    size = args.expert_tensor_parallel_size
    if size is None or size == 1:
        return []
    instead = (
        ", --expert-model-parallel-size splits their number, and fsdp2.yaml's ep_fsdp_size shards them"
        if backend_of(args) == "fsdp2"
        else ""
    )
    return [f"--expert-tensor-parallel-size {size}: an expert is not split over ranks; set it to 1{instead}"]


def _sizes_of_megatron(args: ParsedFlags) -> list[str]:
    problems = _check_expert_tensor(args)
    problems += [
        f"{_spelled(name)} {size}: the Megatron backend has no {_PARALLEL_SIZES[name]} yet; set it to 1, or add "
        "--use-torch-fsdp2"
        for name in _NOT_ON_MEGATRON
        if (size := getattr(args, name)) is not None and size > 1
    ]
    model_size = _model_parallel_size(args)
    if args.world_size % model_size:
        tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        fitting = ", ".join(str(n) for n in range(1, args.world_size + 1) if args.world_size % n == 0)
        problems.append(
            f"{args.world_size} process{'es' if args.world_size > 1 else ''} can't be split into groups of "
            f"{model_size} (--tensor-model-parallel-size {tensor} × --pipeline-model-parallel-size {pipeline}); start "
            f"a multiple of {model_size} processes, or choose sizes whose product is one of {fitting}"
        )
    return problems


def _model_parallel_size(args: ParsedFlags) -> int:
    if backend_of(args) == "fsdp2":
        return args.tensor_model_parallel_size * args.context_parallel_size
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size


def _check_pipeline(args: ParsedFlags) -> list[str]:
    virtual, pipeline = args.virtual_pipeline_model_parallel_size, args.pipeline_model_parallel_size
    if virtual is None:
        return []
    if pipeline == 1:
        return [
            f"--virtual-pipeline-model-parallel-size {virtual} needs --pipeline-model-parallel-size 2 or more: stages "
            "are interleaved between pipeline ranks"
        ]
    rows = (args.micro_batch_size or 1) * args.data_parallel_size
    if not args.global_batch_size or args.global_batch_size % rows:
        return []  # the rule about batches reports it
    count = args.global_batch_size // rows
    if count % pipeline == 0:
        return []
    below = count // pipeline * pipeline
    nearest = " or ".join(str(n * rows) for n in (below, below + pipeline) if n)
    return [
        f"--virtual-pipeline-model-parallel-size {virtual}: a step has {count} "
        f"micro-batch{'es' if count > 1 else ''} (--global-batch-size "
        f"{args.global_batch_size} ÷ {rows} rows at a time), and interleaved stages need a multiple of "
        f"--pipeline-model-parallel-size {pipeline}; nearest valid --global-batch-size: {nearest}"
    ]


def _check_overlap(args: ParsedFlags) -> list[str]:
    if not args.overlap_param_gather:
        return []
    needed = [name for name in ("use_distributed_optimizer", "overlap_grad_reduce") if not getattr(args, name)]
    if not needed:
        return []
    return [f"--overlap-param-gather needs {' and '.join(map(_spelled, needed))}; add what is missing, or remove it"]


def _check_compile(args: ParsedFlags) -> list[str]:
    if not args.torch_compile:
        return []
    return [
        "--torch-compile compiles the blocks of the FSDP2 backend, and the layers of the Megatron backend have fused "
        "functions of their own; add --use-torch-fsdp2, or remove it"
    ]


def _check_recompute(args: ParsedFlags) -> list[str]:
    granularity, method = args.recompute_granularity, args.recompute_method
    problems = []
    extra = [n for n in ("recompute_method", "recompute_num_layers") if getattr(args, n) is not None]
    if extra and granularity != "full":
        found = f"it is {granularity}" if granularity else "it is absent"
        problems.append(
            f"{' and '.join(map(_spelled, extra))}: only --recompute-granularity full knows layers, and {found}; write "
            "full, or remove them"
        )
    if granularity == "full" and method is None:
        problems.append(
            "--recompute-granularity full needs --recompute-method: uniform recomputes all layers, block the first "
            "--recompute-num-layers of each stage"
        )
    return [*problems, *_layers_to_recompute(args)]


def _parts_to_recompute(args: ParsedFlags) -> list[str]:
    granularity, modules = args.recompute_granularity, args.recompute_modules or ()
    if args.recompute_activations and granularity == "full":
        return ["--recompute-activations asks for selective recompute, --recompute-granularity for full; keep one"]
    if modules and granularity != "selective":
        found = f"it is {granularity}" if granularity else "it is absent"
        return [
            f"--recompute-modules names the parts of layers that --recompute-granularity selective recomputes, and "
            f"{found}; write selective, or remove it"
        ]
    refused = _PARTS_NOT_RECOMPUTED[backend_of(args)]
    return [f"--recompute-modules {word}: {refused[word]}; remove it" for word in modules if word in refused]


def _layers_to_recompute(args: ParsedFlags) -> list[str]:
    if args.recompute_granularity != "full":
        return _parts_to_recompute(args)
    if args.recompute_activations or args.recompute_modules:
        return _parts_to_recompute(args)
    if args.recompute_method == "block" and args.recompute_num_layers is None:
        return ["--recompute-method block needs --recompute-num-layers, the layers of each stage to recompute"]
    if args.recompute_method is None and args.recompute_num_layers is not None and backend_of(args) == "fsdp2":
        return [
            "--recompute-num-layers needs --recompute-method: block recomputes so many layers of each list of blocks, "
            "uniform recomputes all; without either flag all layers are recomputed"
        ]
    return []


def log_layout_notices(args: ParsedFlags) -> None:
    """Log which flags of the checkpoint's format and of recompute have no effect on this backend."""
    if backend_of(args) == "fsdp2":
        if args.ckpt_format != "torch_dcp":
            notice(f"--ckpt-format {args.ckpt_format} has no effect here: FSDP2 checkpoints are torch_dcp")
        _log_context_notices(args)
        idle = [n for n in ("recompute_method", "recompute_num_layers") if getattr(args, n) is not None]
        if idle and args.recompute_granularity != "full":
            verb = "have" if len(idle) > 1 else "has"
            notice(f"{' and '.join(map(_spelled, idle))} {verb} no effect here without --recompute-granularity full")
        skips = args.recompute_skip_core_attention or args.recompute_num_layers_skip_core_attention
        if skips and args.recompute_granularity != "full":
            notice(
                "--recompute-skip-core-attention has no effect here without --recompute-granularity full; of what "
                "fsdp2.yaml's recompute_modules names, recompute_keep: [attention] keeps it"
            )
        return
    if args.ckpt_format == "torch":
        notice("--ckpt-format torch has no effect here: what is written is torch's distributed checkpoint (torch_dcp)")


def _log_context_notices(args: ParsedFlags) -> None:
    if args.context_parallel_size > 1:
        return
    idle = [f"--context-parallel-algo {args.context_parallel_algo}"] * (args.context_parallel_algo != "ulysses_cp_algo")
    idle += [f"--ulysses-degree-in-cp {args.ulysses_degree_in_cp}"] * ((args.ulysses_degree_in_cp or 1) > 1)
    if idle:
        verb = "have" if len(idle) > 1 else "has"
        notice(f"{' and '.join(idle)} {verb} no effect here: --context-parallel-size is 1")


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
