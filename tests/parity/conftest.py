"""Worker pools by number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.workers import RankPool


@pytest.fixture(scope="session")
def pools(ranks2: RankPool, ranks4: RankPool) -> Iterator[dict[int, RankPool]]:
    """1, 2 and 4 workers, which never import megatron."""
    single = RankPool(1)
    yield {1: single, 2: ranks2, 4: ranks4}
    single.close()
