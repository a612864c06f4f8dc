"""Where the media of a row stand in its text.

For each medium apart, in this order:

1. Typed parts (`{"type": "image"}`) place it if the row has any; a tag such as `<image>` is then ordinary text. This is
   the way to write a tag as text in a row that has media.
2. Else, if the row has media of this kind, each tag in a turn of the user or of a tool stands for the next one, and
   there must be as many tags as media. In other turns the tag is ordinary text.
3. Else the tag is ordinary text.

The tags are `<image>`, `<video>` and `<audio>`; IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER and AUDIO_PLACEHOLDER in the
environment replace them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence

from mindspeed_mm.data.media import KINDS, Kind, MediaRef
from mindspeed_mm.data.messages import Message, Part, RowFault

#: roles whose text may place media
_PLACING_ROLES = ("user", "tool")
MISMATCH = "placeholders and media don't match"


def media_tags() -> dict[Kind, str]:
    """Return the tag of each medium."""
    return {kind: os.environ.get(f"{kind.upper()}_PLACEHOLDER") or f"<{kind}>" for kind in KINDS}


def place_media(
    messages: Sequence[Message], media: Mapping[Kind, list[MediaRef]], tags: Mapping[Kind, str], leads: bool = False
) -> None:
    """Put the media of a row's columns where its turns say, in place.

    Args:
        messages: The turns.
        media: Media of each column that has any.
        tags: See `media_tags`.
        leads: A single medium without a tag stands at the beginning of the first turn of the user.

    Raises:
        RowFault: The counts differ.
    """
    typed = {part.kind for message in messages for part in message.parts if isinstance(part, MediaRef)}
    if not typed and not media:
        return
    for kind in typed:
        _place_typed(messages, kind, media.get(kind, []))
    by_tag = {kind: refs for kind, refs in media.items() if kind not in typed}
    for kind, refs in by_tag.items():
        found = _count(messages, tags[kind])
        if not found and len(refs) == 1 and leads and _lead(messages, tags[kind]):
            found = 1
        if found != len(refs):
            tag = tags[kind]
            raise RowFault(
                f"{found} {tag} placeholder(s) in user and tool turns for {len(refs)} {kind}(s); the counts must be "
                f"equal (in other turns {tag} is ordinary text; a row that needs the tag as text beside "
                f"media can write its content as a list of typed parts)",
                MISMATCH,
            )
    if by_tag:
        _replace_tags(messages, by_tag, tags)


def _place_typed(messages: Sequence[Message], kind: Kind, refs: list[MediaRef]) -> None:
    """Give the typed parts without a path those of the column; a column that repeats the parts' own paths is fine."""
    parts = [part for message in messages for part in message.media if part.kind == kind]
    waiting = [part for part in parts if _waits(part)]
    if not waiting and refs == parts:
        return
    if len(waiting) != len(refs):
        raise RowFault(
            f"{len(waiting)} {kind} part(s) without a path for {len(refs)} path(s) in the {kind} column; "
            "the counts must be equal",
            MISMATCH,
        )
    if not waiting:
        return
    supply = iter(refs)
    for message in messages:
        message.parts = [
            next(supply) if isinstance(part, MediaRef) and part.kind == kind and _waits(part) else part
            for part in message.parts
        ]


def _waits(part: MediaRef) -> bool:
    return not (part.path or part.frames or part.content is not None)


def _count(messages: Sequence[Message], tag: str) -> int:
    return sum(
        part.count(tag)
        for message in messages
        if message.role in _PLACING_ROLES
        for part in message.parts
        if isinstance(part, str)
    )


def _lead(messages: Sequence[Message], tag: str) -> bool:
    """Put a tag and a line break before the first turn of the user, if there is one."""
    for message in messages:
        if message.role == "user":
            first = message.parts[0] if message.parts else ""
            message.parts[:1] = [f"{tag}\n{first}"] if isinstance(first, str) else [f"{tag}\n", first]
            return True
    return False


@functools.lru_cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(re.escape(tag) for tag in tags) + ")")


def _replace_tags(messages: Sequence[Message], media: Mapping[Kind, list[MediaRef]], tags: Mapping[Kind, str]) -> None:
    kinds = {tags[kind]: kind for kind in media}
    pattern = _any_of(tuple(kinds))
    supply = {kind: iter(refs) for kind, refs in media.items()}
    for message in messages:
        if message.role not in _PLACING_ROLES:
            continue
        parts: list[Part] = []
        for part in message.parts:
            if not isinstance(part, str):
                parts.append(part)
                continue
            for number, piece in enumerate(pattern.split(part)):
                if number % 2:
                    parts.append(next(supply[kinds[piece]]))
                elif piece:
                    parts.append(piece)
        message.parts = parts
