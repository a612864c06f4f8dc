"""The names of columns that rows of no known form probably mean, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mindspeed_mm.data.conversation.contents import list_of_text

_PROMPTS = ("instruction", "prompt", "question", "query", "problem", "input", "user", "human", "source")
_ANSWERS = (
    "output",
    "response",
    "answer",
    "completion",
    "solution",
    "assistant",
    "target",
    "chosen",
    "reply",
    "summary",
    "label",
)
_ROLES = ("role", "from", "speaker", "author", "type", "name", "sender")
_CONTENTS = ("content", "value", "text", "message", "utterance", "body")
_MEDIA = {"images": ("images", "image"), "videos": ("videos", "video"), "audios": ("audios", "audio")}


def nearest_attr(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the keys of `attr` that name what rows probably hold: turns in a column, or a prompt and an answer.

    Args:
        rows: the first rows of a file.

    Returns:
        key → name of a column or a role; {}: nothing is near.
    """
    for row in rows:
        found = _turns(row) or _columns(row)
        if found:
            return found | {key: name for key, names in _MEDIA.items() for name in names if row.get(name)}
    return {}


def _turns(row: Mapping[str, Any]) -> dict[str, str]:
    for column, value in row.items():
        turns = list_of_text(value)
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            continue
        role, content = (_column_of(turns[0], names) for names in (_ROLES, _CONTENTS))
        if role is None or content is None:
            continue
        names = {"formatting": "sharegpt", "messages": column, "role_tag": role, "content_tag": content}
        said = dict.fromkeys(str(turn.get(role)) for turn in turns)
        speakers = [speaker for speaker in said if speaker.lower() != "system"]
        return names | dict(zip(("user_tag", "assistant_tag"), speakers[:2], strict=False))
    return {}


def _columns(row: Mapping[str, Any]) -> dict[str, str]:
    prompt, answer = _column_of(row, _PROMPTS), _column_of(row, _ANSWERS)
    if prompt is None or answer is None:
        return {}
    return {"formatting": "alpaca", "prompt": prompt, "response": answer}


def _column_of(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The column of one of these names, in any case, that holds a text."""
    texts = {str(column).lower(): str(column) for column, value in row.items() if isinstance(value, str)}
    return next((texts[name] for name in names if name in texts), None)
