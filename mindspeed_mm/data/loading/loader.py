"""The data loader: endless micro-batches from a position in the global order, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from mindspeed_mm import accelerator
from mindspeed_mm.configs.data_config import DataloaderParam
from mindspeed_mm.data.loading.collate import NOTES
from mindspeed_mm.data.loading.moving import endless, moved_ahead
from mindspeed_mm.data.loading.rows import BatchRows
from mindspeed_mm.data.loading.sampler import PlannedBatches
from mindspeed_mm.data.notes import Note, NoteCounter
from mindspeed_mm.data.workers import next_batch, shut_down, start_loader, torch_loader, warm_up
from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.log import notice


class MMDataLoader:
    """Micro-batches of one data-parallel rank, without end, beginning at the sampler's state.

    The position advances when the last micro-batch of a global batch has been yielded, whatever the workers have
    prefetched. Every `iter()` continues from there, or for evaluation begins anew; it ends the previous iterator.

    Args:
        dataset: Map-style data set of samples.
        sampler: The rows of this rank, in order.
        collate: Builds a micro-batch of samples.
        param: `dataloader_param`.
        num_workers: Worker processes; 0 loads in this process.
        restarts: Whether every `iter()` begins at the first position again.
        capacity: Tokens of a pack; None: one sample a row.
        consumed_samples: Optimizer steps × global batch size before the sampler's state.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: PlannedBatches,
        collate: Callable[[Sequence[Any]], Any],
        param: DataloaderParam,
        num_workers: int = 0,
        restarts: bool = False,
        capacity: int | None = None,
        consumed_samples: int = 0,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.num_workers = num_workers
        self.capacity = capacity
        self.consumed_samples = consumed_samples
        self._rows = BatchRows(dataset, collate, capacity, sampler.planner.order.seed)
        self._param = param
        self._first = sampler.state if restarts else None
        self._loader: DataLoader | None = None
        self._running: Any = None
        self._handed_out = 0
        self._turn = 0
        self._notes = NoteCounter()

    @property
    def faults(self) -> Mapping[str, int]:
        """Rows of this rank that could not be used so far, by reason."""
        return self._notes.faults

    @property
    def num_rows(self) -> int | None:
        """Rows of the data set; None as long as the end of a stream has not been found."""
        return self.sampler.planner.order.num_rows

    @property
    def rows_per_epoch(self) -> int | None:
        """Samples by which an epoch advances `consumed_samples`; None where it doesn't end with a global batch."""
        return self.sampler.planner.samples_per_epoch

    @property
    def global_batches_per_epoch(self) -> float | None:
        """Optimizer steps in an epoch; None where it isn't known: of a stream, and of packs without a token cache.

        Packs continue over the end of an epoch: for them it is a fractional number, computed from the tokens.
        """
        size = self.sampler.planner.layout.global_batch_size
        if (rows := getattr(self.dataset, "rows_per_epoch", None)) is not None:  # of a corpus: they continue over it
            return rows / size
        if self.capacity is not None:
            count = getattr(self.dataset, "total_tokens", None)
            tokens = count() if callable(count) else None
            return None if tokens is None else tokens / (self.capacity * size)
        whole = self.rows_per_epoch
        return None if whole is None else whole // size

    def prepare_with(self, preparation: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let workers prepare each micro-batch, which is then moved to the device one before it is needed.

        Args:
            preparation: a collated micro-batch → one whose tensors are for the device, but for `OnHost` values.
        """
        self._rows.preparation = preparation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Start loading (workers begin at once) and yield micro-batches from the present position."""
        if self._first is not None:
            self.sampler.go_to(self._first)
        self._handed_out = 0
        if self._loader is None or not self._param.persistent_workers:
            self.close()
            if self.num_workers:
                warm_up(self.dataset)
            self._loader = torch_loader(
                self._rows,
                self.sampler,
                self.num_workers,
                self.sampler.planner.order.seed,
                prefetch_factor=self._param.prefetch_factor or 2,
                persistent_workers=self._param.persistent_workers,
                pin_memory=self._param.pin_memory and not accelerator.current().is_host,
            )
        self._running = start_loader(self._loader)  # workers that are alive are reused
        self._turn += 1
        return self._batches(self._running, self._turn)

    def _batches(self, running: Iterator[Any], turn: int) -> Iterator[dict[str, Any]]:
        batches = endless(lambda: next_batch(running, self.num_workers))
        if self._rows.preparation is not None and not accelerator.current().is_host:
            batches = moved_ahead(batches, NOTES)
        while self._turn == turn:
            try:
                batch = next(batches)
            except DataError:
                self.close()
                raise
            notes = batch.pop(NOTES, []) if isinstance(batch, dict) else []
            self._handed_out += 1
            if self._handed_out % self.sampler.planner.layout.micro_batches == 0:
                notes += self._finish_batch(batch)
            self._notes.add(notes)
            yield batch

    def _finish_batch(self, batch: dict[str, Any]) -> list[Note]:
        """Advance the position; return the rows that the plan has left out, and add their number to the batch."""
        left_out = self.sampler.finish_batch()
        self.consumed_samples += self.sampler.planner.layout.global_batch_size
        if not left_out or self.sampler.dp_rank != 0:  # every rank has found the same ones
            return []
        batch["rows_left_out"] += len(left_out)
        where = getattr(self.dataset, "where", "row {}".format)
        return [Note(f"{where(row)}: {fault}", fault) for row, fault in left_out]

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain numbers, the same on every rank, valid for any number of ranks and workers."""
        order = self.sampler.planner.order
        return {
            "consumed_samples": self.consumed_samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "num_rows": self.num_rows,
            **self.sampler.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; takes effect with the next `iter()`.

        Args:
            state: A result of `state_dict`, of this run or one with other ranks, workers or micro-batches, with or
                without packs. An old one with `consumed_samples` only is a position in rows.
        """
        here = self.state_dict()
        for key in ("seed", "shuffle", "num_rows"):
            if None not in (state.get(key), here[key]) and state[key] != here[key]:
                notice(
                    f"the data loader's {key} was {state[key]} when the checkpoint was written and is {here[key]} now: "
                    "rows follow in another order than they would have"
                )
        self._log_change_of_packs(state)
        self.close()
        self.consumed_samples = int(state["consumed_samples"])
        self.sampler.go_to({"position": self.consumed_samples, **state})

    def _log_change_of_packs(self, state: Mapping[str, Any]) -> None:
        packs = state.get("packing")
        if self.capacity is None and packs is not None:
            notice(
                "the checkpoint was written with packing and this run is without: it goes on with the global batch "
                f"after the rows that were read; {len(packs['pending'])} sample(s) that waited to be packed aren't "
                "trained in this epoch"
            )
        elif self.capacity is not None and packs is None and state["consumed_samples"]:
            notice(
                "the checkpoint was written without packing and this run is with it: it goes on with the row after "
                "those that were trained"
            )

    def close(self) -> None:
        """Stop the workers; the position stays."""
        running, self._running, self._loader = getattr(self, "_running", None), None, None
        self._turn = getattr(self, "_turn", 0) + 1  # ends the iterators that exist
        shut_down(running)
        if (sampler := getattr(self, "sampler", None)) is not None:
            sampler.close()

    def __del__(self) -> None:
        self.close()
