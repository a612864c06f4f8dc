"""Curves of any length in little memory: neighbouring points are merged, and their extremes stay."""

from __future__ import annotations

from typing import NamedTuple


class CurveBucket(NamedTuple):
    """Points of a curve that follow each other.

    Attributes:
        first, last: their first and last place.
        mean: of their values.
        low, high: the smallest and the largest value, each with its place.
        size: number of points.
    """

    first: float
    last: float
    mean: float
    low: tuple[float, float]
    high: tuple[float, float]
    size: int


class Points(NamedTuple):
    """What is drawn of a curve: places and values of its extremes, and of means of neighbouring points."""

    x: list[float]
    y: list[float]
    mean_x: list[float]
    mean_y: list[float]


class Curve:
    """Values at rising places, in `most` buckets of equal numbers of points at most."""

    def __init__(self, most: int = 800) -> None:
        """
        Args:
            most: number of buckets, even.
        """
        self._most = most
        self._size = 1  # points of a bucket
        self._buckets: list[CurveBucket] = []
        self._x: list[float] = []  # of the points that fill no bucket yet
        self._y: list[float] = []
        self._end = 0.0
        self.count = 0

    def add(self, x: float, y: float) -> None:
        """Add a point; those at its place and behind it are dropped."""
        if self.count and x <= self._end:
            self.cut(x)
        self._end = x
        self._x.append(x)
        self._y.append(y)
        self.count += 1
        if len(self._y) == self._size:
            self._close()

    def cut(self, x: float) -> None:
        """Drop the points at `x` and behind it, with those of the same bucket."""
        while self._buckets and self._buckets[-1].last >= x:
            self.count -= self._buckets.pop().size
        while self._x and self._x[-1] >= x:
            self._x.pop()
            self._y.pop()
            self.count -= 1

    @property
    def low(self) -> tuple[float, float]:
        """Place and value of the first point with the smallest value; the curve has points."""
        return min((bucket.low for bucket in self._all()), key=lambda point: point[1])

    @property
    def high(self) -> tuple[float, float]:
        """Place and value of the first point with the largest value; the curve has points."""
        return max((bucket.high for bucket in self._all()), key=lambda point: point[1])

    def points(self, most: int) -> Points:
        """Return what is drawn of the curve, in `most` buckets at most."""
        buckets = self._all()
        while len(buckets) > most:
            buckets = _halved(buckets)
        x: list[float] = []
        y: list[float] = []
        for bucket in buckets:
            for place, value in sorted({bucket.low, bucket.high}):
                x.append(place)
                y.append(value)
        if all(bucket.size == 1 for bucket in buckets):
            return Points(x, y, x, y)
        return Points(x, y, [(b.first + b.last) / 2 for b in buckets], [b.mean for b in buckets])

    def _all(self) -> list[CurveBucket]:
        return [*self._buckets, _bucket_of(self._x, self._y)] if self._x else self._buckets

    def _close(self) -> None:
        self._buckets.append(_bucket_of(self._x, self._y))
        self._x.clear()
        self._y.clear()
        if len(self._buckets) == self._most:
            self._buckets = _halved(self._buckets)
            self._size *= 2


def _bucket_of(x: list[float], y: list[float]) -> CurveBucket:
    low, high = min(y), max(y)
    return CurveBucket(x[0], x[-1], sum(y) / len(y), (x[y.index(low)], low), (x[y.index(high)], high), len(y))


def _halved(buckets: list[CurveBucket]) -> list[CurveBucket]:
    pairs = zip(buckets[::2], buckets[1::2], strict=False)
    return [_joined(one, other) for one, other in pairs] + (buckets[-1:] if len(buckets) % 2 else [])


def _joined(one: CurveBucket, other: CurveBucket) -> CurveBucket:
    size = one.size + other.size
    return CurveBucket(
        one.first,
        other.last,
        (one.mean * one.size + other.mean * other.size) / size,
        min(one.low, other.low, key=lambda point: point[1]),
        max(one.high, other.high, key=lambda point: point[1]),
        size,
    )
