"""Several data sets as one sequence: the three strategies, shares, repeats, and the same sequence on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm.data.sources.files import DataEntry, RowSource
from mindspeed_mm.data.sources.mixing import Mixture, repeated
from mindspeed_mm.utils.errors import ConfigError

ROWS = [np.arange(0, 5), np.arange(100, 103), np.arange(200, 207)]


def _mix(strategy: str, shares: tuple[float, ...] | None = None, seed: int = 0, rows: list = ROWS) -> list[int]:
    return Mixture(strategy, shares, seed).indices(rows).tolist()


def test_one_after_the_other() -> None:
    assert _mix("concat") == [*range(5), *range(100, 103), *range(200, 207)]


def test_in_turns_until_the_first_has_ended() -> None:
    assert _mix("interleave_under") == [0, 100, 200, 1, 101, 201, 2, 102]


def test_in_turns_until_the_last_has_ended() -> None:
    """Every row of every data set at least once; those that end earlier begin anew."""
    found = _mix("interleave_over")
    assert found[-1] == 206 and set(found) == {*range(5), *range(100, 103), *range(200, 207)}
    assert [row for row in found if 100 <= row < 200] == [100, 101, 102, 100, 101, 102, 100]


@pytest.mark.parametrize("strategy", ["interleave_under", "interleave_over"])
def test_by_shares(strategy: str) -> None:
    """The shares are those asked for, each data set keeps its order, and the end is where the strategy says."""
    rows = [np.arange(20_000), np.arange(20_000, 40_000)]
    found = np.array(_mix(strategy, (3.0, 1.0), rows=rows))
    assert abs(np.mean(found < 20_000) - 0.75) < 0.01
    for number, part in enumerate(rows):
        own = found[(found >= 20_000) == bool(number)]
        assert (own == part[np.arange(len(own)) % len(part)]).all()
    ended = [int(np.flatnonzero(found == part[-1])[0]) if part[-1] in found else None for part in rows]
    if strategy == "interleave_under":
        assert ended == [len(found) - 1, None]
    else:
        assert ended[1] == len(found) - 1 and ended[0] is not None


def test_seed_decides() -> None:
    same = [_mix("interleave_over", (1, 1, 1), seed) for seed in (3, 3, 4)]
    assert same[0] == same[1] != same[2]
    # Written down: the order must never change between versions of numpy, or a resumed run would see other rows.
    assert _mix("interleave_under", (0.5, 0.2, 0.3), 1234) == [100, 200, 0, 1, 101, 2, 201, 202, 3, 4]


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="2 probabilities for 3 data sets"):
        Mixture("interleave_over", (1, 2)).check(3)
    with pytest.raises(ConfigError, match="mix_strategy is concat"):
        Mixture("concat", (1, 2)).check(2)
    Mixture("concat").check(2)


def test_repeats_and_shares_of_rows() -> None:
    rows = np.arange(10, 20)
    assert repeated(rows, 1).tolist() == rows.tolist()
    assert repeated(rows, 2.5).tolist() == [*rows, *rows, 11, 13, 15, 17, 19]
    assert repeated(rows, 0.3).tolist() == [13, 16, 19]
    assert [len(repeated(np.arange(1000), share)) for share in (0.1, 0.25, 0.999)] == [100, 250, 999]


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [
        ("concat", None),
        ("interleave_under", None),
        ("interleave_under", (1.0, 2.0, 1.0)),
        ("interleave_over", None),
        ("interleave_over", (1.0, 2.0, 1.0)),
    ],
)
def test_the_same_sequence_on_the_way(tmp_path: Path, strategy: str, shares: tuple[float, ...] | None) -> None:
    """Rows that are found while training goes on come in the order that a list made before would have."""
    entries, parts, begin = [], [], 0
    for number, (size, times) in enumerate(((7, 1.0), (5, 2.5), (12, 0.5))):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"n": begin + i}) + "\n" for i in range(size)))
        entries.append(DataEntry(str(number), (str(path),), times=times))
        parts.append(repeated(np.arange(begin, begin + size), times))
        begin += size
    mixture = Mixture(strategy, shares, seed=5)
    source, found = RowSource(entries, lazy=True, mixture=mixture), []
    with pytest.raises(IndexError):
        for index in range(1000):
            found.append(source.row(index)["n"])
    assert found == mixture.indices(parts).tolist() and source.known_length == len(found)
