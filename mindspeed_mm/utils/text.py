"""Texts of data files and messages: whole characters, shortening, and texts inside JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def whole_characters(text: str) -> str:
    """Return a text that UTF-8 can encode: each half of a surrogate pair without its other half becomes U+FFFD.

    JSON may have such halves ("\\ud83d", of an emoji that was cut in two); no tokenizer takes them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def shorten(text: str, limit: int = 120) -> str:
    """Shorten a text for a message: the middle of one longer than `limit` is replaced by its length.

    Every message that quotes a user's text uses this: a picture in base64 or a file of one line may be in the place of
    a name.
    """
    if len(text) <= limit:
        return text
    length = f" … [{len(text):,} characters] … "
    kept = max(limit - len(length), 2)
    return f"{text[: kept - kept // 3]}{length}{text[len(text) - kept // 3 :]}"


def shorten_lines(message: str) -> str:
    """Shorten each line of a whole message, so that it stays readable whatever it quotes."""
    return "\n".join(shorten(line, 1600) for line in message.split("\n"))


def printable(text: str) -> str:
    """Return a text that can be printed and written: halves of surrogate pairs as escapes (of a file's name, say)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def map_texts(value: object, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text inside a JSON value, the keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return value
