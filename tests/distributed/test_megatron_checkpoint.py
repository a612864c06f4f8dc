"""Weights, checkpoints and exports of the Megatron backend: any layout goes on from what any other has written.

What a layout holds is put together here by other means than the package's: whole parameters over tensor-parallel ranks,
split by `ParamMapping.split`; what data-parallel ranks own by Megatron's own maps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.runs import run_of
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir
from tests.support.tiny_families import weights_in
from tests.support.workers import RankPool

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
# (model, layout)
EXPORTS = (
    ("tied", "TP2 PP2"),
    ("tied", "PP2 VPP2 DP2 distributed"),
    ("untied", "DP4 distributed bf16"),
    ("untied", "TP4 bf16"),
    ("vl", "TP2 PP2"),
    ("vl", "DP4 distributed bf16"),
)
DRAWN = {"tied": "TP2 PP2", "untied": "TP4 bf16", "vl": "PP2 VPP2 DP2 distributed"}


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
        from mindspeed_mm.parallel.meshes import parameter_mesh
        from mindspeed_mm.parallel.world import start_world

        self.world = start_world("gloo")
        torch.manual_seed(dist.get_rank())
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hf_dir)).float()
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, mesh=parameter_mesh(Dims.of(RANKS, sharding_size="auto")))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

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


def every_layout_resumes_from_every_other(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """Save in one layout, load in the next, step, save …; then to FSDP2 and back. What differs, by transition."""
    found: dict[str, list[str]] = {}
    names = list(LAYOUTS)
    run = Run(hf_dir, LAYOUTS[names[0]])
    run.step(0)
    run.step(1)
    for number, name in enumerate(names[1:], start=2):
        before, directory = run.whole(), folder / f"chain{number}"
        run.save(directory)
        run = Run(hf_dir, LAYOUTS[name], seed=SEED + number)
        extra = run.load(directory)
        found[f"{names[number - 2]} → {name}"] = differences(run.whole(), before)
        masters = {k: v for k, v in before.items() if k.startswith("model.")}
        dtype = getattr(torch, LAYOUTS[name].dtype)
        found[f"parameters of {name}"] = differences(
            run.whole_parameters(), {k: v.to(dtype) for k, v in masters.items()}
        )
        found[f"state of {name}"] = [] if extra["iteration"] == 1 and extra["has_optimizer"] else [json.dumps(extra)]
        run.step(number)
    before = run.whole()
    run.save(folder / "to-fsdp2")
    sharded = Sharded(hf_dir)
    sharded.load(folder / "to-fsdp2")
    found[f"{names[-1]} → FSDP2"] = differences(sharded.whole(), before)
    sharded.save(folder / "from-fsdp2")
    run = Run(hf_dir, LAYOUTS["TP2 DP2 distributed"], seed=None)
    run.load(folder / "from-fsdp2")
    found["FSDP2 → TP2 DP2 distributed"] = differences(run.whole(), before)
    return found


def stages_to_tensor_parallel_ranks(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    run = Run(hf_dir, LAYOUTS["PP2 VPP2 DP2 distributed"])
    run.step(0)
    before = run.whole()
    run.save(folder / "stages")
    run = Run(hf_dir, LAYOUTS["TP4 bf16"], seed=None)
    run.load(folder / "stages")
    return {"all": differences(run.whole(), before)}


def steps_that_differ(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """Torch counts steps by parameter, Megatron by group."""
    from unittest import mock

    sharded = Sharded(hf_dir)
    sharded.whole()  # makes the optimizer's state
    for number, state in enumerate(sharded.optimizer.state.values()):
        state["step"].fill_(7 if number % 2 else 9)
    sharded.save(folder / "steps")
    run = Run(hf_dir, LAYOUTS["TP2 PP2"], seed=None)
    from mindspeed_mm.checkpoint.megatron import load as megatron_load

    with mock.patch.object(megatron_load, "notice") as notice:
        run.load(folder / "steps")
    steps = {group["step"] for group in run.optimizer.param_groups}
    return {"steps": steps, "said": notice.call_args.args[0]}


def frozen_parts_and_momentum(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """What is not trained is saved without optimizer state, also where a stage trains nothing; SGD's state is saved."""
    found = {}
    first_half = ("embed_tokens", "layers.0.", "layers.1.")
    pairs = {
        "frozen, to a stage that trains nothing": (
            Layout(distributed=True, dtype="bfloat16", frozen=first_half),
            Layout(tensor=2, pipeline=2, frozen=first_half),
        ),
        "frozen, back": (
            Layout(pipeline=2, virtual=2, distributed=True, frozen=first_half),
            Layout(tensor=2, distributed=True, frozen=first_half),
        ),
        "SGD": (Layout(tensor=2, pipeline=2, optimizer="sgd"), Layout(optimizer="sgd", dtype="bfloat16")),
    }
    for name, (one, other) in pairs.items():
        run = Run(hf_dir, one)
        run.step(0)
        run.save(folder / name)
        before = run.whole()
        run = Run(hf_dir, other, seed=SEED + 1)
        run.load(folder / name)
        found[name] = differences(run.whole(), before)
        trained = [k for k in before if k.startswith("optimizer.") and any(part in k for part in first_half)]
        assert bool(trained) == (name == "SGD")
    return found


def detached_snapshots_keep_their_moment(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """Steps taken before a detached snapshot is written don't reach it, the second time neither."""
    moments = {}
    for name in ("TP2 DP2 distributed", "PP2 DP2 fp16"):
        run = Run(hf_dir, LAYOUTS[name])
        snapshots = run.stored.snapshots(save_optimizer=True, save_rng=False)
        for number in (0, 2):
            run.step(number)
            moments[f"{name} {number}"] = before = run.whole()
            snapshot = snapshots.take({"iteration": number}, detached=True)
            run.step(number + 1)
            assert differences(run.whole(), before)
            write(snapshot, folder / f"{name} {number}")
    other = Run(hf_dir, LAYOUTS["DP4"], seed=None)
    found = {}
    for name, moment in moments.items():
        other.load(folder / name)
        found[name] = differences(other.whole(), moment)
    return found


def misfits(folder: Path, hf_dir: Path, smaller: Path) -> dict[str, str]:
    """What is said of checkpoints that don't fit, by case; whatever is refused changes nothing."""
    from mindspeed_mm.utils.errors import CheckpointError

    run = Run(hf_dir, LAYOUTS["TP2 DP2 distributed"])
    run.step(0)
    run.save(folder / "whole")
    snapshots = run.stored.snapshots(save_optimizer=False, save_rng=False)
    write(snapshots.take({"iteration": 1}, detached=False), folder / "no optimizer")
    saved = run.whole()
    said = {}
    shallow = Run(smaller, LAYOUTS["TP2 PP2"])
    narrow = Run(hf_dir, Layout(tensor=2, pipeline=2, frozen=("layers.0.",)), seed=SEED + 1)
    cases: dict[str, tuple[Run, str]] = {
        "another model": (shallow, "whole"),
        "frozen": (narrow, "whole"),
        "no optimizer": (narrow, "no optimizer"),
    }
    for name, (run, directory) in cases.items():
        before = {n: p.detach().clone() for c in run.chunks for n, p in c.named_parameters()}
        with pytest.raises(CheckpointError) as error:
            run.load(folder / directory)
        said[name] = str(error.value)
        for chunk in run.chunks:
            assert all(torch.equal(before[n], p) for n, p in chunk.named_parameters()), name
    narrow.load(folder / "whole", strict=False)
    found = narrow.whole()
    said["not strict"] = " ".join(k for k, v in found.items() if not torch.equal(v, saved[k]))
    narrow.load(folder / "no optimizer", optimizer=False, rng=False)
    kept = narrow.whole()
    said["without optimizer"] = " ".join(k for k in found if not torch.equal(kept[k], found[k]))
    return said


def weights_go_in_and_out(target: Path, hf_dir: Path, layout: str) -> None:
    """Load a directory and export it."""
    Run(hf_dir, LAYOUTS[layout], weights=hf_dir).stored.export_hf(target, str(hf_dir), None)


def weights_of_a_checkpoint(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """A torch_dcp folder as weights, into what the optimizer steps in higher precision too; rounded if asked for."""
    found = {}
    run = Run(hf_dir, LAYOUTS["TP2 PP2"])
    run.save(folder / "weights")
    before = {k: v for k, v in run.whole().items() if k.startswith("model.")}
    run = Run(hf_dir, LAYOUTS["DP4 distributed bf16"], weights=folder / "weights")
    found["torch_dcp"] = differences(run.whole(), before)
    run.stored.load_weights(folder / "weights", strict=True, downcast=True, allow_pickle=False)
    found["rounded"] = differences(run.whole(), {k: v.bfloat16().float() for k, v in before.items()})
    return found


def drawn_weights(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """Random weights are those that one model, built whole with the same seed, draws."""
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.transformers_model import TransformersModel

    with build_context(BuildContext(seed=SEED)):
        whole = TransformersModel({"init_from_hf_path": str(hf_dir), "train_from_scratch": True}).model
    expected = {f"model.{n}": p.detach() for n, p in whole.named_parameters()}
    layout = DRAWN[hf_dir.name]
    return {layout: differences(Run(hf_dir, LAYOUTS[layout]).whole(), expected)}


def random_states(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """Megatron-core's states come back where the layout is the same; else it is said that they don't."""
    from unittest import mock

    from mindspeed_mm.checkpoint import rng

    def draws() -> list[float]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return [*torch.rand(3).tolist(), *torch.rand(2).tolist()]

    run = Run(hf_dir, LAYOUTS["TP2 PP2"])
    draws()
    run.save(folder / "random")
    expected = draws()
    run = Run(hf_dir, LAYOUTS["TP2 PP2"])
    draws()
    draws()  # one more than before the save: only what is loaded makes them equal
    assert draws() != expected
    run.load(folder / "random")
    same = draws() == expected
    run = Run(hf_dir, LAYOUTS["DP4"])
    with mock.patch.object(rng, "notice") as notice:
        run.load(folder / "random")
    return {"same": same, "said": notice.call_args.args[0]}


def weights_that_are_missing(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """A file without a part of a fused tensor: refused, or else what is missing keeps the values drawn before."""
    from mindspeed_mm.utils.errors import CheckpointError

    source = weights_in(hf_dir)
    missing = "model.layers.1.self_attn.k_proj.weight"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v for k, v in source.items() if k != missing}, folder / "model.safetensors")
    dist.barrier()
    drawn = Run(hf_dir, LAYOUTS["DP4 distributed bf16"]).whole()
    run = Run(hf_dir, LAYOUTS["DP4 distributed bf16"], weights=folder, strict=False)
    expected = {f"model.{k}": v for k, v in source.items()} | {f"model.{missing}": drawn[f"model.{missing}"]}
    with pytest.raises(CheckpointError) as error:
        run.stored.load_weights(folder, strict=True, downcast=False, allow_pickle=False)
    return {"different": differences(run.whole(), expected), "said": str(error.value)}


def models_without_transformers(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """A chunk without `param_mapping` is resumed under its own names, where as many tensor-parallel ranks split it."""
    from mindspeed_mm.utils.errors import CheckpointError

    run = Run(hf_dir, LAYOUTS["TP2 DP2 distributed"], plain=True)
    for number, param in enumerate(run.chunks[0].parameters()):
        torch.manual_seed(number * 10 + run.tensor_rank * getattr(param, "tensor_model_parallel", 0))
        param.data.normal_()
        param.main_grad.normal_()
    run.optimizer.prepare_grads()
    run.optimizer.step_with_ready_grads()
    run.save(folder / "plain")
    again = Run(hf_dir, Layout(tensor=2, dtype="bfloat16"), plain=True)
    again.load(folder / "plain")
    expected = {n: p.detach().bfloat16() for n, p in run.chunks[0].named_parameters()}
    different = differences(dict(again.chunks[0].named_parameters()), expected)
    with pytest.raises(CheckpointError) as error:
        Run(hf_dir, LAYOUTS["DP4"], plain=True).load(folder / "plain")
    return {"different": different, "said": str(error.value)}


def who_writes(folder: Path, hf_dir: Path) -> dict[str, list[int]]:
    """Bytes of the tensors that each rank wrote, by layout."""
    sizes = {}
    for name in ("DP4", "TP2 DP2 distributed", "TP2 PP2"):
        directory = folder / f"sizes {name}"
        Run(hf_dir, LAYOUTS[name]).save(directory)
        sizes[name] = [sum(p.stat().st_size for p in directory.glob(f"__{r}_*.distcp")) for r in range(RANKS)]
    return sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    tiny_qwen3_dir(folder / "tied", tie=True, deep=True)
    tiny_qwen3_dir(folder / "untied", tie=False, deep=True)
    tiny_qwen3_dir(folder / "smaller", tie=False, deep=False)
    tiny_qwen2_5_vl_dir(folder / "vl", deep=True)
    return folder


@pytest.fixture
def ranks(megatron_pools: dict[int, RankPool]) -> RankPool:
    return megatron_pools[RANKS]


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (every_layout_resumes_from_every_other, ("tied",)),
        (stages_to_tensor_parallel_ranks, ("untied", "vl")),
        (frozen_parts_and_momentum, ("tied",)),
        (detached_snapshots_keep_their_moment, ("tied",)),
        (weights_of_a_checkpoint, ("untied",)),
        (drawn_weights, ("tied", "untied", "vl")),
    ],
    ids=lambda value: getattr(value, "__name__", ", ".join(value) if isinstance(value, tuple) else ""),
)
def test_every_tensor_arrives_bit_equal(
    case: Any, kinds: tuple[str, ...], ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    for kind in kinds:
        for found in ranks.run(case, tmp_path / kind, folder / kind, timeout=120):
            assert found
            for what, different in found.items():
                assert not different, what


def test_exports_hold_what_was_loaded(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    import transformers

    for kind, layout in EXPORTS:
        target = tmp_path / f"{kind}, {layout}"
        ranks.run(weights_go_in_and_out, target, folder / kind, layout)
        source, exported = weights_in(folder / kind), weights_in(target)
        assert exported.keys() == source.keys(), target.name
        same = [v.dtype == source[k].dtype and torch.equal(v, source[k]) for k, v in exported.items()]
        assert all(same), target.name
    for kind, name in (("tied", "tied, TP2 PP2"), ("untied", "untied, TP4 bf16")):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == (kind == "tied")


def test_what_does_not_fit_is_refused_and_changes_nothing(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    said, *others = ranks.run(misfits, tmp_path, folder / "untied", folder / "smaller")
    assert all(other == said for other in others)
    assert "does not fit this model: model.model.layers.0.self_attn.o_proj.weight has" in said["another model"]
    assert "is it another model, or another config.json?" in said["another model"]
    assert "optimizer.model.layers.0." in said["frozen"] and "add --no-load-optim" in said["frozen"]
    assert "saved with --no-save-optim" in said["no optimizer"]
    assert not said["not strict"] and not said["without optimizer"]


def test_random_states_come_back_in_the_same_layout(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for found in ranks.run(random_states, tmp_path, folder / "tied"):
        assert found["same"]
        assert "4 ranks (pipeline parallelism 2, tensor parallelism 2), this run has 4 ranks" in found["said"]


def test_steps_of_a_group_that_differ_are_told(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for found in ranks.run(steps_that_differ, tmp_path, folder / "untied"):
        assert found["steps"] == {9}
        assert "took 7 to 9 steps" in found["said"]


def test_what_files_lack_keeps_its_values(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for found in ranks.run(weights_that_are_missing, tmp_path, folder / "untied"):
        assert not found["different"]
        assert "lacks 1 of Qwen3ForCausalLM's tensors: model.layers.1.self_attn.k_proj.weight" in found["said"]


def test_models_without_transformers_are_resumed_in_the_same_split(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    for found in ranks.run(models_without_transformers, tmp_path, folder / "untied"):
        assert not found["different"]
        assert "saved with --tensor-model-parallel-size 2, this run has 1" in found["said"]


def test_ranks_share_the_writing(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for name, sizes in ranks.run(who_writes, tmp_path, folder / "untied")[0].items():
        assert max(sizes) < 1.35 * sum(sizes) / RANKS, (name, sizes)
