"""The flags of one launch as `parse_args` returns them: typed attributes that the rules read and settle."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from mindspeed_mm.configs.flags.spec import BackendName

if TYPE_CHECKING:
    from mindspeed_mm.configs import flags
    from mindspeed_mm.configs.reader import MMConfig

    class _Flags(
        flags.ModelArguments,
        flags.ProcessArguments,
        flags.DataArguments,
        flags.BatchArguments,
        flags.TrainingArguments,
        flags.OptimizerArguments,
        flags.ScheduleArguments,
        flags.LossArguments,
        flags.PrecisionArguments,
        flags.FusedKernelArguments,
        flags.LoraArguments,
        flags.DistributedArguments,
        flags.MegatronBackendArguments,
        flags.CheckpointArguments,
        flags.LoggingArguments,
        flags.TrackerArguments,
        flags.MegatronStructureArguments,
        flags.MegatronKernelArguments,
        flags.MegatronParallelArguments,
        flags.MegatronMemoryArguments,
        flags.MegatronBatchingArguments,
        flags.MegatronOtherArguments,
        flags.PreferenceArguments,
        flags.SearchArguments,
    ):
        """A type checker finds the attributes of all groups here (`flags.GROUPS`), and no others."""

else:
    _Flags = Namespace


class ParsedFlags(_Flags):
    """A Namespace with every flag of the schema under its name, the script's own flags, and what follows from them.

    Attributes:
        backends: those that the script can train with.
        given: the flags that the launch gives, the script's own included, as they were typed.
        rank, restarts: this process's place in the launch, and how often the launcher has restarted it.
        world_size: number of processes.
        params_dtype: of the computation, by `bf16` and `fp16`.
        mm: model.json, data.json and tools.json; set by `config.merge_mm_args`.
        data_parallel_size, num_microbatches: ranks that read rows of their own, and micro-batches of each in a step;
            set by `validate_args`, like the numbers below.
        iteration, consumed_train_samples, consumed_valid_samples, skipped_train_samples: how far a run is; 0.
        others: the flags of the same names, of which these have been settled by the rules.
    """

    backends: tuple[BackendName, ...]
    given: Mapping[str, Any]
    rank: int
    world_size: int
    restarts: int
    params_dtype: Literal["bf16", "fp16", "fp32"]
    mm: MMConfig
    data_parallel_size: int
    num_microbatches: int
    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int

    # flags that are written after they have been parsed; a type checker takes those of the groups as read-only
    use_torch_fsdp2: bool
    fsdp2_config_path: str | None
    trust_remote_code: bool
    use_deter_comp: bool
    deterministic_mode: bool
    local_rank: int
    virtual_pipeline_model_parallel_size: int | None
    sequence_parallel: bool
    recompute_granularity: Literal["full", "selective"] | None
    recompute_num_layers: int | None
    global_batch_size: int | None
    train_iters: int | None
    lr_decay_iters: int | None
    lr_decay_samples: int | None
    start_weight_decay: float | None
    end_weight_decay: float | None

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)


def backends_of(args: ParsedFlags) -> tuple[BackendName, ...]:
    """Return the backends that the script of a launch can train with; FSDP2 where nothing says so."""
    return tuple(getattr(args, "backends", ("fsdp2",)))


def backend_of(args: ParsedFlags) -> BackendName:
    """Return the backend that a launch asks for; where the script has FSDP2 only, its rules apply."""
    return "ptd" if "ptd" in backends_of(args) and not getattr(args, "use_torch_fsdp2", True) else "fsdp2"
