"""Captions: cleaned as data.json says, one chosen of several, and left out now and then."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Sequence
from types import ModuleType

from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.sample_random import uniform


@functools.cache
def _ftfy() -> ModuleType | None:
    try:
        import ftfy
    except ImportError:
        notice("text_preprocess_methods basic_clean: ftfy isn't installed; HTML entities only are put right")
        return None
    return ftfy


def clean(text: str, methods: Sequence[str]) -> str:
    """Clean a caption.

    Args:
        text: As the row has it.
        methods: In order: basic_clean (broken characters put right where ftfy is installed, HTML entities resolved
            twice, space at the ends cut), whitespace_clean (runs of space become one).
    """
    for method in methods:
        if method == "basic_clean":
            repair = _ftfy()
            text = html.unescape(html.unescape(repair.fix_text(text) if repair is not None else text)).strip()
        else:
            text = re.sub(r"\s+", " ", text).strip()
    return text


def choose(captions: Sequence[str], key: int) -> str:
    """Return one of a row's captions, by the key of its sample."""
    return captions[0] if len(captions) == 1 else captions[int(uniform(key, "pick") * len(captions))]


def is_left_out(key: int, share: float) -> bool:
    """Whether a sample is trained without its caption.

    Args:
        key: Of the sample.
        share: Probability.
    """
    return share > 0 and uniform(key, "caption") < share
