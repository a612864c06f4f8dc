"""Several data sets as one sequence of rows, computed from the seed alone.

concat: one after the other. interleave_under: drawn in turns, or by probabilities, until the last row of the first data
set to end has been drawn. interleave_over: until every data set has been drawn whole at least once; those that end
earlier begin anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_mm.utils.errors import ConfigError

_BLOCK = 4096


@dataclass(frozen=True)
class Mixture:
    """The rule by which data sets are mixed.

    Attributes:
        strategy: concat, interleave_under or interleave_over.
        shares: probability of each data set, in any unit; None: in turns.
        seed: decides the draws.
    """

    strategy: str = "concat"
    shares: tuple[float, ...] | None = None
    seed: int = 0

    def check(self, count: int) -> None:
        """Check that there is a share for each of `count` data sets.

        Raises:
            ConfigError: Another number of shares, or shares without interleaving.
        """
        where = "dataset_param.basic_parameters.interleave_probs"
        if self.shares is None:
            return
        if self.strategy == "concat":
            raise ConfigError(
                f"{where}: given, but mix_strategy is concat, which uses every row once; set mix_strategy to "
                "interleave_under or interleave_over, or interleave_probs to null"
            )
        if len(self.shares) != count:
            raise ConfigError(f"{where}: {len(self.shares)} probabilities for {count} data sets; expected one for each")

    def indices(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sequence of rows.

        Args:
            rows: Rows of each data set, [rows] int64 each, none of them empty.

        Returns:
            [rows of the mixture] int64.
        """
        if len(rows) == 1:
            return rows[0]
        if self.strategy == "concat":
            return np.concatenate(list(rows))
        sizes = np.array([len(part) for part in rows])
        draws = self._enough_draws(sizes)
        picked = np.empty(len(draws), dtype=np.int64)
        for number, part in enumerate(rows):
            at = np.flatnonzero(draws == number)
            picked[at] = part[np.arange(len(at)) % len(part)]
        return picked

    def _enough_draws(self, sizes: np.ndarray) -> np.ndarray:
        """Draw data sets until the strategy's end."""
        blocks: list[np.ndarray] = []
        counts = np.zeros(len(sizes), dtype=np.int64)
        reached = np.min if self.strategy == "interleave_over" else np.max
        for block in self._blocks(len(sizes)):
            blocks.append(block)
            counts += np.bincount(block, minlength=len(sizes))
            if reached(counts >= sizes):
                break
        draws = np.concatenate(blocks)
        ends = [
            int(at[size - 1]) if len(at := np.flatnonzero(draws == number)) >= size else len(draws)
            for number, size in enumerate(sizes.tolist())
        ]
        return draws[: (max(ends) if self.strategy == "interleave_over" else min(ends)) + 1]

    def _blocks(self, count: int) -> Iterator[np.ndarray]:
        """The endless sequence of drawn data sets, in blocks: [_BLOCK] int64."""
        if self.shares is None:
            position = 0
            while True:
                yield (position + np.arange(_BLOCK)) % count
                position += _BLOCK
        bounds = np.cumsum(np.array(self.shares) / sum(self.shares))[:-1]
        # PCG64's raw stream is fixed by numpy's compatibility policy, Generator.choice is not.
        stream = np.random.PCG64(np.random.SeedSequence((self.seed, len(self.shares))))
        while True:
            uniform = (stream.random_raw(_BLOCK) >> np.uint64(11)) * 2.0**-53
            yield np.searchsorted(bounds, uniform, side="right")

    def draw(self, times: Sequence[float], has: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """Yield (data set, row in it) where sizes are unknown: the same sequence as `indices` with `repeated` rows.

        Args:
            times: How often the rows of each data set are used.
            has: Whether a data set has a row; asked in order.
        """
        if len(times) == 1 or self.strategy == "concat":
            for number, share in enumerate(times):
                yield from ((number, row) for row in _repeat_unknown(share, functools.partial(has, number)))
            return
        over, ended = self.strategy == "interleave_over", [False] * len(times)

        def begin(number: int) -> Iterator[int]:
            return _repeat_unknown(times[number], functools.partial(has, number))

        sequences = [begin(number) for number in range(len(times))]
        following = [next(sequence, None) for sequence in sequences]
        for number in (int(drawn) for block in self._blocks(len(times)) for drawn in block):
            row = following[number]
            if row is None:  # nothing in it at all
                return
            yield number, row
            following[number] = next(sequences[number], None)
            if following[number] is None:
                ended[number] = True
                if not over or all(ended):
                    return
                sequences[number] = begin(number)
                following[number] = next(sequences[number])


def repeated(rows: np.ndarray, times: float) -> np.ndarray:
    """Return rows as often as `times` says: whole passes, then a share of them, spread evenly.

    Args:
        rows: [rows] int64.
        times: Above 0; 2.5 is two passes and every second row once more.
    """
    whole, share = divmod(times, 1)
    if times == 1:
        return rows
    numbers = np.arange(len(rows), dtype=np.float64)
    rest = rows[np.floor((numbers + 1) * share) > np.floor(numbers * share)]
    return np.concatenate([rows] * int(whole) + [rest])


def _repeat_unknown(times: float, has: Callable[[int], bool]) -> Iterator[int]:
    """The row numbers of `repeated`, one by one."""
    whole, share = divmod(times, 1)
    for _ in range(int(whole)):
        row = 0
        while has(row):
            yield row
            row += 1
    row = 0
    while share and has(row):
        if np.floor((row + 1.0) * share) > np.floor(row * share):
            yield row
        row += 1
