"""The rows that are evaluated, as requests and as what their answers are compared with. Nothing here imports torch."""

from __future__ import annotations

import re
from typing import Protocol

from mindspeed_mm.data.conversation.messages import Conversation, Message
from mindspeed_mm.data.places import Place
from mindspeed_mm.tasks.evaluation.benchmark import Benchmark, Question
from mindspeed_mm.tasks.evaluation.choices import letters_of
from mindspeed_mm.tasks.evaluation.scores import Score, Target
from mindspeed_mm.tasks.evaluation.tables import BenchmarkRows
from mindspeed_mm.tasks.inference.requests import AnswerRequest, SourceRequests
from mindspeed_mm.utils.errors import BadSample, did_you_mean
from mindspeed_mm.utils.text import shorten

_OPTION = re.compile(r"^\s*\(?([A-Z])[.):]\s*(.+?)\s*$", re.MULTILINE)


class EvaluatedRows(Protocol):
    """Rows with their right answers."""

    paths: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> AnswerRequest: ...

    def question(self, index: int) -> Question: ...

    def where(self, index: int) -> str: ...


class BenchmarkQuestions(BenchmarkRows):
    """The rows of a benchmark.

    Args:
        benchmark: whose rows they are.
        path: a file, or a folder of files.
        system: system text of every row; None: there is none.
        limit: most rows; None: all.
        named_by: flag or key that named `path`, for messages.

    Raises:
        DataError: there is no file, or one can't be read, or has another layout.
    """

    def __init__(
        self, benchmark: Benchmark, path: str, system: str | None = None, limit: int | None = None, named_by: str = ""
    ) -> None:
        super().__init__(benchmark, path, limit, named_by)
        self._system = system
        for file in self.files:
            file.question(0)  # a fault of the whole file shows here, before a model is loaded

    def question(self, index: int) -> Question:
        """Return a row as the benchmark asks it.

        Raises:
            BadSample: the row can't be used.
        """
        file, local = self.locate(index)
        return file.question(local)

    def __getitem__(self, index: int) -> AnswerRequest:
        """Return the request of a row.

        Raises:
            BadSample: the row can't be used.
        """
        question = self.question(index)
        messages = [] if self._system is None else [Message("system", [self._system])]
        messages.append(Message("user", list(question.parts)))
        references = question.target.references
        return AnswerRequest(
            index,
            Conversation(messages, None, Place(self, index)),
            self.locate(index)[0].folders(),
            question.id,
            references[0] if len(references) == 1 else None,
        )


class OwnQuestions:
    """Rows of a user's own; the last answer of each is the reference.

    Args:
        requests: the rows.
        score: that their answers will have.
        category: column by which scores are also given; None: there is none.
        limit: most rows; None: all.

    Raises:
        BadSample: the first row can't be used, or the column isn't there.
    """

    def __init__(
        self, requests: SourceRequests, score: Score, category: str | None = None, limit: int | None = None
    ) -> None:
        self._requests, self.paths = requests, requests.paths
        self._score, self._category, self._limit = score, category, limit
        self.question(0)

    def __len__(self) -> int:
        return len(self._requests) if self._limit is None else min(self._limit, len(self._requests))

    def __getitem__(self, index: int) -> AnswerRequest:
        """Return the request of a row.

        Raises:
            BadSample: the row can't be used.
        """
        return self._requests[index]

    def where(self, index: int) -> str:
        """Name file and row, for messages."""
        return self._requests.where(index)

    def question(self, index: int) -> Question:
        """Return the reference of a row, with its options where the score needs them.

        Raises:
            BadSample: it has none, or no options.
        """
        request = self[index]
        if request.reference is None:
            raise BadSample(f"{self.where(index)}: the row ends without an answer to compare with", "no reference")
        reference = request.reference.strip()
        options: tuple[str, ...] = ()
        if self._score.needs_options:
            options = self._options(request)
            if reference not in letters_of(options):
                raise BadSample(
                    f"{self.where(index)}: the answer is '{shorten(reference)}'; expected the letter of one of its "
                    f"{len(options)} options",
                    "no such option",
                )
        parts = tuple(part for message in request.conversation.messages for part in message.parts)
        return Question(parts, Target((reference,), options), request.id, self._categories(index))

    def _options(self, request: AnswerRequest) -> tuple[str, ...]:
        text = "\n".join(part for part in request.conversation.messages[-1].parts if isinstance(part, str))
        options = dict(_OPTION.findall(text))
        if len(options) < 2 or list(options) != letters_of(tuple(options)):
            raise BadSample(
                f"{request.conversation.where}: the question has no options; expected lines 'A. …', 'B. …' and so on",
                "no options",
            )
        return tuple(options.values())

    def _categories(self, index: int) -> dict[str, str]:
        if self._category is None:
            return {}
        row = self._requests.row(index)
        if self._category not in row:
            near = did_you_mean(self._category, row)
            raise BadSample(
                f"{self.where(index)}: no column '{self._category}' (--category); found {', '.join(row)}{near}",
                "no such column",
            )
        return {self._category: str(row[self._category])}
