"""Requests that wait for the model, and the one thread that generates their answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from mindspeed_mm.data.conversation.encode import TokenSample
from mindspeed_mm.data.media.media import MediaKind
from mindspeed_mm.tasks.inference.generation import Answer, AnswerGenerator
from mindspeed_mm.tasks.inference.requests import AnswerRequest
from mindspeed_mm.tasks.inference.settings import GenerationSettings
from mindspeed_mm.tasks.serving.text_stream import TextStream


@dataclass
class AnswerJob:
    """A request on its way through the model. Its results are read in the event loop that made it.

    Attributes:
        request, sample: the request, and as it is encoded.
        kinds: kinds of its media.
        settings: how it is answered.
        streams: whether pieces of the text are wanted.
        when_done: called in the event loop when the model has nothing more to do with it.
        results: pieces of the text, then the answer, or the error in its place.
        is_cancelled: nobody waits for the answer any more.
    """

    request: AnswerRequest
    sample: TokenSample
    kinds: tuple[MediaKind, ...]
    settings: GenerationSettings
    streams: bool
    when_done: Callable[[], None]
    results: asyncio.Queue[str | Answer | Exception] = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def deliver(self, result: str | Answer | Exception) -> None:
        """Hand over a result, from any thread."""
        self._in_loop(self.results.put_nowait, result)

    def end(self) -> None:
        """Say that the model is done with it, from any thread."""
        self._in_loop(self.when_done)

    def _in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(call, *arguments)


class AnswerThread:
    """Answers jobs in the order of their arrival, those of like settings and media together.

    Args:
        generator: holds the model.
        batch_size: most jobs that are answered together.
    """

    def __init__(self, generator: AnswerGenerator, batch_size: int) -> None:
        self._generator, self._batch_size = generator, batch_size
        self._waiting: deque[AnswerJob] = deque()
        self._changed = threading.Condition()
        self.running = 0
        threading.Thread(target=self._work, name="answers", daemon=True).start()

    def submit(self, job: AnswerJob) -> None:
        """Let a job wait for its turn."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            jobs = self._next()
            self.running = len(jobs)
            try:
                self._answer(jobs)
            except Exception as error:  # of the model, of the device: these jobs have failed, others may not
                for job in jobs:
                    job.deliver(error)
            finally:
                self.running = 0
                for job in jobs:
                    job.end()
                del jobs

    def _next(self) -> list[AnswerJob]:
        """The jobs to answer next: the one that waits longest, and those that can be answered with it."""
        with self._changed:
            while True:
                for job in [job for job in self._waiting if job.is_cancelled]:
                    self._waiting.remove(job)
                    job.end()
                if self._waiting:
                    break
                self._changed.wait()
            first = self._waiting.popleft()
            most = 1 if first.settings.draws_tokens else self._batch_size
            others = [job for job in self._waiting if (job.settings, job.kinds) == (first.settings, first.kinds)]
            for job in others[: most - 1]:
                self._waiting.remove(job)
            return [first, *others[: most - 1]]

    def _answer(self, jobs: Sequence[AnswerJob]) -> None:
        generator = AnswerGenerator(self._generator.model, self._generator.prompts, jobs[0].settings)
        texts = [_text_of(generator, job) for job in jobs]
        answers = generator.answer(
            [job.request for job in jobs],
            [job.sample for job in jobs],
            streamer=_Streams(texts) if any(texts) else None,
            stopping=[_Cancelled(jobs)],
        )
        for job, text, answer in zip(jobs, texts, answers, strict=True):
            if text is not None:
                text.finish(answer.text)
            job.deliver(answer)


def _text_of(generator: AnswerGenerator, job: AnswerJob) -> TextStream | None:
    if not job.streams:
        return None
    return TextStream(generator.prompts.tokenizer, generator.end_ids, job.settings.stop, job.deliver)


class _Streams(BaseStreamer):
    """Hands the tokens of each row of a batch to its text."""

    def __init__(self, texts: Sequence[TextStream | None]) -> None:
        self._texts = texts
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts [batch, length], then each step's tokens [batch]."""
        if self._is_prompt:
            self._is_prompt = False
            return
        for text, token in zip(self._texts, value.tolist(), strict=True):
            if text is not None:
                text.put(token)

    def end(self) -> None:
        """Do nothing: the whole answers finish the texts."""


class _Cancelled(StoppingCriteria):
    """Ends the rows of a batch whose clients have gone."""

    def __init__(self, jobs: Sequence[AnswerJob]) -> None:
        self._jobs = jobs

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        """Return [batch] bool: which rows are over."""
        return torch.tensor([job.is_cancelled for job in self._jobs], device=input_ids.device)
