"""The part of the plan of one rank, as a sampler for torch's DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_mm.data.loading.user_rows import DrawnBatch
from mindspeed_mm.data.plan.ahead import AheadPlans, RankPlan, can_plan_ahead, plans_of
from mindspeed_mm.data.plan.plan import Planner
from mindspeed_mm.utils.errors import ConfigError


def check_rank(dp_rank: int, dp_size: int) -> None:
    """Raise ConfigError if there is no such data-parallel rank."""
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"data-parallel rank {dp_rank} of {dp_size} ranks: expected 0 to {dp_size - 1}")


class PlannedBatches:
    """Endless micro-batches of one rank, prefetched before they are trained on.

    Args:
        planner: The plan.
        dp_rank: This data-parallel rank.
    """

    def __init__(self, planner: Planner, dp_rank: int = 0) -> None:
        check_rank(dp_rank, planner.layout.dp_size)
        self.planner = planner
        self.dp_rank = dp_rank
        self._state: Mapping[str, Any] | None = planner.state()
        self._finished: RankPlan | None = None
        self._prefetched: deque[RankPlan] = deque()
        self._running: Generator[RankPlan, None, None] | AheadPlans | None = None

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the plan after the finished global batches, whatever has been prefetched."""
        if self._state is None:
            assert self._finished is not None
            self._state = self._finished.state
        return self._state

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Take a state; the next `iter()` begins there."""
        self.close()
        self.planner.go_to(state)
        self._state = self.planner.state()

    def finish_batch(self) -> Sequence[tuple[int, str]]:
        """Mark a global batch as finished; return the rows that its plan has left out."""
        self._state, self._finished = None, self._prefetched.popleft()
        return self._finished.left_out

    def __iter__(self) -> Iterator[DrawnBatch]:
        """Yield this rank's micro-batches of `PlannedRow`s, from the state on."""
        self.go_to(self.state)
        ahead = can_plan_ahead(self.planner)
        self._running = running = (
            AheadPlans(self.planner, self.dp_rank) if ahead else plans_of(self.planner, self.dp_rank)
        )
        size, ranks = self.planner.layout.micro_batch_size, self.planner.layout.dp_size
        for plan in running:
            self._prefetched.append(plan)
            first = plan.end - self.planner.layout.global_batch_size
            for number, rows in enumerate(plan.micro_batches):
                yield DrawnBatch(rows, 0, first + (number * ranks + self.dp_rank) * size)

    def close(self) -> None:
        """Stop the plan, and the processes that plan and measure; prefetched batches are dropped."""
        running, self._running = self._running, None
        self._prefetched.clear()
        if running is not None:
            running.close()
