"""What is to be answered: prompts of a command line, of a conversation, or the rows of data files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.conversation.messages import Conversation, Message, MessagePart
from mindspeed_mm.data.media.media import MediaKind, MediaRef
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.files import RowSource
from mindspeed_mm.data.sources.registry import find_data_sets
from mindspeed_mm.data.sources.row_forms import recognise
from mindspeed_mm.tasks.inference.settings import PlainPrompt
from mindspeed_mm.utils.errors import BadSample, ConfigError

#: where relative media of prompts are looked for
_AS_WRITTEN = ("",)


@dataclass(frozen=True)
class AnswerRequest:
    """A conversation whose next turn is to be written.

    Attributes:
        index: its number among those of a launch.
        conversation: its turns; the last one isn't the assistant's.
        folders: where relative paths of its media are looked for, in order.
        id: the row's own name for itself, as it is written there.
        reference: the answer that the row has; None: it has none.
    """

    index: int
    conversation: Conversation
    folders: tuple[str, ...] = _AS_WRITTEN
    id: object = None
    reference: str | None = None


class _Named:
    """Names requests that come from no file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def where(self, index: int) -> str:
        return self._name


def request_of(messages: Sequence[Message], index: int = 0, where: str = "the prompt") -> AnswerRequest:
    """Return the request for the answer to messages.

    Args:
        where: its name for messages.
    """
    return AnswerRequest(index, Conversation(list(messages), None, Place(_Named(where), index)))


def prompt_messages(text: str, media: Sequence[tuple[MediaKind, str]] = (), system: str | None = None) -> list[Message]:
    """Return the messages of a prompt: the system text, and the user's turn with media before its text.

    Args:
        media: kind and path of each.
    """
    parts: list[MessagePart] = [MediaRef(kind, path) for kind, path in media]
    return [*system_message(system), Message("user", [*parts, *([text] if text or not parts else [])])]


def system_message(text: str | None) -> list[Message]:
    """Return the message of a system text; none without one."""
    return [] if text is None else [Message("system", [text])]


def prompt_requests(prompts: Sequence[PlainPrompt], system: str | None = None) -> list[AnswerRequest]:
    """Return the requests of prompts that aren't rows of a file.

    Args:
        system: system text of each.
    """
    return [
        request_of(prompt_messages(prompt.text, prompt.media, system), number) for number, prompt in enumerate(prompts)
    ]


class SourceRequests:
    """Rows of a source as requests.

    The assistant's turns at the end of a row, if there are any, are the reference.

    Args:
        rows: the source.
        indices: numbers of the rows, in order; None: all.
    """

    def __init__(self, rows: RowSource, indices: Sequence[int] | None = None) -> None:
        self._rows, self._indices = rows, range(len(rows)) if indices is None else indices
        self.paths = tuple(itertools.chain.from_iterable(entry.paths for entry in rows.entries))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> AnswerRequest:
        """Return the request of a row.

        Raises:
            BadSample: the row can't be used.
        """
        row = int(self._indices[index])
        conversation = self._rows.read(row)
        messages: list[Message] = []
        while conversation.messages and conversation.messages[-1].role == "assistant":
            messages.insert(0, conversation.messages.pop())
        if not conversation.messages:
            raise BadSample(f"{conversation.where}: the row has no turn of the user to answer", "nothing to answer")
        texts = [part for message in messages for part in message.parts if isinstance(part, str)]
        return AnswerRequest(
            index,
            conversation,
            self._rows.folders(row),
            self._rows.row(row).get("id"),
            "".join(texts) if messages else None,
        )

    def row(self, index: int) -> dict[str, Any]:
        """Return a row as it is in its file.

        Raises:
            BadSample: it can't be parsed.
        """
        return self._rows.row(int(self._indices[index]))

    def where(self, index: int) -> str:
        """Name the file and the row, for messages."""
        return self._rows.where(int(self._indices[index]))


class RowRequests(SourceRequests):
    """The rows of data files as requests.

    Rows have the forms of training data; the assistant's turns at the end, if there are any, are the reference.

    Args:
        param: names files, columns and roles.

    Raises:
        DataError: a file is missing or damaged, or the form of its rows isn't known.
        ConfigError: rows are plain text, or preference pairs.
    """

    def __init__(self, param: DatasetParam) -> None:
        basic = param.basic_parameters
        if basic.stage in ("pt", "pretrain") or param.attr.pretrain or param.dataset_type == "corpus":
            raise ConfigError(
                "dataset_param: rows of plain text (stage pretrain, a corpus) hold nothing to be answered; expected "
                "conversations"
            )
        entries = find_data_sets(basic.dataset, basic.dataset_dir, param.attr, basic.max_samples)
        if ranking := next((entry.name for entry in entries if entry.attr.ranking), None):
            raise ConfigError(f"data set '{ranking}': 'ranking' is true; prompts of preference pairs are not answered")
        entries = [recognise(replace(entry, optional=(*entry.optional, "response"))) for entry in entries]
        super().__init__(RowSource(entries, default_system=basic.default_system))
