"""Place the media of a row in its text.

These rules apply to each kind of medium separately, in this order:

1. Typed parts (`{"type": "image"}`) place it if the row has any; a tag such as `<image>` is then ordinary text. Use
   them to write a tag as text in a row with media.
2. Else, if the row has as many media of this kind as its turns of the user and of tools have tags, each of these tags
   is replaced by the next one; in other turns the tag is then ordinary text.
3. Else, if it has as many as all of its turns together have tags, these are replaced (a picture in an answer).
4. Else, with media of this kind the row is refused, and without any the tag is ordinary text.

The tags are `<image>`, `<video>` and `<audio>`; IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER and AUDIO_PLACEHOLDER in the
environment replace them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence

from mindspeed_mm.data.conversation.messages import Message, MessagePart, RowFault
from mindspeed_mm.data.media.media import KINDS, MediaKind, MediaRef

#: roles whose tags place the media where there are as many of these
_ASKING_ROLES = frozenset({"user", "tool"})
MISMATCH = "placeholders and media don't match"


def media_tags() -> dict[MediaKind, str]:
    """Return the tag of each medium."""
    return {kind: os.environ.get(f"{kind.upper()}_PLACEHOLDER") or f"<{kind}>" for kind in KINDS}


def place_media(
    messages: Sequence[Message],
    media: Mapping[MediaKind, list[MediaRef]],
    tags: Mapping[MediaKind, str],
    leads: bool = False,
) -> None:
    """Insert the media of a row's columns at their places in the turns, in place.

    Args:
        messages: The turns.
        media: Media of each column that has any.
        tags: See `media_tags`.
        leads: A single medium without a tag is placed at the beginning of the first turn of the user.

    Raises:
        RowFault: The counts differ.
    """
    typed = {part.kind for message in messages for part in message.parts if isinstance(part, MediaRef)}
    if not typed and not media:
        return
    for kind in typed:
        _place_typed(messages, kind, media.get(kind, []))
    by_tag = {kind: refs for kind, refs in media.items() if kind not in typed}
    roles = {kind: _placing_roles(messages, kind, len(refs), tags[kind], leads) for kind, refs in by_tag.items()}
    if by_tag:
        _replace_tags(messages, by_tag, tags, roles)


def _placing_roles(messages: Sequence[Message], kind: MediaKind, wanted: int, tag: str, leads: bool) -> frozenset[str]:
    """The roles of the turns whose tags are replaced by the media of a kind."""
    everyone = frozenset(message.role for message in messages)
    asked, found = _count(messages, tag, _ASKING_ROLES), _count(messages, tag, everyone)
    if asked == wanted or (not asked and wanted == 1 and leads and _lead(messages, tag)):
        return _ASKING_ROLES
    if found == wanted:
        return everyone
    more = "" if found == asked else f" ({found} in all turns)"
    raise RowFault(
        f"{asked} {tag} placeholder(s) in user and tool turns{more} for {wanted} {kind}(s); the counts must be equal "
        f"(a row that needs {tag} as text beside media can write its content as a list of typed parts)",
        MISMATCH,
    )


def _place_typed(messages: Sequence[Message], kind: MediaKind, refs: list[MediaRef]) -> None:
    """Fill typed parts without a path from the column; a column that repeats the parts' own paths is fine."""
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


def _count(messages: Sequence[Message], tag: str, roles: frozenset[str]) -> int:
    return sum(
        part.count(tag)
        for message in messages
        if message.role in roles
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


def _replace_tags(
    messages: Sequence[Message],
    media: Mapping[MediaKind, list[MediaRef]],
    tags: Mapping[MediaKind, str],
    roles: Mapping[MediaKind, frozenset[str]],
) -> None:
    supply = {kind: iter(refs) for kind, refs in media.items()}
    for message in messages:
        kinds = {tags[kind]: kind for kind in media if message.role in roles[kind]}
        if not kinds:
            continue
        pattern = _any_of(tuple(kinds))
        parts: list[MessagePart] = []
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
