"""The PTD backend: Megatron-core's pipeline, tensor and data parallelism behind the protocol of backends."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.backends.engine import LaunchedStep, StepEngine
from mindspeed_mm.backends.packing import check_packing
from mindspeed_mm.backends.protocol import ForwardStep, Generation, ModelProvider, Preparation, Value
from mindspeed_mm.backends.tied_embedding import tied_embedding
from mindspeed_mm.checkpoint.adapters import adapter_config
from mindspeed_mm.checkpoint.megatron.state import MegatronState
from mindspeed_mm.checkpoint.rng import kept_random_states
from mindspeed_mm.checkpoint.snapshot import Snapshot
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.run_sections import Parallel
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.modes import report_modules_trained_in_eval_mode
from mindspeed_mm.models.common.module import unwrap_model
from mindspeed_mm.models.contract import ModelOutline, Staged, as_staged, as_trainable
from mindspeed_mm.models.megatron.layers import use_fused_norms
from mindspeed_mm.models.megatron.memory import chunk_mlps, swap_attention
from mindspeed_mm.models.transformers.inferred import traits_of
from mindspeed_mm.models.transformers.meta_model import build_from_meta
from mindspeed_mm.monitor.flops import flops_model
from mindspeed_mm.optimizer.backward_factor import BackwardFactor
from mindspeed_mm.optimizer.groups import IsIdle
from mindspeed_mm.optimizer.guarded import GuardedOptimizer
from mindspeed_mm.optimizer.loss_scale import build_loss_scale
from mindspeed_mm.optimizer.megatron import build_megatron_optimizer, step_busy_groups, sum_of_squares, trained_names
from mindspeed_mm.optimizer.schedule import Schedule, schedule_options
from mindspeed_mm.parallel.sizes import ParallelSizes
from mindspeed_mm.parallel.world import RankSet, World, limit_waiting, start_world
from mindspeed_mm.utils.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class PTDBackend:
    """Megatron-core's schedules, DistributedDataParallel and optimizers."""

    world: World
    outline: ModelOutline | None = None
    optimizer: Any
    schedule: Schedule
    engine: StepEngine
    _stages: list[Staged]

    def setup(self, run: Run) -> None:
        """Start the process groups and seed."""
        self.described = run
        self.compute_dtype = "bf16" if run.precision.bf16 else "fp16" if run.precision.fp16 else "fp32"
        whole = start_world(run.parallel.distributed_backend, timeout_minutes=run.parallel.distributed_timeout_minutes)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            run.parallel.tensor_model_parallel_size,
            run.parallel.pipeline_model_parallel_size,
            run.parallel.virtual_pipeline_model_parallel_size,
            distributed_timeout_minutes=run.parallel.distributed_timeout_minutes,
            # a tied embedding need not be on the first stage: the backend sums its copies' gradients itself
            get_embedding_ranks=lambda ranks: ranks[:1],
            get_position_embedding_ranks=lambda ranks: ranks[:1],
        )
        self.world = world_of_megatron(whole)
        self.sizes = sizes_of(run.parallel, _DTYPES[self.compute_dtype])
        tensor_parallel.model_parallel_cuda_manual_seed(run.process.seed)
        self.loss_scale = build_loss_scale(run.precision, self.compute_dtype)
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
            sizes=self.sizes,
            lora=run.lora,
            pipeline_rank=self.world.pipeline_rank,
            loss_group=self.world.batch.group,
        )

    def preparation(self, model_provider: ModelProvider) -> Preparation | None:
        """See the protocol."""
        context = replace(self._build_context(load_weights=False), lora=None)
        with build_context(context), torch.device("meta"):
            return as_staged(_call_provider(model_provider, self.sizes, 0)).prepare

    def build_model(
        self, model_provider: ModelProvider, *, load_weights: bool, base: str | None = None
    ) -> list[nn.Module]:
        """Build this rank's chunks, fill them and wrap them in Megatron's DistributedDataParallel.

        Args:
            model_provider: the user's callback; pre_process, post_process and vp_stage are passed by name if it takes
                them.
            load_weights: load pretrained weights; False if a checkpoint will be loaded afterwards.
            base: the folder that they are loaded from; None: the one that the model names.

        Raises:
            ConfigError: Megatron's schedules can't run a chunk.
        """
        run = self.described
        context = self._build_context(load_weights)
        accelerator.current().manual_seed(run.process.seed)
        with build_context(context), self.world.device:
            chunks = [_call_provider(model_provider, self.sizes, i) for i in range(self.sizes.virtual_pipeline or 1)]
        self._stages = [as_staged(chunk) for chunk in chunks]
        self._meta_model = self._stages[0].meta_model
        if run.lora is not None:
            _refuse_own_model(self._stages[0])
        for stage in self._stages:
            stage.set_model_type(ModelType.encoder_or_decoder)
            if self._meta_model is not None:
                materialize_chunk(stage.model, self.world.device)
            if run.kernels.use_fused_rmsnorm:
                use_fused_norms(stage.model)
            check_packing(stage.model, run.batch)
            if run.parallel.swap_attention:
                swap_attention(stage.model)
            if run.parallel.chunk_mlp_tokens is not None:
                chunk_mlps(stage.model, run.parallel.chunk_mlp_tokens)
        report_modules_trained_in_eval_mode(chunks)
        self._config = chunks[0].config
        for chunk in chunks:
            chunk.config = self._config  # the schedule and every wrapper must read the same options
        self.chunks = chunks
        self._stored = MegatronState(chunks, self._meta_model, self.world, run.lora, run.process.seed)
        if run.checkpoint.no_strict_load and self._meta_model is not None:
            self._stored.draw_weights(run.process.seed)  # tensors that files may lack must be initialised first
        if load_weights:
            self._fill(base)
        accelerator.current().manual_seed(run.process.seed + 100003 * self.world.batch.rank)
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        timeout_minutes = run.parallel.distributed_timeout_minutes
        self._tied = tied_embedding(self._stages, self.world, pipeline, timeout_minutes)
        self._tied.align()
        self.model = [
            DistributedDataParallel(self._config, self._ddp_config(), chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(chunks)
        ]
        limit_waiting(timeout_minutes)
        self.backward_factor = BackwardFactor(
            self.loss_scale,
            estimates=self.compute_dtype == "fp16" and not self._has_losses_between_stages(),
            ranks=self.world.gradients,
        )
        if self.compute_dtype == "fp16":
            for stage in self._stages:
                stage.set_expected_factor(self.backward_factor.expected)
        self._connect_schedule()
        meta_model = self._meta_model
        self._flops_model = None if meta_model is None else flops_model(meta_model, traits_of(meta_model))
        self.outline = None if meta_model is None else as_trainable(meta_model).outline
        return self.model

    def build_optimizer(self, model: list[nn.Module], run: Run) -> Any:
        """Build Megatron's optimizer over the framework's parameter groups, and its schedule."""
        trained = sorted(set().union(*self.gather_objects(trained_names(self._stages))))
        self.optimizer = build_megatron_optimizer(self.model, self._stages, run, self.sizes.params_dtype, trained)
        self.schedule = Schedule(self.optimizer, schedule_options(run))
        self._guard = None if self.optimizer.is_stub_optimizer else GuardedOptimizer(self.optimizer.optimizer)
        self.engine = StepEngine(
            self,
            self.world,
            modules=self.model,
            loss_scale=self.loss_scale,
            backward_factor=self.backward_factor,
            schedule=self.schedule,
            clip_grad=run.optimizer.clip_grad,
        )
        self._stored.attach(self.optimizer)
        self._snapshots = self._stored.snapshots(
            save_optimizer=not run.checkpoint.no_save_optim, save_rng=not run.checkpoint.no_save_rng
        )
        return self.optimizer

    def forward_backward(self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int) -> None:
        """See the protocol."""
        self.engine.forward_backward(forward_step, data_iterator, num_microbatches)

    def step(self, counts: BatchCounts, stop_requested: bool, log_requested: bool = False) -> LaunchedStep:
        """See the protocol."""
        return self.engine.step(counts, stop_requested, log_requested)

    @torch.no_grad()
    def evaluate(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int
    ) -> tuple[float, float]:
        """See the protocol."""
        self._gather_parameters()
        result = self.engine.evaluate(forward_step, data_iterator, num_microbatches)
        self._resume_overlap()
        return result

    @contextmanager
    def generation(self, *, averaged: bool = False) -> Iterator[Generation]:
        """See the protocol; the model is transformers', with an export's weights, and lives as long as the context.

        Of the ranks that read the same rows one has it. There are no averages on this backend.
        """
        assert self._meta_model is not None, "the recipe's model is one of transformers"
        batch = self.world.batch
        with torch.no_grad(), accelerator.current().small_products(), kept_random_states():
            model = build_from_meta(self._meta_model, self.sizes.params_dtype) if self.world.counts_rows else None
            self._gather_parameters()
            self._stored.fill_whole(model)
            self._resume_overlap()
            yield Generation(model, batch.rank, batch.size, in_lockstep=False)

    def run(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int, *, forward_only: bool
    ) -> None:
        """Run Megatron's schedule over micro-batches; see `Executor`."""
        if not forward_only:
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()

        def step(iterator: Iterator[Any], chunk: nn.Module) -> tuple[Any, Any]:
            output, loss_func = forward_step(iterator, chunk)

            def loss_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                loss = self.engine.add(loss_func(tensor), forward_only=forward_only)
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}  # the schedule divides nothing

            return output, loss_of

        chunks = len(self.model)
        iterators: Any = data_iterator if chunks == 1 else share_batches(data_iterator, chunks)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators,
            model=self.model if chunks > 1 else self.model[0],
            num_microbatches=num_microbatches,
            seq_length=self._seq_length(),
            micro_batch_size=self.described.batch.micro_batch_size,
            forward_only=forward_only,
        )

    def local_norm(self) -> torch.Tensor:
        """See `Executor`."""
        self.optimizer.prepare_grads()
        squared = sum_of_squares(self.optimizer, accelerator.current().sum_dtype, self.world.device)
        # without the distributed optimizer every data-parallel rank has the whole gradient
        return squared if self.described.parallel.use_distributed_optimizer else squared / self.world.batch.size

    def apply(self, factor: torch.Tensor, finite: torch.Tensor, is_idle: IsIdle) -> None:
        """See `Executor`."""
        if self._guard is None:
            self.optimizer.step_with_ready_grads()  # nothing is trained here, but the parameter gather is collective
        else:
            step_busy_groups(self.optimizer, self._guard, factor, finite, is_idle)

    def finish_step(self, *, stepped: bool) -> None:
        """See `Executor`."""
        if self._guard is not None:
            self._guard.finish_step(stepped=stepped)

    def flops(self, counts: BatchCounts) -> float | None:
        """See `Executor`."""
        return None if self._flops_model is None else self._flops_model.of(counts)

    def gather_objects(self, value: Value) -> list[Value]:
        """See the protocol."""
        gathered = [value] * self.world.size
        dist.all_gather_object(gathered, value, group=self.world.host.group)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def snapshot(self, extra: dict[str, Any], *, detached: bool) -> Snapshot:
        """See the protocol."""
        states = {
            **self.engine.state_dict(),
            "source": self._stages[0].weights.absolute_source,
            "lora": self._adapter_config(),
            "base": self._base,
        }
        return self._snapshots.take({**extra, **states}, detached=detached)

    def load(self, directory: Path, *, optimizer: bool, rng: bool, schedule: bool) -> dict[str, Any]:
        """See the protocol."""
        extra = self._stored.load(
            directory, optimizer=optimizer, rng=rng, strict=not self.described.checkpoint.no_strict_load
        )
        if schedule:
            self.engine.load_state_dict(extra)
        return extra

    def load_weights(self, directory: Path) -> None:
        """See the protocol."""
        run = self.described
        if run.lora is not None:
            self._base = str(directory.absolute())
        self._stored.load_weights(
            directory,
            strict=not run.checkpoint.no_strict_load,
            downcast=run.precision.downcast_to_bf16,
            allow_pickle=run.checkpoint.allow_unsafe_pickle,
        )

    def export_hf(self, directory: Path, *, is_final: bool = True) -> None:
        """See the protocol."""
        self._gather_parameters()
        origin = self._stages[0].weights
        if (config := self._adapter_config()) is not None:
            self._stored.export_adapters(directory, config, origin.source)
        else:
            self._stored.export_hf(directory, origin.source, origin.dtype)
        self._resume_overlap()

    def _adapter_config(self) -> dict[str, Any] | None:
        options, plan = self.described.lora, self._stages[0].adapter_plan
        if options is None or plan is None:
            return None
        source = options.base or self._stages[0].weights.absolute_source
        return adapter_config(self._meta_model, options, plan, source)

    def _fill(self, base: str | None) -> None:
        directory = Path(base) if base is not None else self._stages[0].weights.pending
        if directory is not None:
            self.load_weights(directory)
        elif self._meta_model is not None:
            self._stored.draw_weights(self.described.process.seed)

    def _ddp_config(self) -> DistributedDataParallelConfig:
        run = self.described
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,  # the effect of --accumulate-allreduce-grads-in-fp32, for every compute dtype
            overlap_grad_reduce=run.parallel.overlap_grad_reduce,
            overlap_param_gather=run.parallel.overlap_param_gather,
            use_distributed_optimizer=run.parallel.use_distributed_optimizer,
            check_for_nan_in_grad=False,  # the step engine skips such a step and reports it
            average_in_collective=False,
        )

    def _connect_schedule(self) -> None:
        """Set the callbacks of Megatron's schedules."""
        config = self._config
        config.finalize_model_grads_func = self._finalize_gradients
        config.grad_scale_func = self.backward_factor.apply
        if self.described.parallel.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.model]
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]

    def _has_losses_between_stages(self) -> bool:
        """Whether stages before the last one have losses: MoE load balancing or multi-token prediction."""
        own = (getattr(self._config, name, None) for name in ("num_moe_experts", "mtp_num_layers"))
        return any(own) and self.sizes.pipeline > 1

    def _finalize_gradients(self, model: list[nn.Module], num_tokens: torch.Tensor | None = None, **_: object) -> None:
        """Sum over data-parallel ranks, over sequence-parallel ranks, and over the two copies of a tied embedding."""
        finalize_model_grads(self.model, None)
        self._tied.sum_gradients()

    def _seq_length(self) -> int | None:
        """Return the padded length of rows: with sequence parallelism a multiple of the tensor-parallel size."""
        length = self.described.batch.seq_length
        if length is None or not self.sizes.sequence_parallel:
            return length
        return -(-length // self.sizes.tensor) * self.sizes.tensor

    def _gather_parameters(self) -> None:
        """Gather the last step's parameters on every rank; with overlap they are gathered only when a layer runs."""
        if self.described.parallel.overlap_param_gather:
            for chunk in self.model:
                chunk.disable_forward_pre_hook()

    def _resume_overlap(self) -> None:
        if self.described.parallel.overlap_param_gather:
            for chunk in self.model:
                chunk.enable_forward_pre_hook()


def world_of_megatron(world: World) -> World:
    """Return `world` with this process's ranks in Megatron's groups, which must be initialised."""
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    batch = RankSet(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_group(),
    )
    return replace(
        world,
        dims=Dims.of(world.size, pp=pp, tp=tp),
        batch=batch,
        gradients=batch,
        tensor=RankSet(
            parallel_state.get_tensor_model_parallel_rank(), tp, parallel_state.get_tensor_model_parallel_group()
        ),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
    )


def sizes_of(parallel: Parallel, params_dtype: torch.dtype) -> ParallelSizes:
    """Return the parallel sizes and the recompute options that the flags set."""
    recompute = {
        "recompute_granularity": parallel.recompute_granularity,
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
        "recompute_modules": parallel.recompute_modules,
    }
    return ParallelSizes(
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=params_dtype,
        variable_seq_lengths=parallel.variable_seq_lengths,
        recompute={k: v for k, v in recompute.items() if v is not None},
    )


@torch.no_grad()
def materialize_chunk(chunk: nn.Module, device: torch.device) -> None:
    """Allocate storage for parameters on the meta device; they keep the attributes that Megatron-core set on them.

    Raises:
        ConfigError: a buffer is on the meta device.
    """
    for module in chunk.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                empty = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
                empty.__dict__.update(param.__dict__)
                module._parameters[name] = empty
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise ConfigError(
                    f"{type(module).__name__}.{name}: a buffer was built on the meta device and has no value; build it "
                    "on the host"
                )


def share_batches(iterator: Iterator[Any], readers: int) -> list[Iterator[Any]]:
    """Return an iterator for each chunk of a rank; each yields every micro-batch of `iterator`.

    A micro-batch is read when the first chunk needs it, and released when all chunks have received it.
    """
    waiting: list[deque[Any]] = [deque() for _ in range(readers)]

    def read(own: deque[Any]) -> Iterator[Any]:
        while True:
            if not own:
                batch = next(iterator)
                for queue in waiting:
                    queue.append(batch)
            yield own.popleft()

    return [read(queue) for queue in waiting]


def _refuse_own_model(stage: Staged) -> None:
    """Raise if a stage has inserted no adapters.

    Raises:
        ConfigError: it is of a user's own class.
    """
    if stage.adapter_plan is None:
        raise ConfigError(
            f"--lora-target-modules: {stage.name}, which model_provider returned, inserts no adapters; on this backend "
            "only models that model.json describes do; leave the lora flags out, or add --use-torch-fsdp2"
        )


def _call_provider(provider: ModelProvider, sizes: ParallelSizes, chunk: int) -> Any:
    virtual = sizes.virtual_pipeline
    stage = chunk if virtual else None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=virtual is None, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=virtual is None, vp_stage=stage)
    offered = {"pre_process": first, "post_process": last, "vp_stage": stage}
    taken = inspect.signature(provider).parameters
    chunk_model = provider(**{k: v for k, v in offered.items() if k in taken})
    return unwrap_model(chunk_model)
