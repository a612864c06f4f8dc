"""Errors of collectives that another rank has left."""

from __future__ import annotations

import re

from mindspeed_mm.utils.text import shorten

#: torch's errors of collectives and of the store in which ranks meet
_OF_COLLECTIVES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_LOST = "this rank lost another one, which has ended, or answers no more"


def lost_connection(error: Exception) -> str | None:
    """Return a sentence about a collective that another rank has left, by ending or by hanging; None: it is none."""
    text = str(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds.isdisjoint(_OF_COLLECTIVES) and not (type(error) is RuntimeError and "/gloo/transport/" in text):
        return None
    what = re.sub(r"^\[\S+\]\s*", "", text.splitlines()[0] if text else "").partition(". ")[0]
    return (
        f"{_LOST} ({type(error).__name__}: {shorten(what, 200)}); what ended it is above, or in the log of its machine"
    )
