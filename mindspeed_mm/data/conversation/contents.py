"""Contents of turns and of media columns: text, typed parts, and the ways in which a medium is named."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, SupportsFloat
from urllib.parse import unquote

from mindspeed_mm.data.conversation.messages import MessagePart, RowFault, short_repr
from mindspeed_mm.data.media.media import MediaKind, MediaRef

#: type of a typed part → its kind of medium
_PART_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_BAD_CONTENT = "content can't be read"
_BAD_MEDIUM = "a medium is named in no known way"


def read_parts(content: object) -> list[MessagePart]:
    """Return the content of a turn as parts; null is empty text.

    A typed medium without a path of its own is a `MediaRef` with an empty path: it takes the next one of its column.
    """
    if isinstance(content, str):
        return [content]
    if content is None:
        return [""]
    if not isinstance(content, list):
        raise RowFault(f"expected text or a list of typed parts, found {short_repr(content)}", _BAD_CONTENT)
    return [_read_part(item) for item in content]


def _read_part(item: object) -> MessagePart:
    if isinstance(item, str):
        return item
    fields = item if isinstance(item, dict) else {}
    kind = fields.get("type")
    if kind == "text" and isinstance(fields.get("text"), str):
        return fields["text"]
    if not isinstance(kind, str) or kind not in _PART_KINDS:
        known = ", ".join(_PART_KINDS)
        raise RowFault(
            f"expected parts such as {{'type': 'text', 'text': …}} or of type {known}, found {short_repr(item)}",
            _BAD_CONTENT,
        )
    return _read_typed_medium(fields, kind, _PART_KINDS[kind])


def _read_typed_medium(item: Mapping[str, Any], kind: str, medium: MediaKind) -> MediaRef:
    value = next((item[key] for key in (kind, medium, "path", "url", "bytes") if item.get(key)), None)
    if value is None:
        return MediaRef(medium)
    if isinstance(value, dict) and value.get("data"):  # input_audio: {data: base64, format}
        return MediaRef(medium, "<data>", _decode_base64(str(value["data"]), medium))
    if isinstance(value, dict) and value.get("url"):
        value = value["url"]
    elif isinstance(value, bytes):
        value = {"bytes": value}
    if medium == "video" and (isinstance(value, list) or item.get("fps") is not None):
        value = {"frames" if isinstance(value, list) else "video": value, "fps": item.get("fps")}
    return read_medium(value, medium)


def read_media(value: object, kind: MediaKind, fps: object = None) -> list[MediaRef]:
    """Return the media that a column names.

    Args:
        value: The value of the column: null, "", [] and lists of such are no medium; one medium, or a list of them,
            each a path, a data: URI, an object with `path` or `bytes`; for a video also a list of pictures, or an
            object with `frames` or `video` and `fps`. A list may be written as JSON text.
        kind: The column's medium.
        fps: Frames a second of clips given as pictures: one number, or one for each video; None: not given.
    """
    value = list_of_text(value)
    items = [item for item in (value if isinstance(value, list) else [value]) if not _is_nothing(item)]
    if not items:
        return []
    rates = fps if isinstance(fps, list) and len(fps) == len(items) else [fps] * len(items)
    return [read_medium(item, kind, rate) for item, rate in zip(items, rates, strict=True)]


def read_medium(item: object, kind: MediaKind, fps: object = None) -> MediaRef:
    """Return one medium (see `read_media`); `fps` applies to a clip given as pictures without a rate of its own."""
    if isinstance(item, str):
        return _named(item, kind)
    if kind == "video" and isinstance(item, list):
        return _clip_of_pictures(item, fps)
    if isinstance(item, dict):
        own = _read_fps(item.get("fps"))
        if kind == "video" and item.get("frames"):
            return _clip_of_pictures(item["frames"], fps if own is None else own)
        if content := item.get("bytes"):
            content = content if isinstance(content, bytes) else _decode_base64(str(content), kind)
            return MediaRef(kind, item.get("path") or "<bytes>", content, fps=own)
        named = next((item[key] for key in ("path", kind, "url") if isinstance(item.get(key), str) and item[key]), None)
        if named:
            ref = _named(named, kind)
            return MediaRef(kind, ref.path, ref.content, fps=own)
    example = " or a list of pictures" if kind == "video" else ""
    raise RowFault(f"expected the path of {_ARTICLES[kind]} {kind}{example}, found {short_repr(item)}", _BAD_MEDIUM)


_ARTICLES = {"image": "an", "video": "a", "audio": "an"}


def _clip_of_pictures(pictures: object, fps: object) -> MediaRef:
    pictures = [picture for picture in pictures if not _is_nothing(picture)] if isinstance(pictures, list) else []
    if not pictures:
        raise RowFault("a video given as pictures without any picture", _BAD_MEDIUM)
    return MediaRef("video", frames=tuple(read_medium(item, "image") for item in pictures), fps=_read_fps(fps))


def _read_fps(value: object) -> float | None:
    if value is None or value == "":
        return None
    try:
        number = float(value) if isinstance(value, (str, SupportsFloat)) else 0.0
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise RowFault(f"frames a second: expected a number above 0, found {short_repr(value)}", _BAD_MEDIUM)
    return number


# of JPEG, PNG, GIF, WebP and WAV files
_BASE64_BEGINNINGS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")


def _named(name: str, kind: MediaKind) -> MediaRef:
    """A path, `file://` path or data: URI."""
    scheme = name[:8].lower()
    if scheme.startswith("data:"):
        head, comma, data = name.partition(",")
        if not comma:
            raise RowFault(f"a data: URI without data: {short_repr(name)}", _BAD_MEDIUM)
        content = _decode_base64(data, kind) if ";base64" in head else unquote(data).encode("latin-1", "replace")
        return MediaRef(kind, "<data>", content)
    if scheme.startswith("file://"):
        return MediaRef(kind, unquote(name[7:]))
    if scheme.startswith(("http://", "https://")):
        raise RowFault(
            f"{short_repr(name)} is on the network, and nothing is fetched while training; download it and write "
            "its path",
            "a medium is on the network",
        )
    if _is_base64(name):
        return MediaRef(kind, "<data>", _decode_base64(name, kind))
    return MediaRef(kind, name)


def _is_base64(name: str) -> bool:
    """Whether a path is the content of a file instead, in base64 and without `data:` before it.

    No path is longer than 4096 bytes; a shorter text is content if it begins like a known format and has no suffix.
    """
    return len(name) > 4096 or (len(name) > 64 and name.startswith(_BASE64_BEGINNINGS) and "." not in name)


def _decode_base64(data: str, kind: MediaKind) -> bytes:
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowFault(f"the {kind}'s base64 data can't be decoded: {error}", _BAD_MEDIUM) from None


def _is_nothing(item: object) -> bool:
    """Whether a value names no medium: null, "", an empty list, a missing number, an object without a value."""
    if item is None or item == "" or item == []:
        return True
    if isinstance(item, float):
        return item != item  # a missing cell of a table is NaN
    return isinstance(item, dict) and not any(item.values())


def list_of_text(value: object) -> Any:
    """Parse a text that is a JSON list or object, as in csv cells; return anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            read = json.loads(value)
        except ValueError:
            return value
        return read if isinstance(read, (list, dict)) else value
    return value
