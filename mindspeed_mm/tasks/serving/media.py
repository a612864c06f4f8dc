"""Media of requests: which URLs may name them, and limits that are held before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message as Headers
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import SplitResult, unquote, urlsplit

from mindspeed_mm.data.media.images import image_size
from mindspeed_mm.data.media.media import MediaKind, MediaRef
from mindspeed_mm.data.media.media_files import find_media
from mindspeed_mm.tasks.serving.describe import ServeLimits
from mindspeed_mm.tasks.serving.errors import RequestError
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.text import shorten

_DATA = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_SECONDS = 30.0  # that one answer of a host may take
_WHERE = "the request"
#: type of a part → kind of its medium
_PARTS: Mapping[str, MediaKind] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}


def read_url(kind: MediaKind, url: str, limits: ServeLimits, param: str) -> MediaRef:
    """Return the medium that a URL names: its bytes, or the path of a file below the folder of media.

    Args:
        param: where the URL stands in the request, for messages.

    Raises:
        RequestError: a kind of URL that isn't allowed, or nothing that can be read.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return MediaRef(kind, param, _of_data_url(kind, url, limits, param))
    if scheme == "file":
        return MediaRef(kind, _below_root(urlsplit(url), limits, param))
    if scheme in ("http", "https"):
        return MediaRef(kind, param, _fetched(url, limits, param))
    allowed = "data:" + (", file:" if limits.media_root else "") + (", http:, https:" if limits.media_hosts else "")
    raise RequestError(f"{param}: found {shorten(repr(url))}; expected a URL of the kind {allowed}", param)


def read_base64(kind: MediaKind, text: str, limits: ServeLimits, param: str) -> MediaRef:
    """Return the medium whose bytes are written in base64.

    Raises:
        RequestError: they aren't, or they are too many.
    """
    return MediaRef(kind, param, _decoded(text, limits, param))


def check_pixels(media: Sequence[MediaRef], limits: ServeLimits) -> None:
    """Hold the limit on the pixels of a request's images, by their headers.

    Raises:
        RequestError: there are more.
        BadSample: an image can't be read.
    """
    pixels = 0
    for ref in media:
        if ref.kind != "image":
            continue
        try:
            width, height = image_size(find_media(ref, ("",), _WHERE), limits.image_pixels)
        except BadSample as error:
            if error.reason != "image too large":
                raise
            pixels = limits.image_pixels + 1
        else:
            pixels += width * height
        if pixels > limits.image_pixels:
            raise RequestError(
                f"{ref.path}: with this image the request has more than {limits.image_pixels:,} pixels; scale its "
                "images down (the server's --max-image-pixels)",
                "messages",
                code="image_too_large",
            )


def check_media(content: Mapping[str, Any], limits: ServeLimits) -> None:
    """Hold the limits on the media of a body that another application reads; hosts are not asked.

    Raises:
        RequestError: a limit is passed, or there are parts of a kind that isn't known here.
        BadSample: an image can't be read.
    """
    found: list[MediaRef] = []
    messages = content.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        parts = message.get("content") if isinstance(message, dict) else None
        for at, part in enumerate(parts if isinstance(parts, list) else []):
            ref = _looked_at(part, limits, f"messages[{number}].content[{at}]")
            found += [] if ref is None else [ref]
    check_count(len(found), limits)
    check_pixels(found, limits)


def check_count(count: int, limits: ServeLimits) -> None:
    """Hold the limit on the number of media.

    Raises:
        RequestError: there are more.
    """
    if count > limits.media:
        raise RequestError(
            f"messages: {count} media, and a request may have {limits.media} (the server's --max-media)", "messages"
        )


def _looked_at(part: object, limits: ServeLimits, param: str) -> MediaRef | None:
    """The medium of a part of a message; None: it is a text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in (*_PARTS, "text", "refusal"):
        raise RequestError(f"{param}: found {shorten(repr(part))}; expected a part of type text, {', '.join(_PARTS)}")
    if kind not in _PARTS:
        return None
    value, param = part.get(kind), f"{param}.{kind}"
    text = value.get("data" if kind == "input_audio" else "url") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise RequestError(f"{param}: found {shorten(repr(value))}; expected an object with a text", param)
    medium = _PARTS[kind]
    if kind == "input_audio":
        return read_base64(medium, text, limits, param)
    if text.partition(":")[0].lower() in ("http", "https"):
        _check_host(text, limits, param)
        return MediaRef("video", param)  # counted, and of no size that is known
    return read_url(medium, text, limits, param)


def _of_data_url(kind: MediaKind, url: str, limits: ServeLimits, param: str) -> bytes:
    head = _DATA.match(url)
    if head is None or not head[2].lower().endswith(";base64"):
        raise RequestError(f"{param}: found {shorten(repr(url))}; expected data:{kind}/…;base64,…", param)
    stated = head[1].partition("/")[0].lower()
    if stated not in ("", kind, "application"):
        raise RequestError(f"{param}: the URL holds {head[1]}, expected {kind}/…", param)
    return _decoded(url[head.end() :], limits, param)


def _decoded(text: str, limits: ServeLimits, param: str) -> bytes:
    if len(text) // 4 * 3 > limits.body_bytes:
        raise _too_large(param, limits)
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{param}: not valid base64: {error}; it begins with {text[:16]!r}", param) from None
    if not content:
        raise RequestError(f"{param}: no bytes in it", param)
    return content


def _below_root(url: SplitResult, limits: ServeLimits, param: str) -> str:
    """The path of a file: URL; symbolic links are followed before the folder is compared."""
    if limits.media_root is None:
        raise RequestError(f"{param}: this server reads no files (it was started without --media-root)", param)
    path = unquote(url.path)
    if url.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise RequestError(f"{param}: found {shorten(repr(url.geturl()))}; expected file:///absolute/path", param)
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(limits.media_root, "")):
        raise RequestError(f"{param}: '{shorten(path)}' isn't below the folder of media", param, status=403)
    try:
        found = os.stat(real)
    except OSError:
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise RequestError(f"{param}: there is no file '{shorten(path)}'", param)
    if found.st_size > limits.body_bytes:
        raise _too_large(param, limits)
    return real


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The host that is asked is the one that was allowed."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Headers, newurl: str
    ) -> None:
        return None


def _check_host(url: str, limits: ServeLimits, param: str) -> None:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if host not in limits.media_hosts:
        allowed = ", ".join(limits.media_hosts) or "none (it was started without --media-hosts)"
        raise RequestError(f"{param}: this server fetches nothing from {host!r}; hosts allowed: {allowed}", param)


def _fetched(url: str, limits: ServeLimits, param: str) -> bytes:
    _check_host(url, limits, param)
    try:
        with urllib.request.build_opener(_NoRedirects).open(url, timeout=_SECONDS) as answer:
            content = answer.read(limits.body_bytes + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise RequestError(f"{param}: {shorten(repr(url))} can't be fetched: {error}", param) from None
    if len(content) > limits.body_bytes:
        raise _too_large(param, limits)
    return content


def _too_large(param: str, limits: ServeLimits) -> RequestError:
    most = limits.body_bytes // 2**20
    return RequestError(f"{param}: larger than {most} MiB (the server's --max-request-mib)", param, status=413)
