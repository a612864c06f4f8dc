"""Figures as people read them."""

from __future__ import annotations

import math

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def amount(value: float) -> str:
    """Return a number of things with three digits: 980, 12.3k, 7.62B."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit * 0.9995:
            return f"{_three_digits(value / limit)}{suffix}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else _three_digits(value)


def counted(number: int, name: str) -> str:
    """Return a number of things with their name, whose plural ends in s: 1 step, 1,000 steps."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time to the two largest units: 45s, 12m05s, 1h02m, 3d04h."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def step_time(milliseconds: float) -> str:
    """Return the time of a step: 8.4 ms, 145 ms, 1.23 s, 2m05s."""
    if milliseconds < 999.5:
        return f"{_three_digits(milliseconds)} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    return f"{_three_digits(seconds)} s" if seconds < 99.95 else duration(seconds)


def loss(value: float) -> str:
    """Return a loss with four decimals, or four digits where these say nothing."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.3e}"


def figure(value: float) -> str:
    """Return a figure with three digits."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e4:
        return _three_digits(value)
    return f"{value:.2e}"


def gibibytes(number: int) -> str:
    """Return a size in memory: 31.2 GiB, 0.48 GiB."""
    return f"{number / 2**30:.{1 if number >= 10 * 2**30 else 2}f} GiB"


def per_cent(fraction: float) -> str:
    """Return a share in per cent; what is not nothing is not 0 %."""
    return f"{100 * fraction:.0f} %" if fraction == 0 or fraction >= 0.095 else f"{100 * fraction:.1f} %"


def _three_digits(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}" if value == 0 else str(value)
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value) * 1.0005)))}f}"
