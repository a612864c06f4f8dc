"""Training states of the Megatron backend in any layout of four ranks, put together by other means than the package's.

Whole parameters are put together over tensor-parallel ranks and split by `ParamMapping.split`; what data-parallel ranks
own by Megatron's own maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.runs import run_of

RANKS = 4
SEED = 77


@dataclass(frozen=True)
class Layout:
    """How four ranks split a model."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    distributed: bool = False
    dtype: str = "float32"
    optimizer: str = "adam"
    frozen: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        return self.pipeline * (self.virtual or 1)


LAYOUTS = {
    "TP2 PP2": Layout(tensor=2, pipeline=2),
    "TP2 DP2 distributed": Layout(tensor=2, distributed=True),
    "PP2 VPP2 DP2 distributed": Layout(pipeline=2, virtual=2, distributed=True),
    "DP4": Layout(),
    "DP4 distributed bf16": Layout(distributed=True, dtype="bfloat16"),
    "TP4 bf16": Layout(tensor=4, dtype="bfloat16"),
    "PP2 DP2 fp16": Layout(pipeline=2, dtype="float16"),
}


class Run:
    """A model in a layout, with its optimizer, on this rank."""

    def __init__(
        self,
        hf_dir: Path,
        layout: Layout,
        seed: int | None = SEED,
        weights: Path | None = None,
        strict: bool = True,
        plain: bool = False,
    ) -> None:
        """
        Args:
            seed, weights, strict: of random weights, or where they are, and whether all of them must be there.
            plain: chunks of Megatron-core's own that know nothing of transformers.
        """
        from mindspeed_mm import accelerator

        accelerator.prepare_megatron()
        from megatron.core import parallel_state
        from megatron.core import tensor_parallel as mcore
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from transformers import AutoConfig

        from mindspeed_mm.backends.ptd import world_of_megatron
        from mindspeed_mm.checkpoint.megatron.state import MegatronState
        from mindspeed_mm.models.common.families import require_megatron_form
        from mindspeed_mm.models.common.modelzoo import ModelHub
        from mindspeed_mm.models.contract import Staged
        from mindspeed_mm.models.megatron.vlm_model import VLModel
        from mindspeed_mm.models.transformers.meta_model import build_meta_model
        from mindspeed_mm.optimizer.megatron import build_megatron_optimizer, trained_names
        from mindspeed_mm.parallel.pipeline import plan_stages
        from mindspeed_mm.parallel.sizes import ParallelSizes
        from mindspeed_mm.parallel.world import start_world

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        destroy_groups()
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, layout.virtual)
        mcore.model_parallel_cuda_manual_seed(SEED)
        self.layout, self.tensor_rank = layout, parallel_state.get_tensor_model_parallel_rank()
        dtype = getattr(torch, layout.dtype)
        sizes = ParallelSizes(layout.tensor, layout.pipeline, layout.virtual, params_dtype=dtype)
        config = AutoConfig.from_pretrained(hf_dir)
        family, text = require_megatron_form(config.model_type), config.get_text_config()
        vision = family.structure.count_tower_layers(config)
        stages = plan_stages(layout.pipeline, layout.virtual, text_layers=text.num_hidden_layers, vision_layers=vision)
        self.meta_model = build_meta_model(ModelHub.get(None, config), config)
        pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.chunks: list[Any] = [
            VLModel(config, family, sizes, stages[i * layout.pipeline + pipeline_rank], self.meta_model, vp_stage=i)
            for i in range(layout.virtual or 1)
        ]
        for chunk in self.chunks:
            for name, param in chunk.named_parameters():
                param.data.fill_(torch.nan)
                param.requires_grad_(not any(part in chunk.param_mapping(name).sources[0] for part in layout.frozen))
        if plain:
            self.chunks, seed = [chunk.text_decoder for chunk in self.chunks], None
        world = world_of_megatron(start_world("gloo"))
        self.stored = MegatronState(self.chunks, None if plain else self.meta_model, world)
        if seed is not None and (weights is None or not strict):
            self.stored.draw_weights(seed)
        if weights is not None:
            self.stored.load_weights(weights, strict=strict, downcast=False, allow_pickle=False)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=layout.dtype != "float32",
            use_distributed_optimizer=layout.distributed,
            bucket_size=8000,
        )
        config = self.chunks[0].config
        self.model = [
            DistributedDataParallel(config, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(self.chunks)
        ]
        run = run_of(
            optimizer=layout.optimizer,
            use_distributed_optimizer=layout.distributed,
            lr=0.01,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            sgd_momentum=0.9,
        )
        stages = [Staged(chunk) for chunk in self.chunks]
        names: list[Any] = [None] * RANKS
        dist.all_gather_object(names, trained_names(stages))
        self.optimizer = build_megatron_optimizer(self.model, stages, run, dtype, sorted(set().union(*names)))
        self.stored.attach(self.optimizer)

    def step(self, number: int) -> None:
        """Step with gradients that depend on transformers' names and `number` only."""
        shapes = {n: p.shape for n, p in self.meta_model.named_parameters()}
        for chunk in self.chunks:
            for name, param in chunk.named_parameters():
                if not param.requires_grad:
                    continue
                mapping, values = chunk.param_mapping(name), []
                for source in mapping.sources:
                    generator = torch.Generator().manual_seed(hash_of(f"{source} {number}"))
                    values.append(torch.randn(shapes[source], generator=generator))
                whole = mapping.join(values)
                if getattr(param, "tensor_model_parallel", False):
                    whole = whole.chunk(self.layout.tensor, dim=param.partition_dim)[self.tensor_rank]
                param.main_grad.copy_(whole)
        self.optimizer.prepare_grads()
        self.optimizer.step_with_ready_grads()

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor of the training state, whole, by its key in a checkpoint; the same on all ranks."""
        from mindspeed_mm.checkpoint.megatron.optimizer import main_parameters

        own: list[Any] = []
        mains = main_parameters(self.optimizer)
        for chunk in self.chunks:
            for name, param in chunk.named_parameters():
                dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
                place = (chunk.param_mapping(name), tuple(param.shape), dim, self.tensor_rank)
                if param not in mains:
                    if not (self.layout.distributed and param.requires_grad):
                        own.append((*place, "", (0, param.numel()), param.detach().flatten().float().numpy()))
                    continue
                s = mains[param]
                tensors = {"": s.main, **{k: v for k, v in s.state.items() if isinstance(v, torch.Tensor)}}
                own += [(*place, kind, s.span, t.detach().flatten().numpy()) for kind, t in tensors.items()]
                if "step" in s.group:
                    own.append((*place, "step", None, float(s.group["step"])))
        everyones: list[Any] = [None] * RANKS
        dist.all_gather_object(everyones, own)
        locals_: dict[Any, torch.Tensor] = {}
        whole: dict[str, torch.Tensor] = {}
        for mapping, shape, dim, tensor_rank, kind, span, flat in (item for items in everyones for item in items):
            if span is None:
                whole |= {f"optimizer.{source}.step": torch.tensor(flat) for source in mapping.sources}
                continue
            local = locals_.setdefault((mapping, shape, dim, kind, tensor_rank), torch.full(shape, torch.nan))
            part = local.view(-1)[span[0] : span[1]]
            assert part.isnan().all() or torch.equal(part, torch.from_numpy(flat)), "replicas or copies differ"
            part.copy_(torch.from_numpy(flat))
        counts = {n: p.shape[0] for n, p in self.meta_model.named_parameters()}
        for (mapping, shape, dim, kind, tensor_rank), local in locals_.items():
            if tensor_rank:
                continue
            if dim is not None:
                parts = [locals_[mapping, shape, dim, kind, r] for r in range(self.layout.tensor)]
                local = torch.cat(parts, dim)
            for source, value in zip(mapping.sources, mapping.split(local, [counts[s] for s in mapping.sources])):
                assert not value.isnan().any(), (source, kind)
                whole[f"optimizer.{source}.{kind}" if kind else f"model.{source}"] = value
        return whole

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters themselves, not what the optimizer steps."""
        found: list[Any] = []
        for chunk in self.chunks:
            for name, param in chunk.named_parameters():
                dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
                found.append((chunk.param_mapping(name), dim, param.detach().clone()))
        everyones: list[Any] = [None] * RANKS
        dist.all_gather_object(everyones, (self.tensor_rank, found))
        counts = {n: p.shape[0] for n, p in self.meta_model.named_parameters()}
        whole: dict[str, torch.Tensor] = {}
        by_rank: dict[int, list[Any]] = {}
        for rank, items in everyones:
            by_rank.setdefault(rank, []).extend(items)
        for number, (mapping, dim, value) in enumerate(by_rank[0]):
            if dim is not None:
                value = torch.cat([by_rank[r][number][2] for r in range(self.layout.tensor)], dim)
            for source, part in zip(mapping.sources, mapping.split(value, [counts[s] for s in mapping.sources])):
                whole[f"model.{source}"] = part
        return whole

    def save(self, directory: Path, **extra: Any) -> None:
        snapshots = self.stored.snapshots(save_optimizer=True, save_rng=True)
        write(snapshots.take({"iteration": 1, **extra}, detached=False), directory)

    def load(self, directory: Path, *, optimizer: bool = True, rng: bool = True, strict: bool = True) -> dict[str, Any]:
        return self.stored.load(directory, optimizer=optimizer, rng=rng, strict=strict)


def destroy_groups() -> None:
    """End the groups of earlier runs, each of which has threads of its own; a run before this one is used no more."""
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def write(snapshot: Any, directory: Path) -> None:
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    snapshot.write(directory, dist.group.WORLD)
    dist.barrier()


def hash_of(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode())


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Keys that only one has, or whose values are not bit-equal."""
    assert len(expected) > 10
    return sorted(found.keys() ^ expected.keys()) + [
        k for k, v in expected.items() if k in found and not torch.equal(found[k], v)
    ]


class Sharded:
    """The same model as the FSDP2 backend has it, over four ranks."""

    def __init__(self, hf_dir: Path) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoConfig, AutoModelForCausalLM

        from mindspeed_mm.configs.dims import Dims
        from mindspeed_mm.optimizer.elementwise import AdamW
        from mindspeed_mm.parallel.meshes import parameter_mesh
        from mindspeed_mm.parallel.world import start_world

        self.world = start_world("gloo")
        torch.manual_seed(dist.get_rank())
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hf_dir)).float()
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, mesh=parameter_mesh(Dims.of(RANKS, sharding_size="auto")))
        self.optimizer = AdamW(self.model.parameters(), fused=True)

    def load(self, directory: Path) -> dict[str, Any]:
        from mindspeed_mm.checkpoint.dcp import load

        return load(directory, model=self.model, optimizer=self.optimizer, load_rng=True, world=self.world)

    def save(self, directory: Path) -> None:
        from mindspeed_mm.checkpoint.snapshot import Snapshots

        snapshots = Snapshots(self.model, self.optimizer, save_rng=True, world=self.world)
        write(snapshots.take({"iteration": 2}, detached=False), directory)

    def whole(self) -> dict[str, torch.Tensor]:
        from mindspeed_mm.checkpoint.tensors import model_tensors, optimizer_tensors

        tensors = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        return {k: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for k, t in tensors.items()}
