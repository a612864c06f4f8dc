"""Weights, checkpoints and exports of the Megatron backend, for any layout.

The files have transformers' names and the format of the FSDP2 backend, so that any layout of either backend can resume
from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.checkpoint import weights
from mindspeed_mm.checkpoint.adapters import export_adapters
from mindspeed_mm.checkpoint.dcp import read_state, refuse_state_misfits
from mindspeed_mm.checkpoint.dcp_reader import DcpReader
from mindspeed_mm.checkpoint.hf_export import export_gathered
from mindspeed_mm.checkpoint.lazy import Node, rounded, whole
from mindspeed_mm.checkpoint.megatron.adapters import first_adapters
from mindspeed_mm.checkpoint.megatron.export import GatheredParts
from mindspeed_mm.checkpoint.megatron.load import read_tensors
from mindspeed_mm.checkpoint.megatron.optimizer import (
    counts_steps,
    ensure_state,
    is_spread,
    main_parameters,
    state_names,
)
from mindspeed_mm.checkpoint.megatron.parts import (
    FlatRange,
    LocalParameter,
    MainParameter,
    Shape,
    local_parameters,
    master_weight_parts,
    parameter_parts,
    to_write,
)
from mindspeed_mm.checkpoint.megatron.snapshot import (
    checkpoint_tensors,
    model_parallel_random_state,
    restore_tracked_states,
)
from mindspeed_mm.checkpoint.megatron.weights import fill, random_weights
from mindspeed_mm.checkpoint.rng import restore_random_state
from mindspeed_mm.checkpoint.snapshot import Stored, TensorSnapshots
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.tensors import persistent_tensors, trained_tensors
from mindspeed_mm.checkpoint.weights import plan_weights, report_loaded
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.parallel.world import World
from mindspeed_mm.utils.errors import CheckpointError, ConfigError


@dataclass
class _Known:
    """The tensors of all ranks together.

    Attributes:
        shapes: shapes of the whole tensors, by name.
        optimizer_entries: names of the optimizer's state of each trained tensor.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    optimizer_entries: dict[str, tuple[str, ...]] = field(default_factory=dict)


class MegatronState:
    """Loads and saves the chunks of this rank and their optimizer, under transformers' names."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        meta_model: Any,
        world: World,
        lora: LoraOptions | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            chunks: not wrapped, with storage; `param_mapping` maps their parameters to transformers' tensors.
            meta_model: the transformers model on the meta device; None for other models, which are saved under their
                own names, and can't be loaded from or exported to the hub's layout.
            lora: adapters that chunks and meta model have; checkpoints hold only what is trained then. None: none.
            seed: of the adapters' first values.

        Raises:
            CheckpointError: the parameters of chunks and meta model don't fit together.
        """
        self._meta_model, self._world = meta_model, world
        self._shapes = None
        if meta_model is not None:
            self._shapes = {n: tuple(p.shape) for n, p in persistent_tensors(meta_model).items()}
        self._local = local_parameters(chunks, self._shapes, world.tensor.rank, world.dims.tp)
        self._lora, self._seed = lora, seed
        self._stored = [p for p in self._local if lora is None or p.param.requires_grad]
        self._layout = {"tensor": world.dims.tp, "pipeline": world.dims.pp}
        self._known = _Known()
        self._optimizer: Any = None
        self._values: dict[str, Node] = {}
        self._values_in_order = False

    def attach(self, optimizer: Any) -> None:
        """Attach Megatron's optimizer after it has been built; a collective.

        Its master weights are filled from the files, not from the rounded parameters.
        """
        self._optimizer = optimizer
        dtypes = {p.param.dtype for p in self._local}
        rounded_ones = {name: node for name, node in self._values.items() if node.dtype not in dtypes}
        fill(master_weight_parts(self._local, self._mains()), rounded_ones, in_order=self._values_in_order)
        self._values = {}
        self._known = self._gather_known()

    def snapshots(self, *, save_optimizer: bool, save_rng: bool) -> TensorSnapshots:
        """Return the object that takes snapshots of this rank's part of the state; see `Snapshots`."""

        def tensors() -> dict[str, Stored]:
            if save_optimizer:
                ensure_state(self._optimizer)
            return checkpoint_tensors(
                self._to_write(self._stored), self._mains(), self._known.shapes, with_optimizer=save_optimizer
            )

        return TensorSnapshots(
            tensors,
            random_states=model_parallel_random_state if save_rng else None,
            content={"has_optimizer": save_optimizer, "layout": self._layout},
            world=self._world,
        )

    def load(self, directory: Path, *, optimizer: bool, rng: bool, strict: bool) -> dict[str, Any]:
        """Read a checkpoint of any layout; returns `extra`.

        Args:
            optimizer, rng: whether the optimizer's state and the random states are read.
            strict: raise if a tensor is missing or left over.

        Raises:
            CheckpointError: a file or a tensor is missing or left over, or shapes differ; nothing is changed then.
        """
        extra = read_state(directory, with_optimizer=optimizer)
        self._refuse_other_split(directory, extra)
        reader = DcpReader(directory)
        wanted = {f"model.{name}": shape for name, shape in self._known.shapes.items()}
        if optimizer:
            for name, entries in self._known.optimizer_entries.items():
                shape = self._known.shapes[name]
                wanted |= {f"optimizer.{name}.{e}": () if e == "step" else shape for e in entries}
        refuse_state_misfits(reader, wanted, with_optimizer=optimizer, strict=strict)
        if optimizer:
            ensure_state(self._optimizer)
        read_tensors(reader, self._stored, self._mains(), with_optimizer=optimizer)
        if rng:
            restore_tracked_states(restore_random_state(directory, self._world, extra, self._layout))
        return extra

    def load_weights(self, directory: Path, *, strict: bool, downcast: bool, allow_pickle: bool) -> None:
        """Fill the chunks from a HF directory or a torch_dcp folder; each rank reads only its parts.

        Args:
            strict: raise if a tensor is missing or left over; False: missing ones keep their values.
            downcast: round floating-point values through bfloat16 (--downcast-to-bf16).
            allow_pickle: also unpickle `.bin` files that hold more than tensors.

        Raises:
            CheckpointError: tensors missing, left over, or of another shape; nothing has been changed then.
            ConfigError: the model is no transformers model.
        """
        if self._meta_model is None:
            raise ConfigError(f"'{directory}': the model is no transformers model, so it can't load these weights")
        source = open_weights(directory, allow_pickle=allow_pickle)
        plan = plan_weights(self._meta_model, source)
        weights.refuse_misfits(plan, self._meta_model, source, strict=strict)
        values = {
            n: rounded(node, torch.bfloat16) if downcast and node.dtype.is_floating_point else node
            for n, node in plan.values.items()
        }
        self._fill(values)
        report_loaded(source, plan)

    def draw_weights(self, seed: int) -> None:
        """Fill the chunks with random values that depend on `seed` and transformers' names, not on the layout."""
        self._fill(random_weights(self._meta_model, seed), in_order=True)

    def export_hf(self, directory: Path, source: str | None, dtype: torch.dtype | None) -> None:
        """Write the model in the hub's layout; a collective. Arguments and errors are those of `hf_export.export`."""
        if self._meta_model is None:
            raise ConfigError("--save-hf: the model is no transformers model, so it has no hub layout to be written in")
        export_gathered(self._meta_model, self._gathered(), directory, source, self._world.host.group, dtype)

    def export_adapters(self, directory: Path, config: Mapping[str, Any], source: str | None) -> None:
        """Write the adapters as a PEFT directory; a collective. See `checkpoint.adapters.export_adapters`."""
        every = trained_tensors(self._meta_model, tied_once=False)  # PEFT reads a tied weight by each of its names
        own = {id(tensor): name for name, tensor in trained_tensors(self._meta_model).items()}
        others: dict[str, list[str]] = {}
        for name, tensor in every.items():
            if own[id(tensor)] != name:
                others.setdefault(own[id(tensor)], []).append(name)
        fetcher = self._gathered(others)
        export_adapters(fetcher, list(every), directory, config, source, self._world.host.group)

    @torch.no_grad()
    def fill_whole(self, model: Any) -> None:
        """Fill a transformers model on each of the first stage's first tensor-parallel ranks; a collective.

        One tensor after the other is gathered on rank 0, and sent to the other data-parallel ranks.

        Args:
            model: of the meta model's structure; None on all other ranks.
        """
        fetcher, batch = self._gathered(stored_only=False), self._world.batch
        targets = persistent_tensors(model) if model is not None else {}
        for name, tensor in fetcher.tensors().items():
            fetcher.fetch({name}, owner=0)
            if model is None:
                continue
            if self._world.rank == 0:
                value = tensor.node.read(whole(tensor.shape)).to(self._world.device)
            else:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
            if batch.size > 1:
                dist.broadcast(value, group=batch.group, group_src=0)
            targets[name].copy_(value)

    def _gathered(
        self, others: Mapping[str, Sequence[str]] | None = None, *, stored_only: bool = True
    ) -> GatheredParts:
        """Return what gathers the tensors; a collective.

        Args:
            others: more names of tied tensors, by the first one.
            stored_only: only those that checkpoints hold; False: all.
        """
        assert self._shapes is not None
        mains, parts = self._mains(), []
        for p, span in self._to_write(self._stored if stored_only else self._local):
            main = mains[p.param].main if p.param in mains else p.param
            parts += [(part, main) for part in p.parts(span)]
        shapes = dict(self._shapes)
        for own, names in (others or {}).items():
            shapes |= {name: shapes[own] for name in names}
            parts += [(replace(part, source=n), main) for part, main in parts if part.source == own for n in names]
        return GatheredParts(parts, shapes, self._world.host.group)

    def _gather_known(self) -> _Known:
        """Gather the tensors of all ranks; a collective."""
        spread, mains = is_spread(self._optimizer), self._mains()
        own = _Known()
        if self._world.tensor.rank == 0 and (spread or self._world.batch.rank == 0):
            for p in self._stored:
                own.shapes |= {s: self._shapes[s] if self._shapes else p.size for s in p.mapping.sources}
                if p.param in mains:
                    group = mains[p.param].group
                    entries = (*state_names(group), "step") if counts_steps(group) else state_names(group)
                    own.optimizer_entries |= dict.fromkeys(p.mapping.sources, entries)
        gathered: list[Any] = [None] * self._world.size
        dist.all_gather_object(gathered, own, group=self._world.host.group)
        known = _Known()
        for other in gathered:  # in the same order on all ranks, so that they raise the same error for misfits
            known.shapes |= other.shapes
            known.optimizer_entries |= other.optimizer_entries
        return known

    def _refuse_other_split(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Refuse another tensor-parallel size for a model without `param_mapping`: rows may be interleaved.

        Raises:
            CheckpointError: the checkpoint was saved with another tensor-parallel size.
        """
        saved = int(extra.get("layout", {}).get("tensor", 1))
        if self._meta_model is None and saved != self._world.dims.tp:
            raise CheckpointError(
                f"checkpoint '{directory}' was saved with --tensor-model-parallel-size {saved}, this run has "
                f"{self._world.dims.tp}: without `param_mapping` nothing is known about the order of the model's rows"
            )

    def _fill(self, values: dict[str, Node], *, in_order: bool = False) -> None:
        if self._lora is not None:
            dtype = self._local[0].param.dtype
            values = {**values, **first_adapters(self._meta_model, self._lora, self._seed, values, dtype)}
        targets = parameter_parts(self._local)
        if self._optimizer is None:
            self._values = {**self._values, **values}
            self._values_in_order |= in_order
        else:
            targets += master_weight_parts(self._local, self._mains())
        fill(targets, values, in_order=in_order)

    def _mains(self) -> dict[nn.Parameter, MainParameter]:
        return {} if self._optimizer is None else main_parameters(self._optimizer)

    def _to_write(self, parameters: Sequence[LocalParameter]) -> list[tuple[LocalParameter, FlatRange]]:
        return to_write(
            parameters,
            self._mains(),
            spread=self._optimizer is not None and is_spread(self._optimizer),
            tensor_rank=self._world.tensor.rank,
            data_rank=self._world.batch.rank,
            data_size=self._world.batch.size,
        )
