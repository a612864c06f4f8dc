"""Take rows for validation."""

from __future__ import annotations

import numpy as np

from mindspeed_mm.utils.errors import DataError


def split_rows(rows: np.ndarray, size: float | int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Take rows for validation: at random by seed, at least one; both parts stay in file order.

    Args:
        rows: their numbers, [rows] int64.
        size: an int is a number of rows, a float a share of them.
        seed: of the choice.

    Raises:
        DataError: no row would be left to train on.
    """
    is_count = isinstance(size, int)
    if len(rows) < 2 or (is_count and size >= len(rows)):
        raise DataError(
            f"{'val_size' if is_count else 'val_rate'} {size}: {len(rows)} row{'s' * (len(rows) != 1)} can't be split "
            "into training and validation rows"
        )
    count = int(size) if is_count else min(len(rows) - 1, max(1, round(len(rows) * size)))
    order = np.argsort(np.random.PCG64(seed).random_raw(len(rows)), kind="stable")
    return np.sort(rows[order[count:]]), np.sort(rows[order[:count]])
