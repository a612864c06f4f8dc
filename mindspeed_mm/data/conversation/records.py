"""Turn a row of a data file into a conversation: columns, roles, placeholders and media."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data.conversation.contents import read_media
from mindspeed_mm.data.conversation.messages import Conversation, Message, RowFault
from mindspeed_mm.data.conversation.placeholders import media_tags, place_media
from mindspeed_mm.data.conversation.turns import (
    MISSING_COLUMN,
    UNREAD_COLUMN,
    TurnReader,
    as_text,
    missing_column,
    read_tools,
)
from mindspeed_mm.data.media.media import MediaKind, MediaRef
from mindspeed_mm.data.places import Place
from mindspeed_mm.utils.errors import BadSample, DataError, nearest_names
from mindspeed_mm.utils.text import map_texts, whole_characters

__all__ = ["Conversation", "Message", "RecordReader"]

_MEDIA_COLUMNS: tuple[tuple[MediaKind, str], ...] = (("image", "images"), ("video", "videos"), ("audio", "audios"))
_TEXT_COLUMNS = ("system", "tools", "history", "input")
_NOT_THERE = "none of the first rows of the file, which the names of its columns were read off, has it"
# Frames a second of clips given as pictures, in one of these columns.
_FPS_COLUMNS = ("video_fps", "fps")


class RecordReader:
    """Turns rows into conversations, by `attr` of data.json.

    Args:
        attr: Names of columns and roles.
        default_system: System text of rows that have none.
        is_text: Rows are plain text for pretraining, in the prompt column ("text" where none is named).
        optional: Keys of `attr` whose columns rows may lack.
        leads: A single medium without a tag is placed before the first turn of the user.
        unread: Columns that a row must not fill, as `attr`, recognised from other rows, doesn't map them.
    """

    def __init__(
        self,
        attr: DatasetAttr,
        default_system: str | None = None,
        is_text: bool = False,
        optional: Collection[str] = (),
        leads: bool = False,
        unread: Collection[str] = (),
    ) -> None:
        self.attr = attr.for_text() if is_text or attr.pretrain else attr.resolved()
        self.is_text = is_text or attr.pretrain
        self._default_system = default_system
        self._optional = frozenset(optional)
        self._leads = leads
        self._unread = frozenset(unread)
        self._tags = media_tags()
        self._turns = TurnReader(self.attr, self._optional)
        self._columns = [(kind, getattr(self.attr, key)) for kind, key in _MEDIA_COLUMNS if getattr(self.attr, key)]

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Check the names in `attr` against the columns found in the first rows of a file.

        Raises:
            DataError: A required column is missing, or an optional one is missing and another
                column has nearly its name.
        """
        found, attr = sorted(columns), self.attr
        if attr.formatting == "alpaca" and not (self.is_text or attr.ranking or (attr.prompt and attr.response)):
            need = "alpaca rows need dataset_param.attr.prompt and dataset_param.attr.response"
            other = "; for rows of plain text set basic_parameters.stage or attr.pretrain" if attr.prompt else ""
            raise DataError(f"{where}: {need}; columns found: {', '.join(found)}{other}")
        for key in self._needed():
            name = getattr(attr, key)
            if name is not None and name not in found and key not in self._optional:
                raise DataError(f"{where}: {missing_column(key, attr, found)}")
        for key in ("images", "videos", "audios", "tools"):
            name = getattr(attr, key)
            if name is not None and name not in found and self._looks_misspelt(name, found):
                raise DataError(f"{where}: {missing_column(key, attr, found)}")

    def _needed(self) -> list[str]:
        """Keys of `attr` whose columns every file must have, if they are named."""
        if self.is_text:
            return ["prompt"]
        answers = ["chosen", "rejected"] if self.attr.ranking else ["response"]
        if self.attr.formatting == "alpaca":
            return ["prompt", "query", *answers, "history", "system"]
        return [*([] if self.attr.ranking else ["messages"]), *answers, "system"]

    def _looks_misspelt(self, name: str, found: Iterable[str]) -> bool:
        """Whether an unmapped column has nearly this name ('images' is near to 'messages', too)."""
        mapped = [getattr(self.attr, key) for key in type(self.attr).model_fields]
        return bool(nearest_names(name, found, used=mapped))

    def unused_columns(self, columns: Iterable[str]) -> list[str]:
        """Columns with a published name for media or tools that `attr` doesn't map, so that their content is unused."""
        usual = ("images", "videos", "audios", "tools")
        return [key for key in usual if key in columns and getattr(self.attr, key) is None]

    def read(self, row: Mapping[str, Any], where: Place) -> Conversation:
        """Read one row.

        A half of a surrogate pair in a text becomes U+FFFD.

        Args:
            row: The row as it is in the file.
            where: Its name for messages.

        Raises:
            BadSample: Missing column, unknown role, a medium named in no known way, or placeholders and media that
                don't match.
        """
        try:
            conversation = self._read_text(row, where) if self.is_text else self._read(row, where)
        except RowFault as fault:
            raise BadSample(f"{where}: {fault}", fault.reason) from None
        _make_whole(conversation)
        return conversation

    def _read_text(self, row: Mapping[str, Any], where: Place) -> Conversation:
        column = self.attr.prompt or "text"
        if column not in row:
            raise RowFault(missing_column("prompt", self.attr, row, column), MISSING_COLUMN)
        text = row[column]
        return Conversation([Message("text", [as_text("" if text is None else text, column)])], None, where, None, True)

    def _read(self, row: Mapping[str, Any], where: Place) -> Conversation:
        attr = self.attr
        messages = self._turns.alpaca(row) if attr.formatting == "alpaca" else self._turns.sharegpt(row)
        rejected = None
        if attr.ranking:
            messages, rejected = self._turns.preferences(row, messages)
        system = row.get(attr.system) if attr.system else None
        if system and messages[0].role != "system":
            messages.insert(0, Message("system", [as_text(system, attr.system)]))
        elif self._default_system and all(message.role != "system" for message in messages):
            messages.insert(0, Message("system", [self._default_system]))
        place_media(messages, self._media(row), self._tags, self._leads)
        return Conversation(
            messages, read_tools(row.get(attr.tools) if attr.tools else None, attr.tools), where, rejected
        )

    def _media(self, row: Mapping[str, Any]) -> dict[MediaKind, list[MediaRef]]:
        if lost := sorted(column for column in self._unread & row.keys() if row[column]):
            raise _unread_column(lost[0])
        media: dict[MediaKind, list[MediaRef]] = {}
        for kind, column in self._columns:
            if value := row.get(column):
                fps = next((row[name] for name in _FPS_COLUMNS if row.get(name)), None) if kind == "video" else None
                try:
                    refs = read_media(value, kind, fps)
                except RowFault as fault:
                    raise RowFault(f"column '{column}': {fault}", fault.reason) from None
                if refs:
                    media[kind] = refs
        return media


def _unread_column(column: str) -> RowFault:
    """The fault of a row that fills a column which none of the first rows has."""
    if column in _TEXT_COLUMNS:
        advice = "add it to one of the first 1000 rows, empty or null, or name the columns in dataset_param.attr"
        return RowFault(f"column '{column}' is filled, and {_NOT_THERE}; {advice}", UNREAD_COLUMN)
    advice = "name the column in dataset_param.attr (images, videos or audios), or set that to null to leave it out"
    return RowFault(f"column '{column}' holds media, and {_NOT_THERE}; {advice}", UNREAD_COLUMN)


def _make_whole(conversation: Conversation) -> None:
    """Replace halves of surrogate pairs in the texts of a row by U+FFFD, but not in names of media files."""
    for message in (*conversation.messages, *(conversation.rejected or ())):
        message.parts = [whole_characters(part) if isinstance(part, str) else part for part in message.parts]
        message.extra = map_texts(message.extra, whole_characters)
    conversation.tools = map_texts(conversation.tools, whole_characters)
