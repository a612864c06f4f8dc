"""The data loader: endless micro-batches from a position in the global order, in this process or in workers."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.configs.data_config import DataloaderParam
from mindspeed_mm.data.collate import NOTES
from mindspeed_mm.data.encode import IGNORE_INDEX
from mindspeed_mm.data.sampler import FILLER, GlobalOrderBatchSampler
from mindspeed_mm.utils.errors import DataError, MMError
from mindspeed_mm.utils.log import is_first_rank, logger, notice


class _Failure:
    """What went wrong in a worker: exceptions lose their type and gain a traceback on the way to the main process."""

    def __init__(self, message: str) -> None:
        self.message = message


class _Rows(Dataset):
    """The data set as the loader's fetcher sees it: a micro-batch of rows at a time, errors as values."""

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitems__(self, indices: Sequence[int]) -> Any:
        try:
            return self._collate([self._row(index) for index in indices])
        except MMError as error:
            return _Failure(str(error))

    def _row(self, index: int) -> Any:
        if index != FILLER or getattr(self._dataset, "has_fillers", False):
            return self._dataset[index]
        sample = dict(self._dataset[0])  # a data set of the user's own: its first row, trained on nothing
        return {**sample, "labels": torch.full_like(sample["labels"], IGNORE_INDEX), "num_rows": torch.tensor(0)}


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the parent had is shared memory: a collection that walks through it would copy it
    gc.enable()  # the parent may have turned it off for its start
    # Schedulers signal every process of a job, and the run then still needs batches up to its checkpoint: a worker
    # ends when its parent says so, or is gone (which torch looks after).
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _start(loader: DataLoader) -> Iterator[Any]:
    """Start a torch loader; a worker's death is then found when its batch is asked for.

    torch's own SIGCHLD handler would raise wherever the main thread is, in the middle of writing a checkpoint, too.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)
    return iterator


class MMDataLoader:
    """Micro-batches of one data-parallel rank, without end, beginning at the sampler's position.

    `consumed_samples` moves by `global_batch_size` when the last micro-batch of a global batch has been handed out,
    whatever the workers have read ahead. Every `iter()` goes on from there, or for evaluation begins anew; it ends the
    iterator before it.

    Args:
        dataset: Map-style data set of samples.
        sampler: Which rows, in which order.
        collate: Samples to a micro-batch.
        param: `dataloader_param`.
        num_workers: Worker processes; 0 loads in this process.
        seed: Seeds the workers' random states.
        restarts: Whether every `iter()` begins at the first position again.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: GlobalOrderBatchSampler,
        collate: Callable[[Sequence[Any]], Any],
        param: DataloaderParam,
        num_workers: int = 0,
        seed: int = 1234,
        restarts: bool = False,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.num_workers = num_workers
        self._rows = _Rows(dataset, collate)
        self._param = param
        self._seed = seed
        self._restarts = restarts
        self._loader: DataLoader | None = None
        self._running: Any = None
        self._handed_out = 0
        self._turn = 0
        self._notes = 0

    @property
    def num_rows(self) -> int:
        """Rows of the data set."""
        return self.sampler.num_rows

    @property
    def global_batches_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.sampler.global_batches_per_epoch

    @property
    def rows_per_epoch(self) -> int:
        """Samples that an epoch advances `consumed_samples` by (`global_batches_per_epoch` × global batch size)."""
        return self.sampler.samples_per_epoch

    @property
    def consumed_samples(self) -> int:
        """Position: samples of the global batches that have been handed out completely, over all ranks."""
        whole = self._handed_out // self.sampler.micro_batches_per_global_batch
        return self.sampler.consumed_samples + whole * self.sampler.global_batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Start loading (workers begin at once) and yield micro-batches from the present position."""
        if not self._restarts:
            self.sampler.consumed_samples = self.consumed_samples
        self._handed_out = 0
        if self._loader is None or not self._param.persistent_workers:
            self.close()
            self._loader = self._torch_loader()
        self._running = _start(self._loader)  # workers that are alive are used again
        self._turn += 1
        return self._batches(self._running, self._turn)

    def _torch_loader(self) -> DataLoader:
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers = {
                "prefetch_factor": self._param.prefetch_factor or 2,
                "persistent_workers": self._param.persistent_workers,
                "worker_init_fn": _start_worker,
            }
        return DataLoader(
            self._rows,
            batch_sampler=self.sampler,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=self._param.pin_memory and torch.accelerator.is_available(),
            # Without a generator of its own the loader draws its seed from the global one, and a resumed run would
            # then go on with other random numbers than the run it continues.
            generator=torch.Generator().manual_seed(self._seed),
            **workers,
        )

    def _batches(self, running: Iterator[Any], turn: int) -> Iterator[dict[str, Any]]:
        while self._turn == turn:
            try:
                batch = next(running)
            except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
                # A batch of a worker that died is lost in one of several ways: it never came, or its memory is gone.
                if not self.num_workers or (isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)):
                    raise
                self.close()
                raise DataError(
                    f"a data worker died ({type(error).__name__}: {error}); if memory ran out, use fewer --num-workers "
                    "or smaller images"
                ) from error
            if isinstance(batch, _Failure):
                self.close()
                raise DataError(batch.message)
            if isinstance(batch, dict) and NOTES in batch:
                self._say(batch.pop(NOTES))
            self._handed_out += 1
            yield batch

    def _say(self, notes: Sequence[str]) -> None:
        """Log rows that were cut or gave no target: the first ones, then whenever their number has doubled."""
        before, self._notes = self._notes, self._notes + len(notes)
        if is_first_rank() and (before == 0 or before.bit_length() != self._notes.bit_length()):
            logger.warning(f"rows too long for the sequence length, on this rank so far: {self._notes} ({notes[-1]})")

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain numbers, the same on every rank, valid for any number of ranks and workers."""
        return {
            "consumed_samples": self.consumed_samples,
            "epoch": self.consumed_samples // self.rows_per_epoch,
            "seed": self.sampler.seed,
            "shuffle": self.sampler.shuffle,
            "num_rows": self.num_rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; takes effect with the next `iter()`.

        Args:
            state: What `state_dict` returned, here or in a run with other ranks, workers or micro-batches.
        """
        for key in ("seed", "shuffle", "num_rows"):
            here = self.state_dict()[key]
            if key in state and state[key] != here:
                notice(
                    f"the data loader's {key} was {state[key]} when the checkpoint was written and is {here} now: rows "
                    "follow in another order than they would have"
                )
        self.close()
        self.sampler.consumed_samples, self._handed_out = int(state["consumed_samples"]), 0

    def close(self) -> None:
        """Stop the workers; the position stays."""
        running, self._running, self._loader = getattr(self, "_running", None), None, None
        self._turn = getattr(self, "_turn", 0) + 1  # ends the iterators that were handed out
        shut_down = getattr(running, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def __del__(self) -> None:
        self.close()
