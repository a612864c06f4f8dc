"""Everything that the Megatron backend keeps in files, whatever its layout: weights, checkpoints, exports.

On disk it is what the other backend writes, under transformers' names: any layout of either goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.checkpoint import weights
from mindspeed_mm.checkpoint.dcp import read_state, refuse_state_misfits
from mindspeed_mm.checkpoint.dcp_reader import DcpReader
from mindspeed_mm.checkpoint.hf_export import export_gathered
from mindspeed_mm.checkpoint.lazy import Node, rounded
from mindspeed_mm.checkpoint.megatron_export import GatheredParts
from mindspeed_mm.checkpoint.megatron_load import read_tensors
from mindspeed_mm.checkpoint.megatron_optimizer import counts_steps, is_spread, state_names, stepped_parameters
from mindspeed_mm.checkpoint.megatron_parts import (
    FlatRange,
    Held,
    Shape,
    Stepped,
    hold,
    parameters,
    precise_copies,
    to_write,
)
from mindspeed_mm.checkpoint.megatron_snapshot import (
    checkpoint_tensors,
    model_parallel_random_state,
    restore_tracked_states,
)
from mindspeed_mm.checkpoint.megatron_weights import drawn, fill
from mindspeed_mm.checkpoint.rng import restore_random_state
from mindspeed_mm.checkpoint.snapshot import Stored, TensorSnapshots
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.tensors import persistent_tensors
from mindspeed_mm.checkpoint.weights import plan_weights, report_loaded
from mindspeed_mm.parallel.world import World
from mindspeed_mm.utils.errors import CheckpointError, ConfigError


@dataclass
class _Known:
    """What all ranks together hold.

    Attributes:
        shapes: of whole tensors, by name.
        optimizer_entries: what the optimizer keeps for a tensor that is trained.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    optimizer_entries: dict[str, tuple[str, ...]] = field(default_factory=dict)


class MegatronState:
    """The chunks of this rank and their optimizer, as files know them."""

    def __init__(self, chunks: Sequence[nn.Module], meta_model: Any, world: World) -> None:
        """
        Args:
            chunks: not wrapped, with storage; `made_of` says what their parameters are made of.
            meta_model: the transformers model without storage; None for chunks that are none of transformers' models:
                they are saved under their own names, and neither loaded from nor exported to the hub's layout.

        Raises:
            CheckpointError: chunks and meta model don't belong together.
        """
        self._meta_model, self._world = meta_model, world
        self._shapes = None
        if meta_model is not None:
            self._shapes = {n: tuple(p.shape) for n, p in persistent_tensors(meta_model).items()}
        self._held = hold(chunks, self._shapes, world.tensor_rank, world.dims.tp)
        self._layout = {"tensor": world.dims.tp, "pipeline": world.dims.pp}
        self._known = _Known()
        self._optimizer: Any = None
        self._values: dict[str, Node] = {}
        self._values_in_order = False

    def attach(self, optimizer: Any) -> None:
        """Take up Megatron's optimizer, once it exists; all ranks call.

        Its copies of parameters in higher precision get the values that files have, not the rounded ones.
        """
        self._optimizer = optimizer
        dtypes = {h.param.dtype for h in self._held}
        rounded_ones = {name: node for name, node in self._values.items() if node.dtype not in dtypes}
        fill(precise_copies(self._held, self._stepped()), rounded_ones, in_order=self._values_in_order)
        self._values = {}
        self._known = self._ask_all()

    def snapshots(self, *, save_optimizer: bool, save_rng: bool) -> TensorSnapshots:
        """What takes snapshots of this rank's part of the state; see `Snapshots`."""

        def tensors() -> dict[str, Stored]:
            return checkpoint_tensors(
                self._to_write(), self._stepped(), self._known.shapes, with_optimizer=save_optimizer
            )

        return TensorSnapshots(
            tensors,
            random_states=model_parallel_random_state if save_rng else None,
            content={"has_optimizer": save_optimizer, "layout": self._layout},
            world=self._world,
        )

    def load(self, directory: Path, *, optimizer: bool, rng: bool, strict: bool) -> dict[str, Any]:
        """Read a checkpoint that any layout wrote; returns `extra`.

        Args:
            optimizer, rng: whether the optimizer's state and the random states are read.
            strict: every tensor must be there, and none be left over.

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
        read_tensors(reader, self._held, self._stepped(), with_optimizer=optimizer)
        if rng:
            restore_tracked_states(restore_random_state(directory, self._world, extra, self._layout))
        return extra

    def load_weights(self, directory: Path, *, strict: bool, downcast: bool, allow_pickle: bool) -> None:
        """Fill the chunks from a HF directory or a torch_dcp folder, each rank reading its parts.

        Args:
            strict: refuse if a tensor is missing or left over; else what is missing keeps its values.
            downcast: round floating-point values through bfloat16 (--downcast-to-bf16).
            allow_pickle: also unpickle `.bin` files that hold more than tensors.

        Raises:
            CheckpointError: tensors missing, left over, or of another shape; nothing has been changed then.
            ConfigError: the model is none of transformers'.
        """
        if self._meta_model is None:
            raise ConfigError(f"'{directory}': the model is no transformers model, so it has no use for its weights")
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
        self._fill(drawn(self._meta_model, seed), in_order=True)

    def export_hf(self, directory: Path, source: str | None, dtype: torch.dtype | None) -> None:
        """Write the model in the hub's layout; all ranks call. Arguments and errors as `hf_export.export`'s."""
        if self._meta_model is None:
            raise ConfigError("--save-hf: the model is no transformers model, so it has no hub layout to be written in")
        assert self._shapes is not None
        stepped, parts = self._stepped(), []
        for h, span in self._to_write():
            main = stepped[h.param].main if h.param in stepped else h.param
            parts += [(part, main) for part in h.parts(span)]
        fetcher = GatheredParts(parts, self._shapes, self._world.host.group)
        export_gathered(self._meta_model, fetcher, directory, source, self._world.host.group, dtype)

    def _ask_all(self) -> _Known:
        """Put together what the ranks hold; all ranks call."""
        spread, stepped = is_spread(self._optimizer), self._stepped()
        own = _Known()
        if self._world.tensor_rank == 0 and (spread or self._world.batch.rank == 0):
            for h in self._held:
                own.shapes |= {s: self._shapes[s] if self._shapes else h.size for s in h.made.sources}
                if h.param in stepped:
                    group = stepped[h.param].group
                    entries = (*state_names(group), "step") if counts_steps(group) else state_names(group)
                    own.optimizer_entries |= dict.fromkeys(h.made.sources, entries)
        everyones: list[Any] = [None] * self._world.size
        dist.all_gather_object(everyones, own, group=self._world.host.group)
        known = _Known()
        for other in everyones:  # in the same order everywhere, so that all ranks say the same of what does not fit
            known.shapes |= other.shapes
            known.optimizer_entries |= other.optimizer_entries
        return known

    def _refuse_other_split(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Refuse tensors of a model of its own names from ranks that split it otherwise: they may interleave rows."""
        saved = int(extra.get("layout", {}).get("tensor", 1))
        if self._meta_model is None and saved != self._world.dims.tp:
            raise CheckpointError(
                f"checkpoint '{directory}' was saved with --tensor-model-parallel-size {saved}, this run has "
                f"{self._world.dims.tp}: without `made_of` nothing is known about the order of the model's rows"
            )

    def _fill(self, values: dict[str, Node], *, in_order: bool = False) -> None:
        targets = parameters(self._held)
        if self._optimizer is None:
            self._values = {**self._values, **values}
            self._values_in_order |= in_order
        else:
            targets += precise_copies(self._held, self._stepped())
        fill(targets, values, in_order=in_order)

    def _stepped(self) -> dict[nn.Parameter, Stepped]:
        return {} if self._optimizer is None else stepped_parameters(self._optimizer)

    def _to_write(self) -> list[tuple[Held, FlatRange]]:
        return to_write(
            self._held,
            self._stepped(),
            spread=self._optimizer is not None and is_spread(self._optimizer),
            tensor_rank=self._world.tensor_rank,
            data_rank=self._world.batch.rank,
            data_size=self._world.batch.size,
        )
