"""The schema of the command line: dataclasses whose fields are the flags.

The parser, `ParsedFlags`, `docs/configuration.md` and the checks are all derived from the groups named here.
"""

from __future__ import annotations

from mindspeed_mm.configs.flags.checkpoint import CheckpointArguments
from mindspeed_mm.configs.flags.data_and_logging import DataArguments, LoggingArguments
from mindspeed_mm.configs.flags.distributed import DistributedArguments, MegatronBackendArguments
from mindspeed_mm.configs.flags.lora import LoraArguments
from mindspeed_mm.configs.flags.megatron import (
    MegatronBatchingArguments,
    MegatronKernelArguments,
    MegatronMemoryArguments,
    MegatronOtherArguments,
    MegatronParallelArguments,
    MegatronStructureArguments,
)
from mindspeed_mm.configs.flags.model import (
    FusedKernelArguments,
    LossArguments,
    ModelArguments,
    PrecisionArguments,
    ProcessArguments,
)
from mindspeed_mm.configs.flags.not_yet import PreferenceArguments, SearchArguments
from mindspeed_mm.configs.flags.optimizer import OptimizerArguments, ScheduleArguments
from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.configs.flags.training import BatchArguments, TrainingArguments

#: the groups in the order of the documentation; the honoured ones first
GROUPS: tuple[type, ...] = (
    ModelArguments,
    ProcessArguments,
    DataArguments,
    BatchArguments,
    TrainingArguments,
    OptimizerArguments,
    ScheduleArguments,
    LossArguments,
    PrecisionArguments,
    FusedKernelArguments,
    LoraArguments,
    DistributedArguments,
    MegatronBackendArguments,
    CheckpointArguments,
    LoggingArguments,
    TrackerArguments,
    MegatronStructureArguments,
    MegatronKernelArguments,
    MegatronParallelArguments,
    MegatronMemoryArguments,
    MegatronBatchingArguments,
    MegatronOtherArguments,
    PreferenceArguments,
    SearchArguments,
)
