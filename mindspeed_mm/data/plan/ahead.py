"""Plan global batches ahead, in a process of its own, so that no step waits for its plan."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mindspeed_mm.data.plan.plan import GlobalBatch, PlannedRow, Planner
from mindspeed_mm.data.workers import WorkerFailure, start_worker, warm_up
from mindspeed_mm.utils.errors import DataError, MMError

#: global batches that are planned and not taken yet; a pipe of this size holds them, so that taking one never waits
_BATCHES_AHEAD, _PIPE_BYTES = 4, 1 << 20
#: seconds in which a process ends that is asked to
_PATIENCE = 2.0


@dataclass(frozen=True)
class RankPlan:
    """The part of one rank in a global batch.

    Attributes:
        micro_batches: [micro-batch][row] → the row's samples.
        end: position of the plan after the global batch.
        num_rows: rows of the data, as far as it is known.
        left_out: (row, reason) of the rows without a sample that were found while it was planned.
        packed_state: state of the plan after the global batch, as bytes: most are never read.
    """

    micro_batches: Sequence[Sequence[PlannedRow]]
    end: int
    num_rows: int | None
    left_out: Sequence[tuple[int, str]]
    packed_state: bytes

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the plan after the global batch."""
        return pickle.loads(self.packed_state)


def plans_of(planner: Planner, dp_rank: int) -> Generator[RankPlan, None, None]:
    """Yield what a rank reads of each global batch; planned in this process, when it is asked for."""
    with contextlib.closing(planner.batches()) as batches:
        for batch in batches:
            yield _part_of(batch, planner, dp_rank)


def _part_of(batch: GlobalBatch, planner: Planner, dp_rank: int) -> RankPlan:
    state = dict(batch.state)
    end = state["position"] if "position" in state else state["packing"]["next"]
    mine = batch.micro_batches[dp_rank]
    return RankPlan(mine, end, planner.order.num_rows, batch.left_out, pickle.dumps(state))


def can_plan_ahead(planner: Planner) -> bool:
    """Whether a process may plan: it is asked to measure, and this system forks."""
    wanted = planner.measurer is not None and planner.measurer.processes > 0
    return wanted and "fork" in multiprocessing.get_all_start_methods()


class AheadPlans:
    """The same as `plans_of`, planned ahead by a forked process, which others help to measure.

    Only taking a plan runs in this process: planning in one of its threads would hold up the step's own Python.

    Args:
        planner: The plan; it stays at its state.
        dp_rank: The rank.
    """

    def __init__(self, planner: Planner, dp_rank: int) -> None:
        measurer = planner.measurer
        assert measurer is not None
        warm_up(measurer.dataset)
        fork = multiprocessing.get_context("fork")
        _ = measurer.table  # made here, so that all forked processes have it in common
        measurer.asked = fork.RawValue("q", 0)
        self._planner = planner
        self._processes = [
            fork.Process(target=_help, args=(planner,), daemon=True) for _ in range(measurer.processes - 1)
        ]
        for helper in self._processes:
            helper.start()
        self._free = fork.Semaphore(_BATCHES_AHEAD)
        self._plans, sender = fork.Pipe(duplex=False)
        planning = fork.Process(target=_plan, args=(planner, dp_rank, sender, self._free), daemon=True)
        planning.start()
        sender.close()  # the planning process has the only one: its death is the end of the pipe
        self._processes.append(planning)
        measurer.asked = None

    def __iter__(self) -> Iterator[RankPlan]:
        return self

    def __next__(self) -> RankPlan:
        try:
            plan = self._plans.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                "a data worker died: the process that plans batches is gone; if memory ran out, use fewer --num-workers"
            ) from error
        if isinstance(plan, WorkerFailure):
            raise DataError(plan.message)
        self._free.release()
        if plan.num_rows is not None:
            self._planner.order.end_found(plan.num_rows)
        return plan

    def close(self) -> None:
        """End the processes."""
        self._plans.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_PATIENCE)
            if process.is_alive():  # it was forked so lately that its parent's handler has taken the signal
                process.kill()
                process.join()
        self._processes.clear()


def _plan(planner: Planner, dp_rank: int, sender: Connection, free: Any) -> None:
    start_worker(0)
    with contextlib.suppress(ImportError, OSError):  # a smaller pipe will do, too
        from fcntl import F_SETPIPE_SZ, fcntl

        fcntl(sender.fileno(), F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        for plan in plans_of(planner, dp_rank):
            free.acquire()
            sender.send(plan)
    except MMError as error:
        sender.send(WorkerFailure(str(error)))
    except Exception as error:
        sender.send(WorkerFailure(f"planning: {type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _help(planner: Planner) -> None:
    start_worker(0)
    assert planner.measurer is not None
    planner.measurer.help(planner.rows_to_measure())
