"""The FSDP2 backend: torch's fully_shard behind the protocol of backends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.backends.engine import LaunchedStep, StepEngine
from mindspeed_mm.backends.packing import check_packing
from mindspeed_mm.backends.protocol import ForwardStep, Generation, ModelProvider, Preparation, Value
from mindspeed_mm.checkpoint import dcp, hf_export
from mindspeed_mm.checkpoint.adapters import adapter_config, export_adapters, load_adapters
from mindspeed_mm.checkpoint.pipeline_folder import component_directory
from mindspeed_mm.checkpoint.rng import kept_random_states
from mindspeed_mm.checkpoint.snapshot import Snapshot, Snapshots
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.tensors import trained_tensors
from mindspeed_mm.checkpoint.weights import load_weights, report_loaded
from mindspeed_mm.configs.flags.model import PrecisionArguments
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.run_sections import Parallel
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.models.common.adapters import draw_adapters, prepare_adapters
from mindspeed_mm.models.common.base_model import FSDP2Mixin, applies_flags, gathered_dtype, refuse_own_sharding
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.diffusers_init import is_diffusers_class
from mindspeed_mm.models.common.memory_layers import apply_memory_flags
from mindspeed_mm.models.common.modes import evaluation_mode, report_modules_trained_in_eval_mode
from mindspeed_mm.models.contract import ModelOutline, Shardable, as_shardable, as_trainable
from mindspeed_mm.models.transformers.fused import use_fused_kernels
from mindspeed_mm.models.transformers.meta_model import type_without_fsdp
from mindspeed_mm.monitor.flops import flops_model
from mindspeed_mm.optimizer.backward_factor import BackwardFactor
from mindspeed_mm.optimizer.build import BuiltOptimizer, build_optimizer
from mindspeed_mm.optimizer.clip import (
    all_parameters,
    local_squared_norm,
    number_of_copies,
    sum_plain_gradients,
)
from mindspeed_mm.optimizer.ema import Ema
from mindspeed_mm.optimizer.groups import IsIdle
from mindspeed_mm.optimizer.guarded import GuardedOptimizer
from mindspeed_mm.optimizer.loss_scale import build_loss_scale
from mindspeed_mm.optimizer.schedule import Schedule, schedule_options
from mindspeed_mm.parallel.fsdp2 import set_gradient_sync, sharded_units, use_summed_gradients
from mindspeed_mm.parallel.recompute import BlockRecompute
from mindspeed_mm.parallel.world import World, limit_waiting, start_world
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


class FSDP2Backend:
    """Data parallelism with sharded parameters, gradients and optimizer state."""

    world: World
    outline: ModelOutline | None = None
    model: nn.Module
    optimizer: BuiltOptimizer
    schedule: Schedule
    ema: Ema | None
    engine: StepEngine
    _contract: Shardable

    def setup(self, run: Run) -> None:
        """Start the process group and seed; fsdp2.yaml has been read by `describe`."""
        self.described = run
        assert run.fsdp2 is not None, "the run is described for this backend"
        self.config = with_precision(run.fsdp2, run.precision)
        self.compute_dtype = self.config.param_dtype or "fp32"
        self.world = start_world(
            run.parallel.distributed_backend,
            run.dims,
            timeout_minutes=run.parallel.distributed_timeout_minutes,
            needs_cpu_tensors=self.config.offload_to_cpu,
        )
        self.loss_scale = build_loss_scale(run.precision, self.compute_dtype)
        self.backward_factor = BackwardFactor(
            self.loss_scale,
            estimates=self.compute_dtype == "fp16",
            ranks=self.world.gradients,
        )
        self._conversions: list[Any] | None = None
        self._base: str | None = None

    def _build_context(self, load_weights: bool) -> BuildContext:
        run = self.described
        return BuildContext(
            load_weights=load_weights,
            in_run=True,
            defer_weights=True,
            seed=run.process.seed,
            trust_remote_code=run.trust_remote_code,
            loss=run.loss,
            seq_length=run.batch.seq_length,
            fsdp2_config_path=run.parallel.fsdp2_config_path,
            recompute=block_recompute(run.parallel),
            swap_attention=run.parallel.swap_attention,
            chunk_mlp_tokens=run.parallel.chunk_mlp_tokens,
            fsdp2=self.config,
            lora=run.lora,
            dims=run.dims,
            sequence_parallel=run.parallel.sequence_parallel,
            world=self.world,
        )

    def preparation(self, model_provider: ModelProvider) -> Preparation | None:
        """See the protocol."""
        with build_context(replace(self._build_context(load_weights=False), lora=None)), torch.device("meta"):
            model = call_provider(model_provider)
        root = as_shardable(model).sharded_module
        if self.world.context.size > 1 and isinstance(root, FSDP2Mixin) and root.context_parallel is not None:
            root.context_parallel.install(self.world)  # so that it knows this rank's part of rows
        return as_trainable(model).prepare

    def build_model(self, model_provider: ModelProvider, *, load_weights: bool, base: str | None = None) -> nn.Module:
        """Build, freeze, shard and fill the model.

        Args:
            model_provider: the user's callback; pre_process and post_process are passed by name if it takes them.
            load_weights: load pretrained weights; False if a checkpoint will be loaded afterwards.
            base: the folder that they are loaded from; None: the one that the model names.

        Raises:
            ConfigError: the model has no `fully_shard`.
        """
        run = self.described
        context = self._build_context(load_weights)
        on_meta = run.parallel.init_model_with_meta_device
        accelerator.current().manual_seed(run.process.seed)
        with ExitStack() as stack:
            stack.enter_context(build_context(context))
            if on_meta:
                with torch.device("meta"):
                    model = call_provider(model_provider)
            else:
                model = call_provider(model_provider)
            if isinstance(model, list):
                (model,) = model
            contract = as_shardable(model)
            refuse_own_sharding(contract.sharded_module, run.dims)
            if run.lora is not None:
                self._prepare_adapters(contract, run.lora, draws=load_weights)
            use_fused_kernels(contract.sharded_module, run.kernels)
            check_packing(model, run.batch)
            report_modules_trained_in_eval_mode([model])
            waits = contract.weights.pending is not None
            # tensors that a checkpoint may lack (--no-strict-load) must be initialised first
            contract.set_weights_come_later((waits or not load_weights) and not run.checkpoint.no_strict_load)
            if not applies_flags(root := contract.sharded_module):
                apply_memory_flags(root, self.config, context)
            waiting = list(contract.waiting()) if load_weights else []
            self.outline = as_trainable(contract.sharded_module).outline
            contract.fully_shard(self.world.gradients.group, run.parallel.fsdp2_config_path)
        limit_waiting(run.parallel.distributed_timeout_minutes)
        accelerator.current().manual_seed(run.process.seed + 100003 * self.world.gradients.rank)
        self.model, self._contract = model, contract
        self._root = contract.sharded_module
        self._units = sharded_units(self._root)
        use_summed_gradients(self._root)  # a model that shards itself may have called torch's fully_shard directly
        for module, directory in waiting:
            self._load_weights_of(module, directory if base is None else Path(base))
        if run.lora is not None and load_weights:
            self._start_adapters(run.lora)
        if self.compute_dtype == "fp16":
            contract.set_expected_factor(self.backward_factor.expected)
        self._towers = contract.idle_towers()
        traits = contract.traits
        self._flops_model = None if traits is None else flops_model(self._root, traits)
        return model

    def build_optimizer(self, model: nn.Module, run: Run) -> BuiltOptimizer:
        """Build optimizer and schedule from the flags, and the average of the weights if one is requested.

        Args:
            model: its attribute `ema_decay` may request an average; --ema-decay takes precedence.
        """
        self.optimizer = build_optimizer(
            self._root,
            run.optimizer,
            head=as_trainable(self._root).output_layer,
            computes_in_fp32=self.compute_dtype == "fp32",
        )
        self.schedule = Schedule(self.optimizer, schedule_options(run))
        self._parameters = all_parameters(self.optimizer.param_groups)
        self._copies = [number_of_copies(p, self.world.sums.size) for p in self._parameters]
        self._guard = GuardedOptimizer(self.optimizer)
        flag = run.optimizer.ema_decay
        decay = self._contract.ema_decay if flag is None else flag
        self.ema = Ema(self._root, decay) if decay else None
        self.engine = StepEngine(
            self,
            self.world,
            modules=[self.model],
            loss_scale=self.loss_scale,
            backward_factor=self.backward_factor,
            schedule=self.schedule,
            clip_grad=run.optimizer.clip_grad,
            ema=self.ema,
            compiles=self.config.compiles_kernels,
        )
        self._snapshots = Snapshots(
            self._root,
            None if run.checkpoint.no_save_optim else self.optimizer,
            save_rng=not run.checkpoint.no_save_rng,
            world=self.world,
            ema=self.ema,
        )
        return self.optimizer

    def forward_backward(self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int) -> None:
        """See the protocol."""
        self.engine.forward_backward(forward_step, data_iterator, num_microbatches)

    def step(self, counts: BatchCounts, stop_requested: bool, log_requested: bool = False) -> LaunchedStep:
        """See the protocol."""
        return self.engine.step(counts, stop_requested, log_requested)

    def evaluate(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int
    ) -> tuple[float, float]:
        """See the protocol."""
        return self.engine.evaluate(forward_step, data_iterator, num_microbatches)

    @contextmanager
    def generation(self, *, averaged: bool = False) -> Iterator[Generation]:
        """See the protocol; the model is the trained one, sharded as it is."""
        batch = self.world.batch
        weights = self.ema.applied() if averaged and self.ema is not None else nullcontext()
        with (
            torch.no_grad(),
            accelerator.current().small_products(),
            kept_random_states(),
            evaluation_mode([self.model]),
            self._contract.generating(),
            weights,
        ):
            try:
                yield Generation(self._root, batch.rank, batch.size, in_lockstep=bool(self._units), built=self.model)
            finally:
                for unit in self._units:
                    unit.reshard()

    def run(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int, *, forward_only: bool
    ) -> None:
        """Run micro-batches one after the other; see `Executor`."""
        for i in range(num_microbatches):
            if num_microbatches > 1 and not forward_only:
                set_gradient_sync(self._units, i == num_microbatches - 1, self.config.defer_gradient_sync)
            output, loss_func = forward_step(data_iterator, self.model)
            loss = self.engine.add(loss_func(output), forward_only=forward_only)
            if not forward_only:
                self.backward_factor.apply(loss).backward()
        for unit in self._units if forward_only else ():
            unit.reshard()  # forward alone leaves the root unsharded, and a later step would use its stale parameters

    def local_norm(self) -> torch.Tensor:
        """See `Executor`; gradients of parameters outside of FSDP are summed over ranks first."""
        if self.world.gradients.size > 1:
            sum_plain_gradients(self._parameters, self.world.gradients.group)
        dtype = accelerator.current().sum_dtype
        squared = local_squared_norm(self._parameters, self._copies, dtype)
        zero = torch.zeros((), dtype=dtype, device=self.world.device)
        return zero if squared is None else squared.to(self.world.device)

    def apply(self, factor: torch.Tensor, finite: torch.Tensor, is_idle: IsIdle) -> None:
        """See `Executor`."""
        for modalities, parameters in self._towers:
            if is_idle(modalities):
                for param in parameters:
                    param.grad = None
        self._guard.step(factor, finite)
        self.optimizer.zero_grad(set_to_none=True)

    def finish_step(self, *, stepped: bool) -> None:
        """See `Executor`."""
        self._guard.finish_step(stepped=stepped)

    def flops(self, counts: BatchCounts) -> float | None:
        """See `Executor`."""
        if (take := self._contract.take_flops) is not None:
            return take()
        return None if self._flops_model is None else self._flops_model.of(counts)

    def gather_objects(self, value: Value) -> list[Value]:
        """See the protocol."""
        gathered = [value] * self.world.size
        torch.distributed.all_gather_object(gathered, value, group=self.world.host.group)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier()

    def snapshot(self, extra: dict[str, Any], *, detached: bool) -> Snapshot:
        """See the protocol."""
        states = {
            **self.engine.state_dict(),
            "source": self._contract.weights.absolute_source,  # an export of the checkpoint takes its other files there
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "lora": self._adapter_config(),
            "lora_quantize": self.described.lora and self.described.lora.quantize,
            "base": self._base,
        }
        return self._snapshots.take({**extra, **states}, detached=detached)

    def load(self, directory: Path, *, optimizer: bool, rng: bool, schedule: bool) -> dict[str, Any]:
        """See the protocol."""
        extra = dcp.load(
            directory,
            model=self._root,
            optimizer=self.optimizer if optimizer else None,
            load_rng=rng,
            world=self.world,
            strict=not self.described.checkpoint.no_strict_load,
            ema=self.ema,
            frozen=self._frozen_dtype(),
        )
        if schedule:
            self.engine.load_state_dict(extra)
        return extra

    def load_weights(self, directory: Path) -> None:
        """See the protocol."""
        self._load_weights_of(self._root, directory)
        if self.described.lora is not None:
            self._start_adapters(self.described.lora)
        if self.ema is not None:
            self.ema.restart()

    def export_hf(self, directory: Path, *, is_final: bool = True) -> None:
        """See the protocol."""
        self._export(directory, is_final)
        if self.ema is not None:
            with self.ema.applied():
                self._export(directory.with_name(directory.name.replace("hf", "hf_ema", 1)), is_final)

    def _export(self, directory: Path, is_final: bool) -> None:
        origin, group = self._contract.weights, self.world.host.group
        if (config := self._adapter_config()) is not None:
            fetcher = hf_export.FromModel(self._root, dist.get_rank(group))
            names = list(trained_tensors(self._root, tied_once=False))  # PEFT reads a tied weight by each of its names
            of_pipeline = is_diffusers_class(type(self._root))
            export_adapters(fetcher, names, directory, config, origin.source, group, of_pipeline=of_pipeline)
            return
        layout = self._contract.final_export_layout() if is_final else None
        hf_export.export(self._root, directory, origin.source, group, origin.dtype, self._conversions, layout)

    def _adapter_config(self) -> dict[str, Any] | None:
        options, plan = self.described.lora, as_trainable(self._root).adapter_plan
        if options is None or plan is None:
            return None
        return adapter_config(self._root, options, plan, options.base or self._contract.weights.absolute_source)

    def _prepare_adapters(self, contract: Shardable, options: LoraOptions, *, draws: bool) -> None:
        dtype = to_torch_dtype(self.config.param_dtype)
        prepare_adapters(contract, options, dtype, quantizes=True, draws=draws)

    def _start_adapters(self, options: LoraOptions) -> None:
        """Give adapters their first values, once the model's own weights are there."""
        draw_adapters(self._root, options, self.described.process.seed)
        if options.start is not None:
            unsafe = self.described.checkpoint.allow_unsafe_pickle
            load_adapters(self._root, Path(options.start), options, allow_pickle=unsafe)

    def _frozen_dtype(self) -> torch.dtype | None:
        """Return the dtype of frozen weights in a model that gathers them in 16 bits; None: they stay in float32."""
        dtype = gathered_dtype(self._root)
        return dtype if dtype in (torch.bfloat16, torch.float16) else None

    def _load_weights_of(self, module: nn.Module, directory: Path) -> None:
        run = self.described
        directory = component_directory(directory, type_without_fsdp(module).__name__)
        if run.lora is not None:
            self._base = str(directory.absolute())
        source = open_weights(directory, allow_pickle=run.checkpoint.allow_unsafe_pickle)
        plan = load_weights(
            module,
            source,
            strict=not run.checkpoint.no_strict_load,
            downcast=run.precision.downcast_to_bf16,
            frozen=self._frozen_dtype(),
        )
        report_loaded(source, plan)
        if module is self._root and source.in_hub_layout:
            self._conversions = plan.conversions


def call_provider(provider: ModelProvider) -> Any:
    """Call a model provider; pre_process and post_process are True if it has these parameters."""
    parameters = inspect.signature(provider).parameters
    named = {k: True for k in ("pre_process", "post_process") if k in parameters}
    return provider(**named)


def block_recompute(parallel: Parallel) -> BlockRecompute:
    """Return the flags' recompute settings."""
    keeping = parallel.recompute_num_layers_skip_core_attention
    return BlockRecompute(
        parallel.recompute_granularity,
        parallel.recompute_method,
        parallel.recompute_num_layers,
        tuple(parallel.recompute_modules or ("core_attn",)),
        keeping if keeping or parallel.recompute_skip_core_attention else None,
    )


def with_precision(config: Fsdp2Config, precision: PrecisionArguments) -> Fsdp2Config:
    """Return fsdp2.yaml with the compute dtype of --bf16 or --fp16 if it names none; parameters stay in float32.

    Raises:
        ConfigError: --accumulate-allreduce-grads-in-fp32 with a reduce_dtype other than fp32.
    """
    reduce_dtype = to_torch_dtype(config.reduce_dtype)
    if precision.accumulate_allreduce_grads_in_fp32 and reduce_dtype not in (None, torch.float32):
        raise ConfigError(
            f"--accumulate-allreduce-grads-in-fp32: fsdp2.yaml's reduce_dtype is {config.reduce_dtype}; write "
            "reduce_dtype: fp32, or leave the flag out"
        )
    flag = "bf16" if precision.bf16 else "fp16" if precision.fp16 else None
    if flag and config.param_dtype is None:
        notice(f"--{flag}: computed in {flag}, as fsdp2.yaml names no param_dtype; master weights stay float32")
        return config.model_copy(update={"param_dtype": flag})
    if flag and to_torch_dtype(config.param_dtype) != to_torch_dtype(flag):
        notice(f"--{flag} has no effect: fsdp2.yaml's param_dtype is {config.param_dtype}")
    return config
