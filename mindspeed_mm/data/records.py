"""From a row of a data file to a conversation: columns, roles, placeholders and media, checked with the row's name."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data.files import Place
from mindspeed_mm.utils.errors import DataError, did_you_mean

# What the published loaders read too; the tag in a text stands for the next medium of the row.
IMAGE_TAG = os.environ.get("IMAGE_PLACEHOLDER", "<image>")


class _Fault(Exception):
    """What is wrong with a row, before it is known for a message which row it is."""


#: roles whose text may place media; in the other roles the tag is ordinary text
_PLACING_ROLES = ("user", "tool")


@dataclass(frozen=True)
class ImageRef:
    """An image of a row: a path as written, or the encoded bytes (parquet)."""

    path: str
    content: bytes | None = None


Part = str | ImageRef


@dataclass
class Message:
    """One turn. `parts` are texts and images in the order they were written; `train` is the row's own flag."""

    role: str
    parts: list[Part]
    train: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> list[ImageRef]:
        """The images of this turn, in order."""
        return [part for part in self.parts if isinstance(part, ImageRef)]


@dataclass
class Conversation:
    """One row, ready to be rendered."""

    messages: list[Message]
    tools: list[Any] | None
    where: Place

    @property
    def has_target(self) -> bool:
        """Whether any assistant turn is to be trained on."""
        return any(message.role == "assistant" and message.train for message in self.messages)

    @property
    def images(self) -> list[ImageRef]:
        """All images, in order."""
        return [image for message in self.messages for image in message.images]


class RecordReader:
    """Turn rows into conversations as `attr` of data.json says.

    Args:
        attr: Names of columns and roles.
    """

    def __init__(self, attr: DatasetAttr) -> None:
        self.attr = attr
        self._roles = _role_table(attr)

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Check the names in `attr` against the columns found in the first rows of a file.

        Raises:
            DataError: A column that rows can't do without is missing, or an optional one is missing and another
                column has nearly its name.
        """
        found, attr = sorted(columns), self.attr
        alpaca = attr.formatting == "alpaca"
        needed = ["prompt", "query", "response", "history", "system"] if alpaca else ["messages", "system"]
        if alpaca and (attr.prompt is None or attr.response is None):
            need = "alpaca rows need dataset_param.attr.prompt and dataset_param.attr.response"
            raise DataError(f"{where}: {need}; columns found: {', '.join(found)}")
        for key in needed:
            name = getattr(attr, key)
            if name is not None and name not in found:
                raise DataError(f"{where}: {_missing_column(key, name, found)}")
        for key in ("images", "videos", "audios", "tools"):
            name = getattr(attr, key)
            if name is not None and name not in found and self._looks_misspelt(name, found):
                raise DataError(f"{where}: {_missing_column(key, name, found)}")

    def _looks_misspelt(self, name: str, found: Iterable[str]) -> bool:
        """Whether a column that nothing is mapped to has nearly this name ('images' is near to 'messages', too)."""
        mapped = {getattr(self.attr, key) for key in type(self.attr).model_fields}
        return bool(difflib.get_close_matches(name, [column for column in found if column not in mapped], cutoff=0.8))

    def unused_columns(self, columns: Iterable[str]) -> list[str]:
        """Columns with a published name for media or tools that `attr` doesn't map, so that their content is unused."""
        usual = ("images", "videos", "audios", "tools")
        return [key for key in usual if key in columns and getattr(self.attr, key) is None]

    def read(self, row: Mapping[str, Any], where: Place) -> Conversation:
        """Read one row.

        Args:
            row: The row as it stands in the file.
            where: Its name for messages.

        Raises:
            DataError: Missing column, unknown role, or placeholders and media that don't match.
        """
        try:
            for column in (self.attr.videos, self.attr.audios):
                if column and row.get(column):
                    raise _Fault(f"column '{column}': {_short(row[column])}; images are the only media read so far")
            messages = self._alpaca(row) if self.attr.formatting == "alpaca" else self._sharegpt(row)
            system = row.get(self.attr.system) if self.attr.system else None
            if system and messages[0].role != "system":
                messages.insert(0, Message("system", [_as_text(system, self.attr.system)]))
            _place_images(messages, self._image_column(row))
            return Conversation(messages, self._tools(row), where)
        except _Fault as fault:
            raise DataError(f"{where}: {fault}") from None

    def _sharegpt(self, row: Mapping[str, Any]) -> list[Message]:
        column = self.attr.messages
        if column not in row:
            raise _Fault(_missing_column("messages", column, row))
        turns = row[column]
        if not isinstance(turns, list) or not turns:
            raise _Fault(f"column '{column}': expected a list of turns, found {_short(turns)}")
        messages = []
        for number, turn in enumerate(turns):
            try:
                messages.append(self._turn(turn))
            except _Fault as fault:
                raise _Fault(f"turn {number + 1}: {fault}") from None
        return messages

    def _turn(self, turn: Any) -> Message:
        role_tag, content_tag = self.attr.role_tag, self.attr.content_tag
        if not isinstance(turn, dict) or role_tag not in turn:
            near = did_you_mean(role_tag, turn) if isinstance(turn, dict) else ""
            raise _Fault(
                f"expected an object with keys '{role_tag}' and '{content_tag}' (attr.role_tag, attr.content_tag), "
                f"found {_short(turn)}{near}"
            )
        tag = turn[role_tag]
        role = self._roles.get(tag) if isinstance(tag, str) else None
        if role is None:
            raise _Fault(
                f"unknown role {tag!r}{did_you_mean(str(tag), self._roles)}; expected one of: {', '.join(self._roles)} "
                "(attr.user_tag, attr.assistant_tag, …)"
            )
        calls = turn.get("tool_calls")
        if content_tag not in turn and not calls:
            raise _Fault(
                f"no key '{content_tag}' (attr.content_tag); keys found: {', '.join(turn)}"
                f"{did_you_mean(content_tag, turn)}"
            )
        content = turn.get(content_tag)
        message = Message("assistant" if role == "function" else role, [""], train=_loss_flag(turn))
        if role == "function":
            message.extra["tool_calls"] = _calls_in_text(content)
        else:
            message.parts = _parts(content)
        if calls:
            message.extra["tool_calls"] = _plain_calls(calls)
        for key in ("reasoning_content", "name"):
            if isinstance(turn.get(key), str):
                message.extra[key] = turn[key]
        return message

    def _alpaca(self, row: Mapping[str, Any]) -> list[Message]:
        attr, messages = self.attr, []
        for key, name in (("prompt", attr.prompt), ("response", attr.response)):
            if name not in row:
                raise _Fault(_missing_column(key, name, row))
        for pair in (row.get(attr.history) if attr.history else None) or ():
            if not isinstance(pair, list) or len(pair) != 2:
                raise _Fault(f"column '{attr.history}': expected [question, answer] pairs, found {_short(pair)}")
            messages.append(Message("user", [_as_text(pair[0], attr.history)]))
            messages.append(Message("assistant", [_as_text(pair[1], attr.history)]))
        query = [_as_text(row[name], name) for name in (attr.prompt, attr.query) if name and row.get(name)]
        messages.append(Message("user", ["\n".join(query)]))
        answer = row.get(attr.response) if attr.response else None
        if answer is not None:
            messages.append(Message("assistant", [_as_text(answer, attr.response)]))
        return messages

    def _image_column(self, row: Mapping[str, Any]) -> list[ImageRef]:
        value = row.get(self.attr.images) if self.attr.images else None
        if value is None or value == "":
            return []
        try:
            items = value if isinstance(value, list) else [value]
            return [_image_ref(item) for item in items if item is not None and item != ""]
        except _Fault as fault:
            raise _Fault(f"column '{self.attr.images}': {fault}") from None

    def _tools(self, row: Mapping[str, Any]) -> list[Any] | None:
        value = row.get(self.attr.tools) if self.attr.tools else None
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except ValueError as error:
                raise _Fault(f"column '{self.attr.tools}' isn't valid JSON: {error}") from None
        if not value:
            return None
        value = value if isinstance(value, list) else [value]
        if not all(isinstance(tool, dict) for tool in value):
            raise _Fault(f"column '{self.attr.tools}': expected a list of tool schemas, found {_short(value)}")
        return [_without_nulls(tool) for tool in value]


def _role_table(attr: DatasetAttr) -> dict[str, str]:
    """Role in the file → role in a conversation. Published examples leave tags null; their usual names work then."""
    table = {attr.user_tag: "user", attr.assistant_tag: "assistant"}
    for tag, role in ((attr.system_tag, "system"), (attr.observation_tag, "tool"), (attr.function_tag, "function")):
        if tag is not None:
            table[tag] = role
    usual = {"system": "system", "tool": "tool", "observation": "tool", "function_call": "function"}
    return {**table, **{tag: role for tag, role in usual.items() if tag not in table}}


def _missing_column(key: str, name: str | None, found: Iterable[str]) -> str:
    found = list(found)
    near = did_you_mean(name or "", found)
    return f"column '{name}' (dataset_param.attr.{key}) not found; columns found: {', '.join(found)}{near}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _as_text(value: Any, column: str | None) -> str:
    if not isinstance(value, str):
        raise _Fault(f"column '{column}': expected text, found {_short(value)}")
    return value


def _loss_flag(turn: Mapping[str, Any]) -> bool:
    for key in ("loss", "loss_mask"):
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise _Fault(f"'{key}' is {value!r}; expected 0, 1, true or false")
        return bool(value)
    return True


def _parts(content: Any) -> list[Part]:
    """Content as parts; null is empty text, a typed image without a path takes the next one of the image column."""
    if isinstance(content, str):
        return [content]
    if content is None:
        return [""]
    if not isinstance(content, list):
        raise _Fault(f"expected text or a list of typed parts, found {_short(content)}")
    parts: list[Part] = []
    for item in content:
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(item, str):
            parts.append(item)
        elif kind == "text" and isinstance(item.get("text"), str):
            parts.append(item["text"])
        elif kind in ("image", "image_url"):
            parts.append(_typed_image(item))
        elif kind in ("video", "video_url", "audio", "input_audio"):
            raise _Fault(f"a part of type '{kind}'; images are the only media read so far")
        else:
            raise _Fault(f"expected parts such as {{'type': 'text', 'text': …}}, found {_short(item)}")
    return parts


_FROM_COLUMN = ImageRef("")


def _typed_image(item: Mapping[str, Any]) -> ImageRef:
    for key in ("image", "path", "url", "image_url"):
        value = item.get(key)
        if key == "image_url" and isinstance(value, dict):
            value = value.get("url")
        if value:
            return _image_ref(value)
    return _FROM_COLUMN


def _image_ref(item: Any) -> ImageRef:
    if isinstance(item, str):
        return ImageRef(item.removeprefix("file://"))
    if isinstance(item, dict) and (item.get("bytes") or item.get("path")):
        return ImageRef(item.get("path") or "<bytes>", item.get("bytes"))
    raise _Fault(f"expected the path of an image, found {_short(item)}")


def _place_images(messages: list[Message], images: list[ImageRef]) -> None:
    """Put the images of the row where it says; without images, a tag is ordinary text.

    Typed image parts are the placeholders if there are any; else the tags in user and tool turns are.
    """
    typed = [part for message in messages for part in message.parts if isinstance(part, ImageRef)]
    if typed:
        waiting = sum(part is _FROM_COLUMN for part in typed)
        if waiting != len(images):
            raise _Fault(
                f"{waiting} image part(s) without a path for {len(images)} path(s) in the image column; "
                "the counts must be equal"
            )
        supply = iter(images)
        for message in messages:
            message.parts = [next(supply) if part is _FROM_COLUMN else part for part in message.parts]
        return
    if not images:
        return
    placing = [message for message in messages if message.role in _PLACING_ROLES]
    found = sum(part.count(IMAGE_TAG) for message in placing for part in message.parts if isinstance(part, str))
    if found != len(images):
        raise _Fault(
            f"{found} {IMAGE_TAG} placeholder(s) in user and tool turns for {len(images)} image(s); the counts must be "
            f"equal (in other turns {IMAGE_TAG} is ordinary text; a row that needs the tag as text beside an image can "
            "write its content as a list of typed parts)"
        )
    supply = iter(images)
    for message in placing:
        parts: list[Part] = []
        for part in message.parts:
            for number, piece in enumerate(part.split(IMAGE_TAG) if isinstance(part, str) else ()):
                if number:
                    parts.append(next(supply))
                if piece:
                    parts.append(piece)
        message.parts = parts


def _calls_in_text(content: Any) -> list[dict[str, Any]]:
    """A function turn holds the call as JSON: one object with name and arguments, or a list of them."""
    value = content
    if isinstance(content, str):
        try:
            value = json.loads(content)
        except ValueError as error:
            raise _Fault(f"a tool call that isn't valid JSON: {error}; found {_short(content)}") from None
    return _plain_calls(value)


def _plain_calls(calls: Any) -> list[dict[str, Any]]:
    plain = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Fault(f"expected a tool call with 'name' and 'arguments', found {_short(call)}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # templates write text arguments as they are
                arguments = json.loads(arguments)
        call = {"name": function["name"], "arguments": _without_nulls(arguments)}
        plain.append({"type": "function", "function": call})
    return plain


def _without_nulls(value: Any) -> Any:
    """Drop null members: Arrow fills every struct with the keys of all rows, and a schema must not grow by that."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
