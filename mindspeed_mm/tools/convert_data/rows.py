"""Conversations and captions as rows of one form, which training reads without any `attr`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data.conversation.messages import Conversation, Message
from mindspeed_mm.data.conversation.placeholders import media_tags
from mindspeed_mm.data.conversation.records import RecordReader
from mindspeed_mm.data.generation.annotations import Annotation, read_annotation
from mindspeed_mm.data.media.media import KINDS, MediaKind, MediaRef
from mindspeed_mm.data.places import Place
from mindspeed_mm.utils.errors import BadSample

#: columns of media in rows of conversations
MEDIA_COLUMNS: dict[MediaKind, str] = {kind: f"{kind}s" for kind in KINDS}
_ATTR = DatasetAttr(
    messages="messages",
    role_tag="role",
    content_tag="content",
    user_tag="user",
    assistant_tag="assistant",
    tools="tools",
    **{column: column for column in MEDIA_COLUMNS.values()},
)
_READER = RecordReader(_ATTR)
_CHANGED = "a row would be read as another one"


class NewRow(NamedTuple):
    """A row as it is written.

    Attributes:
        columns: its columns.
        group: rows with the same one stay together when rows are taken for validation.
    """

    columns: dict[str, Any]
    group: str


def row_of_conversation(conversation: Conversation) -> dict[str, Any]:
    """Return the row that training reads as a conversation, with tags such as `<image>` where that is possible.

    Args:
        conversation: its media as they are to be named in the row.

    Raises:
        BadSample: there is no such row.
    """
    for is_typed in (False, True):
        row = _written(conversation, is_typed)
        try:
            found = _READER.read(row, conversation.where)
        except BadSample:
            continue
        if (found.messages, found.tools) == (conversation.messages, conversation.tools):
            return row
    raise BadSample(f"{conversation.where}: {_CHANGED}: its turns can't be written as 'messages'", _CHANGED)


def _written(conversation: Conversation, is_typed: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"messages": [_turn(message, is_typed) for message in conversation.messages]}
    for kind, column in MEDIA_COLUMNS.items():
        media = [named_medium(ref) for ref in conversation.media if ref.kind == kind]
        if media:
            row[column] = media
    return row | ({"tools": conversation.tools} if conversation.tools else {})


def _turn(message: Message, is_typed: bool) -> dict[str, Any]:
    parts = message.parts
    content: object
    if is_typed and (len(parts) != 1 or message.media):
        content = [{"type": p.kind} if isinstance(p, MediaRef) else {"type": "text", "text": p} for p in parts]
    else:
        tags = media_tags()
        content = "".join(tags[part.kind] if isinstance(part, MediaRef) else part for part in parts)
    return {"role": message.role, "content": content, **message.extra, **({} if message.train else {"loss": False})}


def named_medium(ref: MediaRef) -> Any:
    """Return a medium as a column of a row names it."""
    if ref.frames:
        pictures = [named_medium(picture) for picture in ref.frames]
        return pictures if ref.fps is None else {"frames": pictures, "fps": ref.fps}
    return ref.path if ref.fps is None else {ref.kind: ref.path, "fps": ref.fps}


def row_of_annotation(annotation: Annotation, pictures_only: bool, where: Place) -> dict[str, Any]:
    """Return the row that training of generation models reads as an annotation.

    Args:
        annotation: its file as it is to be named in the row.
        pictures_only: as in `read_annotation`.
        where: the row that it was read from.

    Raises:
        BadSample: there is no such row.
    """
    captions = list(annotation.captions)
    only = captions[0] if len(captions) == 1 and not _is_list(captions[0]) else captions
    row: dict[str, Any] = {"path": annotation.ref.path, "cap": only}
    numbers = {"num_frames": annotation.frames, "fps": annotation.fps}
    row |= {name: value for name, value in numbers.items() if value is not None}
    sides = {"height": annotation.height, "width": annotation.width}
    if known := {name: value for name, value in sides.items() if value is not None}:
        row["resolution"] = known
    places = {"cut": annotation.cut, "crop": annotation.crop}
    row |= {name: list(value) for name, value in places.items() if value is not None}
    if read_annotation(row, pictures_only, where) != annotation:
        raise BadSample(f"{where}: {_CHANGED}: '{annotation.ref.path}' hasn't the suffix of its kind", _CHANGED)
    return row


def _is_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False
