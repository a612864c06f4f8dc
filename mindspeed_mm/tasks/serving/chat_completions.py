"""Chat completions: transformers' handler of the route, with our reading of requests and our encoding of prompts."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi.responses import JSONResponse, StreamingResponse
from openai.types.chat import ChatCompletionChunk
from openai.types.completion_usage import CompletionUsage
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import GenerationState

from mindspeed_mm.tasks.inference.generation import Answer, AnswerGenerator
from mindspeed_mm.tasks.inference.prompts import PromptSize
from mindspeed_mm.tasks.inference.requests import AnswerRequest, request_of, system_message
from mindspeed_mm.tasks.serving.answering import AnswerJob, AnswerThread
from mindspeed_mm.tasks.serving.body import ChatRequest, check_answer_length, read_chat
from mindspeed_mm.tasks.serving.describe import ServeRun
from mindspeed_mm.tasks.serving.errors import RequestError
from mindspeed_mm.tasks.serving.metrics import ServeMetrics
from mindspeed_mm.utils.errors import MMError
from mindspeed_mm.utils.log import logger

ResultT = TypeVar("ResultT")
_CHARACTERS = 256  # of a token; a text with more of them is too long whatever they are


@dataclass(frozen=True)
class OneModel:
    """The model of this server, in the place of transformers' manager of many.

    Attributes:
        name: what requests call it.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    created: int

    def list_models(self) -> list[dict[str, object]]:
        """Return the entries of the route /v1/models."""
        return [{"id": self.name, "object": "model", "created": self.created, "owned_by": "local"}]


class ChatHandler(ChatCompletionHandler):
    """Answers chat completions with one model.

    Args:
        run: the launch.
        generator: holds the model.
        positions: most tokens of prompt and answer together; None: any number.
        metrics: counts tokens.
    """

    def __init__(self, run: ServeRun, generator: AnswerGenerator, positions: int | None, metrics: ServeMetrics) -> None:
        super().__init__(OneModel(run.name, int(time.time())), GenerationState())
        self._run, self._prompts, self._positions, self._metrics = run, generator.prompts, positions, metrics
        self._usual_tokens: int = generator.config.max_new_tokens
        batch_size = run.answers.settings.batch_size or 1
        self.thread = AnswerThread(generator, batch_size)
        # Prompts are encoded while others are answered, but not many more than that: media are large.
        self._room = asyncio.Semaphore(2 * batch_size + run.media_workers)
        self._media = ThreadPoolExecutor(run.media_workers, "media")
        self._reading = ThreadPoolExecutor(run.media_workers, "bodies")
        self._numbers = itertools.count()

    async def handle_request(self, body: dict[str, Any], request_id: str) -> JSONResponse | StreamingResponse:
        """Answer a request.

        Args:
            body: its JSON object; it is emptied, because its media are large.
            request_id: its name in the response.

        Raises:
            RequestError, BadSample: it is refused.
        """
        began = time.monotonic()
        chat = await _in(self._reading, lambda: read_chat(body, self._run.name, self._run.limits))
        body.clear()
        number = next(self._numbers)
        request, size = await _in(self._reading, lambda: self._measured(chat, number))
        settings = chat.settings(self._run.answers.settings, self._longest(chat, size.tokens))
        await self._room.acquire()
        try:
            sample = await _in(self._media, lambda: self._prompts.encode(request))
        except BaseException:
            self._room.release()
            raise
        job = AnswerJob(request, sample, size.kinds, settings, chat.body.stream, self._room.release)
        self.thread.submit(job)
        options = chat.body.stream_options
        name = f"chatcmpl-{request_id}"
        if chat.body.stream:
            pieces = self._pieces(job, name, began, options is not None and options.include_usage)
            return StreamingResponse(pieces, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        answer = await self._whole(job)
        content = self._build_completion(name, answer.text, self._run.name, _reason(answer), usage=_usage(answer))
        return JSONResponse(content)

    def _measured(self, chat: ChatRequest, number: int) -> tuple[AnswerRequest, PromptSize]:
        """The request for the model, and its size.

        Raises:
            RequestError: the prompt is too long.
            BadSample: it can't be rendered, or has media that can't be used.
        """
        most = self._most_tokens(self._run.limits.prompt_tokens)
        if most is not None and chat.characters > most * _CHARACTERS:
            raise _too_long(f"the prompt has {chat.characters:,} characters", most)
        has_system = chat.messages[0].role == "system"
        messages = [*([] if has_system else system_message(self._run.answers.system)), *chat.messages]
        request = request_of(messages, number if chat.body.seed is None else 0, "the request")
        size = self._prompts.measure(request)
        if most is not None and size.tokens > most:
            raise _too_long(f"the prompt takes {size.tokens:,} tokens", most)
        return request, size

    def _most_tokens(self, stated: int | None) -> int | None:
        """Most tokens of a prompt, or of an answer: one position at least is the other's."""
        return min((n for n in (stated, self._positions and self._positions - 1) if n is not None), default=None)

    def _longest(self, chat: ChatRequest, prompt_tokens: int) -> int:
        """The longest answer to a prompt in tokens."""
        asked, most = chat.asked_tokens, self._most_tokens(self._run.limits.answer_tokens)
        left = None if self._positions is None else self._positions - prompt_tokens
        if asked is None:
            return min(n for n in (self._usual_tokens, most, left) if n is not None)
        check_answer_length({"max_tokens": asked}, most)
        if left is not None and asked > left:
            raise _too_long(f"the prompt takes {prompt_tokens:,} tokens, and the answer {asked:,}", self._positions)
        return asked

    async def _whole(self, job: AnswerJob) -> Answer:
        try:
            result = await job.results.get()
        except asyncio.CancelledError:
            job.is_cancelled = True
            raise
        if isinstance(result, Answer):
            self._count(result)
            return result
        raise _failed(result) if isinstance(result, Exception) else AssertionError("no pieces were asked for")

    async def _pieces(self, job: AnswerJob, name: str, began: float, usage: bool) -> AsyncIterator[str]:
        """The events of a streamed answer."""
        is_first = True
        try:
            yield self._build_chunk_sse(name, role="assistant", content="", model=self._run.name)
            while isinstance(result := await job.results.get(), str):
                if is_first:
                    self._metrics.first_seconds.observe(time.monotonic() - began)
                is_first = False
                yield self._build_chunk_sse(name, content=result, model=self._run.name)
            if isinstance(result, Exception):
                yield f"data: {json.dumps(_failed(result).body)}\n\n"
                return
            self._count(result)
            yield self._build_chunk_sse(name, finish_reason=_reason(result), model=self._run.name)
            if usage:
                yield self.chunk_to_sse(_usage_chunk(name, self._run.name, _usage(result)))
            yield "data: [DONE]\n\n"
        finally:
            job.is_cancelled = True

    def _count(self, answer: Answer) -> None:
        self._metrics.prompt_tokens.inc(answer.prompt_tokens)
        self._metrics.answer_tokens.inc(answer.new_tokens)


async def _in(pool: Executor, work: Callable[[], ResultT]) -> ResultT:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _too_long(what: str, most: int | None) -> RequestError:
    return RequestError(f"{what}; at most {most:,} are possible", "messages", code="context_length_exceeded")


def _failed(error: Exception) -> RequestError:
    """The refusal of a request that the model couldn't answer."""
    if isinstance(error, MMError):
        return RequestError(str(error))
    logger.error(f"an answer failed: {type(error).__name__}: {error}")
    return RequestError(f"the model couldn't answer: {type(error).__name__}", status=500)


def _reason(answer: Answer) -> Literal["stop", "length"]:
    return "length" if answer.finish == "length" else "stop"


def _usage(answer: Answer) -> CompletionUsage:
    total = answer.prompt_tokens + answer.new_tokens
    return CompletionUsage(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.new_tokens, total_tokens=total)


def _usage_chunk(name: str, model: str, usage: CompletionUsage) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=name, choices=[], created=int(time.time()), model=model, object="chat.completion.chunk", usage=usage
    )
