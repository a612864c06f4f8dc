"""The sections of `Run` that flags alone describe, with what the command line left out settled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from mindspeed_mm.configs.flags.parsed import ParsedFlags
from mindspeed_mm.configs.flags.spec import BackendName

T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    """How the model and the batch are spread over processes.

    Attributes:
        backend: fsdp2, or ptd (Megatron-core's parallelism).
        fsdp2_config_path: fsdp2.yaml (a path, or a part of the run's YAML); None: its defaults.
        expert_model_parallel_size: by the flag, or by fsdp2.yaml's expert_parallel_size.
        virtual_pipeline_model_parallel_size: chunks on each pipeline rank; None without interleaving.
        others: the flags of the same names.
    """

    backend: BackendName
    distributed_backend: str
    distributed_timeout_minutes: int
    fsdp2_config_path: str | None
    init_model_with_meta_device: bool
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    sequence_parallel: bool
    variable_seq_lengths: bool
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None
    recompute_modules: list[str] | None
    recompute_skip_core_attention: bool
    recompute_num_layers_skip_core_attention: int
    swap_attention: bool
    chunk_mlp_tokens: int | None


@dataclass(frozen=True)
class Batch:
    """What one step trains on.

    Attributes:
        micro_batch_size: rows that one rank takes at once.
        global_batch_size: rows of an optimizer step.
        num_microbatches: micro-batches of a rank in a step.
        data_parallel_size: ranks that read rows of their own.
        seq_length: longest row in tokens; None: data.json's, else no limit.
        packs: whether rows hold several samples each, by data.json or a flag.
        others: the flags of the same names.
    """

    micro_batch_size: int
    global_batch_size: int
    num_microbatches: int
    data_parallel_size: int
    seq_length: int | None
    num_workers: int
    packs: bool
    use_data_balance: bool
    encoder_dp_balance: bool
    use_image_mbs_data_balance: bool
    use_txt_dynamic_batching: bool
    max_seq_len: int
    dynamic_batch_buffer_size: int


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; the flags of the same names, settled."""

    optimizer: str
    lr: float
    weight_decay: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    sgd_momentum: float
    swap_optimizer: bool
    muon_momentum: float
    ns_steps: int
    matched_adamw_rms: float
    clip_grad: float
    weight_decay_exclude_modules: tuple[str, ...]
    lr_scale_modules: tuple[str, ...]
    lr_mult: float
    ema_decay: float | None


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning-rate schedule; the flags of the same names.

    Attributes:
        lr_decay_iters: None until the length of the run is known (`Run.with_train_iters`).
    """

    min_lr: float
    lr_decay_style: str
    lr_decay_iters: int | None
    lr_decay_samples: int | None
    lr_warmup_fraction: float | None
    lr_warmup_iters: int
    lr_warmup_samples: int
    lr_warmup_init: float
    lr_wsd_decay_style: str
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_samples: int | None


def pick(section: type[T], args: ParsedFlags, **rest: object) -> T:
    """Return a dataclass whose fields are `rest` and the flags of the same names."""
    fields = dataclasses.fields(section)  # type: ignore[arg-type]
    values = {f.name: getattr(args, f.name) for f in fields if f.name not in rest}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return section(**values, **rest)
