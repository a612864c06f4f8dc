"""`Run`: the whole description of a launch, typed once and never changed.

`configs.describe.describe` builds it from flags and files. What changes while a run trains is in `progress.Progress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from mindspeed_mm.configs.argument_rules import ScheduleLengths, check_schedule, schedule_lengths
from mindspeed_mm.configs.config import MMConfig
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.flags.checkpoint import CheckpointArguments
from mindspeed_mm.configs.flags.data_and_logging import LoggingArguments
from mindspeed_mm.configs.flags.model import FusedKernelArguments, LossArguments, PrecisionArguments, ProcessArguments
from mindspeed_mm.configs.flags.parsed import ParsedFlags
from mindspeed_mm.configs.flags.spec import BackendName
from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.configs.flags.training import TrainingArguments
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config, load_fsdp2_config
from mindspeed_mm.configs.layout_rules import dims_of
from mindspeed_mm.configs.lora import LoraOptions, lora_options
from mindspeed_mm.configs.packing import asks_for_packing
from mindspeed_mm.configs.run_sections import Batch, OptimizerConfig, Parallel, ScheduleConfig, pick
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.utils.launch import Launch

if TYPE_CHECKING:  # a run reads the schemas of its own kind only
    from mindspeed_mm.configs.data_config import DataConfig
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.configs.model_config import TransformersModelConfig
    from mindspeed_mm.configs.sora_config import SoRAModelConfig
    from mindspeed_mm.configs.vlm_config import VLMModelConfig

    ModelConfig = TransformersModelConfig | VLMModelConfig | SoRAModelConfig
    RunDataConfig = DataConfig | GenerationDataConfig


@dataclass(frozen=True)
class Run:
    """One run, as its launch describes it.

    Attributes:
        launch: this process's place in the launch.
        model: model.json, typed; None: the script brings a model of its own.
        data: data.json, typed; None: the script brings data of its own.
        tools: tools.json.
        fsdp2: fsdp2.yaml; None on the Megatron backend.
        dims: sizes of the parallelisms.
        files: the files as they are written: `files.model`, `files.data`, `files.tool`, those that were given.
        trust_remote_code: whether code that comes with a directory may run, for model, processor and tokenizer alike.
        lora: the adapters that are trained; None: weights are.
        own_flags: attribute → value of the flags that the script has added.
        given: attribute → value of the flags that the launch gives; all others have their defaults.
    """

    launch: Launch
    model: ModelConfig | None
    data: RunDataConfig | None
    tools: ToolsConfig
    fsdp2: Fsdp2Config | None
    dims: Dims
    files: MMConfig
    process: ProcessArguments
    parallel: Parallel
    batch: Batch
    length: TrainingArguments
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossArguments
    kernels: FusedKernelArguments
    precision: PrecisionArguments
    checkpoint: CheckpointArguments
    logging: LoggingArguments
    trackers: TrackerArguments
    trust_remote_code: bool
    lora: LoraOptions | None
    own_flags: Mapping[str, object]
    given: Mapping[str, object] = field(default_factory=dict)

    @property
    def uses_fsdp2(self) -> bool:
        """Whether the FSDP2 backend trains; else the Megatron backend does."""
        return self.parallel.backend == "fsdp2"

    @property
    def generates_media(self) -> bool:
        """Whether model.json describes a model that generates images or videos."""
        if self.model is None:
            return False
        from mindspeed_mm.configs.sora_config import SoRAModelConfig

        return isinstance(self.model, SoRAModelConfig)

    @property
    def train_iters(self) -> int:
        """Optimizer steps in all; the length of the run must be known (`with_train_iters`)."""
        assert self.length.train_iters is not None, "the length of the run is known once its data have been opened"
        return self.length.train_iters

    def with_train_iters(self, train_iters: int) -> Run:
        """Return the run with its length, where --train-epochs left it to the data.

        Args:
            train_iters: optimizer steps in all; what the flags say, if they do.

        Raises:
            ConfigError: the schedule doesn't fit into them.
        """
        schedule = self.schedule
        if schedule.lr_decay_iters is None and self.length.train_samples is None:
            schedule = replace(schedule, lr_decay_iters=train_iters)
        run = replace(self, length=replace(self.length, train_iters=train_iters), schedule=schedule)
        raise_all(check_schedule(run.schedule_lengths(), schedule.lr_decay_style))
        return run

    def schedule_lengths(self) -> ScheduleLengths:
        """Return the parts of the schedule in optimizer steps; the length of the run must be known."""
        return schedule_lengths(self.schedule, self.length.train_samples, self.batch.global_batch_size)


def build_run(
    args: ParsedFlags,
    files: MMConfig,
    *,
    launch: Launch,
    backend: BackendName,
    model: ModelConfig | None,
    data: RunDataConfig | None,
    own_flags: Mapping[str, object],
) -> Run:
    """Build the description from flags and files; `args` has been checked (`configs.arguments.validate_args`).

    Raises:
        ConfigError: fsdp2.yaml can't be honoured, or the sizes of the parallelisms don't fit.
    """
    fsdp2 = load_fsdp2_config(args.fsdp2_config_path) if backend == "fsdp2" else None
    if fsdp2 is not None and args.torch_compile:
        fsdp2 = fsdp2.with_compile()
    dims = dims_of(args, fsdp2)
    packs = args.use_txt_dynamic_batching or asks_for_packing(getattr(files, "data", None))
    return Run(
        launch=launch,
        model=model,
        data=data,
        tools=ToolsConfig.from_dict(getattr(files, "tool", None) or {}),
        fsdp2=fsdp2,
        dims=dims,
        files=files,
        process=pick(ProcessArguments, args),
        parallel=pick(Parallel, args, backend=backend, expert_model_parallel_size=dims.ep),
        batch=pick(Batch, args, packs=packs),
        length=pick(TrainingArguments, args),
        optimizer=pick(OptimizerConfig, args),
        schedule=pick(ScheduleConfig, args),
        loss=pick(LossArguments, args),
        kernels=pick(FusedKernelArguments, args),
        precision=pick(PrecisionArguments, args),
        checkpoint=pick(CheckpointArguments, args),
        logging=pick(LoggingArguments, args),
        trackers=pick(TrackerArguments, args),
        trust_remote_code=args.trust_remote_code,
        lora=lora_options(args),
        own_flags=own_flags,
        given=MappingProxyType(dict(getattr(args, "given", {}))),
    )
