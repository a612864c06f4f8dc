"""Requests for a chat completion that a server refuses, each with the status and the sentence that it must answer."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

from PIL import Image

#: how the server that refuses them is started
WORDS = ("--served-model-name", "tiny", "--max-request-mib", 1, "--max-media", 4, "--max-image-pixels", 50_000)


def picture(width: int, height: int) -> str:
    """The URL of a PNG file."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def bomb() -> str:
    """The URL of a PNG file whose header promises 100 megapixels."""
    head = b"IHDR" + (10_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    data = b"IDAT" + zlib.compress(bytes(10_000), 9)
    chunks = [len(c[4:]).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in (head, data, b"IEND")]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def asked(content: object = "what", **fields: object) -> dict[str, Any]:
    """A body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


def with_url(url: object, kind: str = "image") -> dict[str, Any]:
    """A body with a medium."""
    return asked([{"type": f"{kind}_url", f"{kind}_url": {"url": url}}, {"type": "text", "text": "what"}])


def with_sound(data: object) -> dict[str, Any]:
    """A body with a sound."""
    return asked([{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}])


#: what is sent → status, field that is named, words of the sentence
REFUSED: dict[str, tuple[object, int, str | None, str]] = {
    "not JSON": (b"{", 400, None, "JSON object"),
    "a list": (b"[]", 400, None, "JSON object"),
    "deep": (b"[" * 100_000, 400, None, "pars"),
    "not UTF-8": (b'{"model": "\xff"}', 400, None, "pars"),
    "no model": ({"messages": []}, 400, "model", "expected 'tiny'"),
    "another model": ({**asked(), "model": "gpt-4o"}, 404, "model", "the model of this server is 'tiny'"),
    "a path as model": ({**asked(), "model": "/tmp"}, 404, "model", "there is no model '/tmp'"),
    "no messages": ({"model": "tiny"}, 400, "messages", "the field is missing"),
    "empty messages": ({"model": "tiny", "messages": []}, 400, "messages", "at least 1"),
    "messages as text": ({"model": "tiny", "messages": "what"}, 400, "messages", "valid list"),
    "a role": ({"model": "tiny", "messages": [{"role": "me", "content": ""}]}, 400, "messages[0].role", "'user'"),
    "a tool's result": (
        {"model": "tiny", "messages": [{"role": "tool", "content": "", "tool_call_id": "1"}]},
        400,
        "messages[0].role",
        "found 'tool'",
    ),
    "content as number": (asked(3), 400, "messages[0].content", "found 3"),
    "no content": ({"model": "tiny", "messages": [{"role": "user"}]}, 400, "messages[0].content", "is missing"),
    "a part without type": (asked([{"text": "what"}]), 400, "messages[0].content[0]", "type"),
    "a part's type": (asked([{"type": "picture"}]), 400, "messages[0].content[0]", "image_url"),
    "a text as number": (asked([{"type": "text", "text": 3}]), 400, "messages[0].content[0].text", "found 3"),
    "an unknown field of a part": (
        asked([{"type": "text", "text": "", "bold": True}]),
        400,
        "messages[0].content[0].bold",
        "unknown field",
    ),
    "the answer last": (
        {"model": "tiny", "messages": [{"role": "assistant", "content": "a"}]},
        400,
        "messages",
        "the last one is the assistant's",
    ),
    "an unknown field": (asked(temprature=1), 400, "temprature", "did you mean 'temperature'?"),
    "tools": (asked(tools=[{"type": "function"}]), 400, "tools", "tools aren't called here"),
    "two answers": (asked(n=2), 400, "n", "a request gets one answer"),
    "true as number": (asked(n=True), 400, "n", "a request gets one answer"),
    "probabilities": (asked(logprobs=True), 400, "logprobs", "aren't returned"),
    "a schema": (asked(response_format={"type": "json_object"}), 400, "response_format", "without a schema"),
    "temperature as text": (asked(temperature="1"), 400, "temperature", "found '1'"),
    "temperature": (asked(temperature=-1), 400, "temperature", "greater than or equal to 0"),
    "no number": (
        b'{"model": "tiny", "messages": [{"role": "user", "content": ""}], "temperature": NaN}',
        400,
        None,
        "",
    ),
    "top_p": (asked(top_p=0.5), 400, "top_p", "send a temperature above 0"),
    "a seed": (asked(seed=1.5), 400, "seed", "integer"),
    "no tokens": (asked(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    "tokens as text": (asked(max_tokens="8"), 400, "max_tokens", "found '8'"),
    "two lengths": (asked(max_tokens=8, max_completion_tokens=9), 400, "max_tokens", "send one of them"),
    "an answer too long": (asked(max_tokens=10**9), 400, "max_tokens", "an answer has at most"),
    "five stops": (asked(stop=list("abcde")), 400, "stop", "at most 4"),
    "an empty stop": (asked(stop=""), 400, "stop[0]", "at least 1 character"),
    "stream as text": (asked(stream="yes"), 400, "stream", "found 'yes'"),
    "usage without stream": (asked(stream_options={"include_usage": True}), 400, "stream_options", "with stream true"),
    "a prompt too long": (asked("what " * 40_000), 400, "messages", "at most"),
    "characters": (asked("x" * 1_000_000), 400, "messages", "at most"),
    "a body too large": (asked("x" * 1_100_000), 413, None, "larger than 1 MiB"),
    "no base64": (with_url("data:image/png;base64,@@@"), 400, "messages[0].content[0].image_url.url", "base64"),
    "half of it": (with_url(picture(9, 9)[:-3]), 400, "messages[0].content[0].image_url.url", "base64"),
    "a cut file": (with_url(picture(64, 64)[:102]), 400, "messages", "can't be decoded"),
    "no picture": (with_url("data:image/png;base64,aGVsbG8="), 400, "messages", "is not an image"),
    "a sound as picture": (
        with_url("data:audio/wav;base64,aGVsbG8="),
        400,
        "messages[0].content[0].image_url.url",
        "expected image/",
    ),
    "not in base64": (with_url("data:image/png,hello"), 400, "messages[0].content[0].image_url.url", ";base64"),
    "no URL": (with_url("cat.png"), 400, "messages[0].content[0].image_url.url", "data:, file:"),
    "a number as URL": (with_url(3), 400, "messages[0].content[0].image_url.url", "found 3"),
    "another host": (
        with_url("http://127.0.0.1:1/a.png"),
        400,
        "messages[0].content[0].image_url.url",
        "--media-hosts",
    ),
    "another scheme": (with_url("ftp://localhost/a"), 400, "messages[0].content[0].image_url.url", "ftp"),
    "a bomb": (with_url(bomb()), 400, "messages", "more than 50,000 pixels"),
    "two large pictures": (
        asked([{"type": "image_url", "image_url": {"url": picture(200, 200)}}] * 2),
        400,
        "messages",
        "more than 50,000 pixels",
    ),
    "five media": (
        asked([{"type": "image_url", "image_url": {"url": picture(9, 9)}}] * 5),
        400,
        "messages",
        "5 media, and a request may have 4",
    ),
    "a narrow picture": (with_url(picture(1, 900)), 400, "messages", "the longer side may be"),
    "detail": (
        asked([{"type": "image_url", "image_url": {"url": picture(9, 9), "detail": "low"}}]),
        400,
        "messages[0].content[0].image_url.detail",
        "found 'low'",
    ),
    "no sound": (with_sound("aGVsbG8="), 400, "messages", "can't be decoded as a sound"),
    "a sound as number": (with_sound(3), 400, "messages[0].content[0].input_audio.data", "found 3"),
    "no video": (with_url("data:video/mp4;base64,aGVsbG8=", "video"), 400, "messages", "can't be decoded as a video"),
}
