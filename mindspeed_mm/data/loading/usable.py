"""Check before a run begins that there is anything to train on, as far as possible without decoding media."""

from __future__ import annotations

import time
from collections import Counter

from torch.utils.data import Dataset

from mindspeed_mm.data.sources.files import RowSource
from mindspeed_mm.utils.errors import DataError, MMError
from mindspeed_mm.utils.extras import has_extra, require_extra

_MOST_ROWS = 1000
_MOST_SECONDS = 30.0


def require_media_packages(source: RowSource) -> None:
    """Where the package that reads videos and sounds is missing, search the rows for media that need it.

    Args:
        source: the rows.

    Raises:
        ConfigError: a row has a video or a sound, and nothing that reads it is installed.
    """
    if has_extra("video"):
        return
    row, started = 0, time.monotonic()
    while source.has(row) and time.monotonic() - started < _MOST_SECONDS:
        try:
            media = source.read(row).media
        except MMError:  # of a row that is reported when it is read for a batch
            media = []
        for ref in media:
            if ref.kind != "image" and not ref.frames:
                what = "a sound" if ref.kind == "audio" else "a video"
                require_extra(ref.kind, f"{source.where(row)}: {what}")
        row += 1


def refuse_unusable(dataset: Dataset, num_rows: int | None) -> None:
    """Search for a row that gives a sample, from the first one on, which usually does.

    After many rows without one, and for a data set that can't be measured, there is no verdict: the run finds out.

    Args:
        dataset: may have `measure(row) -> list[SampleSize]`.
        num_rows: number of its rows; None: unknown.

    Raises:
        DataError: no row gives a sample; the reasons are counted.
    """
    if not num_rows or not hasattr(dataset, "measure"):
        return
    faults: Counter[str] = Counter()
    started = time.monotonic()
    for row in range(num_rows):
        if row >= _MOST_ROWS or time.monotonic() - started > _MOST_SECONDS:
            return
        try:
            sizes = dataset.measure(row)
        except MMError:  # of a row that ends the run when it is read for a batch
            return
        if not sizes or any(size.fault is None for size in sizes):
            return
        faults[sizes[0].fault] += 1
    reasons = ", ".join(f"{count} × {reason}" for reason, count in faults.most_common())
    where = getattr(dataset, "where", "row {}".format)
    raise DataError(
        f"none of the {num_rows} rows of the training data can be used: {reasons} (the first: {where(0)}); "
        "`mindspeed-mm data check` says what is wrong with each"
    )
