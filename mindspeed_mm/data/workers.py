"""Worker processes of the loader: their start, signals and end; errors reach the run as values."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mindspeed_mm.utils.errors import DataError

BatchT = TypeVar("BatchT")


class WorkerFailure:
    """An error in a worker, as a value: exceptions lose their type on the way to the main process."""

    def __init__(self, message: str) -> None:
        self.message = message


def as_it_is(batch: BatchT) -> BatchT:
    """Return a batch unchanged: the collate function of data sets whose items are whole batches."""
    return batch


def torch_loader(
    rows: Dataset, batch_sampler: Iterable[Any], num_workers: int, seed: int, **options: Any
) -> DataLoader:
    """Return a DataLoader over a data set that returns whole batches (`__getitems__`).

    Args:
        rows: The data set.
        batch_sampler: Yields the arguments of `__getitems__`.
        num_workers: Worker processes; 0 loads in this process.
        seed: Seeds the workers' random states.
        options: Further options of DataLoader; those of workers are left out where there are none.
    """
    if num_workers:
        options |= {"worker_init_fn": start_worker, **forked(num_workers)}
    else:
        options = {key: value for key, value in options.items() if key not in ("prefetch_factor", "persistent_workers")}
    return DataLoader(
        rows,
        batch_sampler=batch_sampler,
        collate_fn=as_it_is,
        num_workers=num_workers,
        # Without a generator of its own the loader draws its seed from the global one, and a resumed run would
        # then continue with other random numbers than the first run.
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def forked(num_workers: int) -> dict[str, Any]:
    """Return DataLoader's option to fork its workers, where the system can.

    A forked worker shares the memory of its parent, and notices when that parent is gone; a worker that a server
    process started (the default of some processes and Python versions) does neither.
    """
    can = num_workers > 0 and "fork" in multiprocessing.get_all_start_methods()
    return {"multiprocessing_context": "fork"} if can else {}


def warm_up(dataset: object) -> None:
    """Let a data set load in this process what its workers will need, so that forked workers share it.

    Args:
        dataset: Its `warm_up()`, if it has one, is called.
    """
    prepare = getattr(dataset, "warm_up", None)
    if callable(prepare):
        prepare()


def start_worker(_: int) -> None:
    """Prepare a worker process: one thread, its parent's memory left shared, signals for the run ignored."""
    torch.set_num_threads(1)
    gc.freeze()  # the parent's memory is shared: a garbage collection would copy it
    gc.enable()  # the parent may have turned it off for its start
    # Schedulers, terminals and torchrun signal every process of a job, and the run then still needs batches up to its
    # checkpoint: a worker ends when its parent asks for it, or is gone.
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


class WorkerStart:
    """A `worker_init_fn` for a loader of the user's own: `start_worker`, then the user's.

    Args:
        dataset: The value of `get_worker_info().dataset` for the user's function: the user's own data set.
        then: The user's `worker_init_fn`, if there is one.
    """

    def __init__(self, dataset: Dataset, then: Callable[[int], None] | None = None) -> None:
        self._dataset = dataset
        self._then = then

    def __call__(self, worker: int) -> None:
        """Prepare worker number `worker`."""
        start_worker(worker)
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", self._dataset)  # torch's record of a worker is frozen
        if self._then is not None:
            self._then(worker)


def _end_with_parent(parent: int) -> None:
    """End this process when its parent asks for it by SIGTERM, or within a second of the parent's end.

    torch would notice the latter after five seconds, and only between two batches.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 1)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)


def start_loader(loader: DataLoader) -> Iterator[Any]:
    """Start a torch loader; a worker's death is then noticed when its batch is read.

    torch's own SIGCHLD handler would raise wherever the main thread is, in the middle of writing a checkpoint, too.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)
    return iterator


def next_batch(running: Iterator[Any], num_workers: int) -> Any:
    """Return the next batch.

    Raises:
        DataError: A worker died, or has sent an error.
        StopIteration: There is no further batch.
    """
    try:
        batch = next(running)
    except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
        # A batch of a worker that died is lost in one of several ways: it never arrives, or its memory is gone.
        if not num_workers or (isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)):
            raise
        raise DataError(
            f"a data worker died ({type(error).__name__}: {error}); if memory ran out, use fewer --num-workers "
            "or smaller images"
        ) from error
    if isinstance(batch, WorkerFailure):
        raise DataError(batch.message)
    return batch


def shut_down(running: Iterator[Any] | None) -> None:
    """End the workers of an iterator that `start` returned."""
    stop = getattr(running, "_shutdown_workers", None)
    if stop is not None:
        stop()
