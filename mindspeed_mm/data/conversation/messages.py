"""A conversation: a row of any format before it is rendered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.places import Place
from mindspeed_mm.utils.text import shorten

MessagePart = str | MediaRef


class RowFault(Exception):
    """A fault of a row, raised where the row's name for messages isn't known.

    Attributes:
        reason: the same in a few words without names, to count by.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Message:
    """One turn.

    Attributes:
        role: system, user, assistant or tool; "text" for a row of plain text.
        parts: texts and media in the order they were written.
        train: the row's own flag.
        extra: tool_calls, reasoning_content, name.
    """

    role: str
    parts: list[MessagePart]
    train: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def media(self) -> list[MediaRef]:
        """The media of this turn, in the order they appear."""
        return [part for part in self.parts if isinstance(part, MediaRef)]


@dataclass
class Conversation:
    """One row, ready to be rendered.

    Attributes:
        messages: its turns; of a preference pair, with the preferred answer.
        tools: schemas of the tools, or None.
        where: the row's name for messages.
        rejected: of a preference pair, the turns in place of the preferred ones.
        is_text: plain text without a template: one message of role "text".
    """

    messages: list[Message]
    tools: list[Any] | None
    where: Place
    rejected: list[Message] | None = None
    is_text: bool = False

    @property
    def has_target(self) -> bool:
        """Whether there is anything to train on: an assistant turn that isn't flagged off, or a text."""
        if self.is_text:
            return any(isinstance(part, MediaRef) or part.strip() for part in self.messages[0].parts)
        return any(message.role == "assistant" and message.train for message in self.messages)

    @property
    def media(self) -> list[MediaRef]:
        """All media, in the order they appear."""
        return [medium for message in self.messages for medium in message.media]


def short_repr(value: object) -> str:
    """Return a value of a row for a message, cut at 120 characters."""
    return shorten(repr(value))
