"""Captions: clean them by data.json, choose one of several, and drop some at random."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Sequence
from types import ModuleType

from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.sample_random import uniform


@functools.cache
def _ftfy() -> ModuleType:
    require_extra("generation", "text_preprocess_methods: basic_clean")
    import ftfy

    return ftfy


def clean(text: str, methods: Sequence[str]) -> str:
    """Clean a caption.

    Args:
        text: The caption in the row.
        methods: Names of methods, in order: basic_clean (broken characters repaired, HTML entities resolved twice,
            space at the ends cut), whitespace_clean (runs of space become one).

    Raises:
        ConfigError: basic_clean, and ftfy isn't installed.
    """
    for method in methods:
        if method == "basic_clean":
            text = html.unescape(html.unescape(_ftfy().fix_text(text))).strip()
        else:
            text = re.sub(r"\s+", " ", text).strip()
    return text


def choose(captions: Sequence[str], key: int) -> str:
    """Return one of a row's captions, by the key of its sample."""
    return captions[0] if len(captions) == 1 else captions[int(uniform(key, "pick") * len(captions))]


def is_left_out(key: int, share: float) -> bool:
    """Whether a sample is trained without its caption.

    Args:
        key: Key of the sample.
        share: Probability of dropping the caption.
    """
    return share > 0 and uniform(key, "caption") < share
