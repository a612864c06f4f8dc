"""Snapshots of the training state, and their writing.

Layout of a folder: `.metadata` and `*.distcp` (tensors of model, optimizer and averages, by parameter name, in torch's
distributed checkpoint format), `state.json` (iteration, consumed samples, schedule …), `rng_00000.safetensors` (random
states, one file a rank). Values that are no tensors are not written in torch's format, which would pickle them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from mindspeed_mm import accelerator
from mindspeed_mm.checkpoint.agreement import first_line, no_space
from mindspeed_mm.checkpoint.rng import random_state
from mindspeed_mm.checkpoint.stored_pieces import StoredPieces, StoredRegion
from mindspeed_mm.checkpoint.tensors import local_part, model_tensors, optimizer_tensors
from mindspeed_mm.optimizer.build import BuiltOptimizer
from mindspeed_mm.optimizer.eight_bit_state import EightBitTensor
from mindspeed_mm.optimizer.ema import Ema
from mindspeed_mm.parallel.world import World
from mindspeed_mm.utils.files import fsync_path, write_json
from mindspeed_mm.utils.wrapped import unwrapped

_FORMAT = 1

Stored: TypeAlias = torch.Tensor | StoredPieces


class Snapshot(Protocol):
    """A training state that has not been written yet."""

    def write(self, directory: Path, group: dist.ProcessGroup) -> list[str]:
        """Write this rank's part into `directory`; a collective of `group`.

        Args:
            group: process group for this call's collectives; not used elsewhere meanwhile.

        Returns:
            names of the files that this rank wrote, synced to disk.

        Raises:
            OSError, RuntimeError: a file could not be written. A rank that fails still takes part in all collectives.
        """


class TensorSnapshots:
    """Takes snapshots of tensors.

    Two costly things are reused from one snapshot to the next: the host memory for copies, whose pages the system
    allocates on the first write, and torch's plan of which rank writes which tensors.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, Stored]],
        *,
        random_states: Callable[[], dict[str, torch.Tensor]] | None,
        content: Mapping[str, Any],
        world: World,
    ) -> None:
        """
        Args:
            tensors: returns the tensors that this rank writes, by checkpoint key.
            random_states: returns this rank's random states; None: they are not saved.
            content: JSON values of state.json that are the same in every snapshot.
        """
        self._tensors, self._random_states, self._content, self._world = tensors, random_states, content, world
        self._buffers: dict[Any, torch.Tensor] = {}
        self._planner = _Planner()

    def take(self, extra: dict[str, Any], *, detached: bool) -> TensorSnapshot:
        """Take a snapshot.

        Args:
            extra: JSON values for state.json.
            detached: copy the tensors, so that training may continue before the snapshot is written. The next detached
                snapshot overwrites the copies. False: the tensors must not change until the snapshot is written.
        """
        tensors = self._tensors()
        content = {
            "format": _FORMAT,
            "world_size": self._world.size,
            **self._content,
            **copy.deepcopy(extra),
        }
        return TensorSnapshot(
            tensors,
            self._copies(tensors) if detached else None,
            self._planner,
            rank=self._world.rank,
            state=content if self._world.rank == 0 else None,
            random_states=self._random_states() if self._random_states else None,
        )

    @torch.no_grad()
    def _copies(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Copy this rank's parts into host buffers that are reused."""
        copies: dict[str, Stored] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, StoredPieces):
                regions = [
                    StoredRegion(p.region, partial(_same, self._copy((name, p.region), p.value()))) for p in tensor
                ]
                copies[name] = StoredPieces(tensor.shape, tensor.dtype, regions)
            else:
                copies[name] = self._copy(name, _local(tensor))
        accelerator.current().synchronize()
        return copies

    def _copy(self, key: Any, part: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
            buffer = self._buffers[key] = accelerator.current().host_memory(part)
        return buffer.copy_(part, non_blocking=True)


class Snapshots(TensorSnapshots):
    """Takes snapshots of a model, its optimizer and its averages."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: BuiltOptimizer | None,
        *,
        save_rng: bool,
        world: World,
        ema: Ema | None = None,
    ) -> None:
        """
        Args:
            model: the model; the names of its parameters are the checkpoint keys.
            optimizer: None: its state is not saved.
            save_rng: save the random states.
            ema: averages of the weights; None: the run has none.
        """

        def tensors() -> dict[str, Stored]:
            found: dict[str, Stored] = dict(model_tensors(model))
            if optimizer is not None:
                found |= {name: _stored(tensor) for name, tensor in optimizer_tensors(model, optimizer).items()}
            return found if ema is None else found | ema.tensors()

        super().__init__(
            tensors,
            random_states=random_state if save_rng else None,
            content={"has_optimizer": optimizer is not None},
            world=world,
        )


class TensorSnapshot:
    """A snapshot of tensors (or host copies of this rank's parts), random states and JSON values."""

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        copies: Mapping[str, Stored] | None,
        planner: _Planner,
        *,
        rank: int,
        state: dict[str, Any] | None,
        random_states: dict[str, torch.Tensor] | None,
    ) -> None:
        self._tensors, self._copies, self._planner = tensors, copies, planner
        self._rank, self._state, self._random_states = rank, state, random_states

    def write(self, directory: Path, group: dist.ProcessGroup) -> list[str]:
        """See `Snapshot`."""
        writer = _Writer(directory, sync_files=True, per_thread_copy_ahead=0 if self._copies else 10_000_000)
        self._planner.copies = self._copies
        try:
            # dcp.save synchronizes failures over ranks, so nothing that can fail on one rank alone may come before it
            dcp.save(dict(self._tensors), storage_writer=writer, planner=self._planner, process_group=group)
        except BaseException:
            self._planner.forget()
            raise
        names = list(writer.written)
        if self._random_states is not None:
            names.append(f"rng_{self._rank:05d}.safetensors")
            save_file(self._random_states, directory / names[-1])
            fsync_path(directory / names[-1])
        if self._state is not None:
            names.append("state.json")
            write_json(directory / names[-1], self._state)
        return names


class _Planner(dcp.DefaultSavePlanner):
    """Torch's planner with a cached plan; it reads the data from host copies if there are any.

    Plans are computed from the tensors of the model, on their device and mesh.
    """

    _number = itertools.count()

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.copies: Mapping[str, Stored] | None = None
        self._new_key()

    def lookup_object(self, index: MetadataIndex) -> Any:
        stored = self.state_dict[index.fqn] if self.copies is None else self.copies[index.fqn]
        if isinstance(stored, StoredPieces):
            return stored.at(index)
        return super().lookup_object(index) if self.copies is None else stored

    def forget(self) -> None:
        """Clear the cached plan: after a failure the ranks may have cached different plans."""
        for name, value in vars(SavePlanner).items():
            if name.startswith("_cached_") and isinstance(value, dict):
                value.pop(self._cached_plans_key, None)
        self._new_key()

    def _new_key(self) -> None:
        # torch caches plans by the planner's class, for the whole process: two models would share one
        self._cached_plans_key = f"{type(self).__module__}.{next(self._number)}"


class _Writer(dcp.FileSystemWriter):
    """Torch's writer, which records the names of the files that this rank wrote and raises picklable errors."""

    def __init__(self, directory: Path, *, sync_files: bool, per_thread_copy_ahead: int) -> None:
        super().__init__(directory, sync_files=sync_files, per_thread_copy_ahead=per_thread_copy_ahead)
        self.written: list[str] = []
        self._directory = directory

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        try:
            future = super().write_data(plan, planner)
        except Exception as error:
            raise _plain(error) from None
        self.written += sorted(p.name for p in self._directory.glob(f"{plan.storage_data.prefix}*.distcp"))
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        try:
            super().finish(metadata, results)
        except Exception as error:
            raise _plain(error) from None
        self.written.append(".metadata")


def _plain(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: pickling keeps its type and arguments, but not its cause."""
    full = no_space(error)
    return RuntimeError(first_line(error)) if full is None else OSError(full.errno, full.strerror)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _stored(tensor: torch.Tensor | EightBitTensor) -> Stored:
    """Return a tensor, or the float32 values of one in 8 bits, which are decoded as they are written."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    _, region = local_part(tensor.param)
    return StoredPieces(tensor.shape, torch.float32, [StoredRegion(region, tensor.values)])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return unwrapped(tensor.to_local()) if isinstance(tensor, DTensor) else tensor
