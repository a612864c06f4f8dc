"""One reading of booleans, numbers and dtype names, for flags, JSON and YAML alike.

Each reader returns the typed value or raises `ValueError` whose text says what was expected; the caller adds where the
value stood and what it was. `True`/`1`/`on` and `1e-5` written as text are the usual accidents of hand-written files:
what can only mean one thing is taken, the rest is refused.
"""

from __future__ import annotations

import math
import re

from mindspeed_mm.utils.text import shorten

_TRUE_WORDS = frozenset({"true", "1", "on", "yes"})
_FALSE_WORDS = frozenset({"false", "0", "off", "no"})
_NULL_WORDS = frozenset({"none", "null"})
_WHOLE_NUMBER = re.compile(r"[+-]?\d+")

#: every accepted spelling of a dtype → its short name, the one that the rest of the package uses
SHORT_DTYPE_NAMES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
}


def is_null_word(value: object) -> bool:
    """Whether `value` is text that stands for null: `None`, `none`, `null` …"""
    return isinstance(value, str) and value.strip().lower() in _NULL_WORDS


def read_bool(value: object) -> bool:
    """Read a boolean: true/false, 1/0, and the words true/false, on/off, yes/no, 1/0 in any case."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE_WORDS:
            return True
        if word in _FALSE_WORDS:
            return False
    raise ValueError("expected true or false")


def read_int(value: object) -> int:
    """Read a whole number: an int, the text of one, or a float without a fraction such as `1e4`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError("expected a whole number")


def read_float(value: object) -> float:
    """Read a finite number; text such as `1e-5` or `1E5` counts (YAML 1.1 leaves both as text)."""
    number = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and "_" not in value:
        try:
            number = float(value)
        except ValueError:
            number = None
    if number is None or not math.isfinite(number):
        raise ValueError("expected a number such as 1e-5")
    return number


def read_dtype(value: object) -> str:
    """Read a dtype name and return its short form: `bf16`, `fp16` or `fp32`."""
    name = SHORT_DTYPE_NAMES.get(value.strip().lower()) if isinstance(value, str) else None
    if name is None:
        raise ValueError("expected one of bf16, fp16, fp32")
    return name


def show(value: object) -> str:
    """Return `value` as a message shows it: text quoted, null and booleans in JSON's words, cut at 80 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return shorten(repr(value), 80)
