"""A training loop with parallelism as one would write it by hand, to compare ours with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard


class HandWrittenLoop:
    """A plain transformers model with a layout's parallelism, fully_shard, exact token mean, clipping, AdamW."""

    def __init__(
        self, hf_dir: Path, world: Any, batches: list[dict[str, Any]], accumulation: int, cuts_rows: bool
    ) -> None:
        """
        Args:
            world: of our loop in the same process, whose groups and meshes are used.
            cuts_rows: whether tensor parallelism has sequence parallelism beside it.
        """
        import transformers
        from our_loop import endless
        from torch.distributed.fsdp import fully_shard

        from mindspeed_mm.parallel.context import ContextParallel
        from mindspeed_mm.parallel.experts import find_experts, split_experts
        from mindspeed_mm.parallel.fsdp2 import use_summed_gradients

        architecture = json.loads((hf_dir / "config.json").read_text())["architectures"][0]
        model = getattr(transformers, architecture).from_pretrained(hf_dir, dtype=torch.float32).train()
        dims, meshes = world.dims, world.meshes
        if dims.tp > 1:
            _split_layers(model, world, cuts_rows)
        if dims.splits_experts:
            experts = find_experts(model)
            split_experts(model, experts, meshes)
            for module in experts.values():
                fully_shard(module, mesh=meshes.expert_shards, shard_placement_fn=lambda parameter: Shard(1))
        self.context = None
        if dims.cp > 1:
            self.context = ContextParallel(model.model, architecture, dims)
            self.context.install(world)
        self.is_sharded = meshes.parameters.size() > 1
        if self.is_sharded:
            for layer in model.model.layers:
                fully_shard(layer, mesh=meshes.parameters)
            fully_shard(model, mesh=meshes.parameters)
            use_summed_gradients(model)
        self.optimizer = torch.optim.AdamW(_groups(model), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.model, self.world, self.batches, self.accumulation = model, world, endless(batches), accumulation
        self.losses: list[float] = []

    def step(self) -> None:
        """One optimizer step."""
        micro = [next(self.batches) for _ in range(self.accumulation)]
        targets = torch.tensor(float(sum((b["labels"][:, 1:] != -100).sum() for b in micro)))
        dist.all_reduce(targets, group=self.world.batch.group)
        total = torch.zeros(())
        for i, batch in enumerate(micro):
            if self.is_sharded:
                self.model.set_is_last_backward(i == len(micro) - 1)
            labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            if self.context is not None:
                shard = self.context.shard_of(torch.ones_like(labels))
                self.context.for_batch(shard, batch["input_ids"])
                labels = shard.cut(labels, 1, fill=-100)
            logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = self._sum_of_losses(logits.flatten(0, 1), labels.flatten()) / targets
            loss.backward()
            total += loss.detach()
        norm = _clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total, group=self.world.gradients.group)
        self.losses.append(total.item())
        norm.item()

    def _sum_of_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from mindspeed_mm.models.common.log_probabilities import target_log_probabilities

        if self.world.tensor.size == 1:
            return F.cross_entropy(logits.float(), labels, reduction="sum")
        own = (labels != -100).nonzero().squeeze(1)
        return -target_log_probabilities(logits[own], labels[own], self.world.tensor).sum()


def _split_layers(model: Any, world: Any, cuts_rows: bool) -> None:
    """Split attention, MLP and head over the tensor-parallel ranks."""
    from mindspeed_mm.parallel.tensor import apply_tensor_parallel
    from mindspeed_mm.parallel.tensor_plan import TensorTarget, plan_tensor_parallel
    from mindspeed_mm.parallel.tensor_sequence import find_regions

    target = TensorTarget(model, type(model).__name__, layers="model.layers", head="lm_head")
    split = plan_tensor_parallel(target, world.dims)
    split = replace(split, gathered=split.gathered - {"lm_head"})  # its logits stay parts, for the loss
    layers = {f"model.layers.{index}": layer for index, layer in enumerate(model.model.layers)}
    regions = find_regions(layers, split.blocks, (*split.columns, *split.rows)) if cuts_rows else None
    apply_tensor_parallel(model, split, world.meshes.tensor, regions)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups by weight decay and by mesh: a fused optimizer takes the tensors of one mesh at a time."""
    groups: dict[Any, dict[str, Any]] = {}
    for parameter in model.parameters():
        key = (parameter.dim() > 1, parameter.device_mesh if isinstance(parameter, DTensor) else None)
        groups.setdefault(key, {"params": [], "weight_decay": 0.1 if parameter.dim() > 1 else 0.0})
        groups[key]["params"].append(parameter)
    return list(groups.values())


def _clip(parameters: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    """Clip gradients on several meshes by their common norm, which is returned."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in own]) for own in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    for own in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(own, most, norm)
    return norm
