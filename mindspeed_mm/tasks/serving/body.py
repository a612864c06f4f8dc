"""The body of a request for a chat completion: its fields, and what each is good for here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mindspeed_mm.data.conversation.messages import Message, MessagePart
from mindspeed_mm.data.media.media import MediaKind, MediaRef
from mindspeed_mm.tasks.inference.settings import GenerationSettings
from mindspeed_mm.tasks.serving.describe import ServeLimits
from mindspeed_mm.tasks.serving.errors import RequestError
from mindspeed_mm.tasks.serving.media import check_count, check_pixels, read_base64, read_url
from mindspeed_mm.utils.errors import did_you_mean
from mindspeed_mm.utils.text import shorten

_NO_TOOLS = "tools aren't called here"
#: fields that say who asks, and change no answer
_IDLE = ("user", "metadata", "safety_identifier", "prompt_cache_key")
#: fields of OpenAI's that aren't answered here → values that ask for nothing, and why
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "n": ((1,), "a request gets one answer; send it again for another one"),
    "logprobs": ((False,), "probabilities of tokens aren't returned"),
    "top_logprobs": ((0,), "probabilities of tokens aren't returned"),
    "logit_bias": (({},), "no token is preferred over others"),
    "presence_penalty": ((0,), "tokens aren't penalised by request (the server's --repetition-penalty does it)"),
    "frequency_penalty": ((0,), "tokens aren't penalised by request (the server's --repetition-penalty does it)"),
    "response_format": (({"type": "text"},), "answers are text without a schema"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "answers aren't predicted"),
    "reasoning_effort": ((), "the chat template decides whether the model thinks (the server's --enable-thinking)"),
    "verbosity": ((), "no model here knows of it"),
    "web_search_options": ((), "nothing is searched for"),
    "service_tier": (("auto", "default"), "all requests are served alike"),
    "store": ((False,), "nothing is stored"),
}


class _Strict(BaseModel):
    """An object of a body: no type is converted, no field is unknown, and null is as good as absent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class TextPart(_Strict):
    """A text."""

    type: Literal["text"]
    text: str


class _Url(_Strict):
    url: str


class _ImageUrl(_Url):
    detail: Literal["auto", "high"] = "auto"  # "low": nothing here would honour it


class _Sound(_Strict):
    data: str
    format: str


class ImagePart(_Strict):
    """A picture."""

    type: Literal["image_url"]
    image_url: _ImageUrl


class VideoPart(_Strict):
    """A video; an extension that vLLM has under this name, too."""

    type: Literal["video_url"]
    video_url: _Url


class AudioUrlPart(_Strict):
    """A sound by its URL; an extension that vLLM has under this name, too."""

    type: Literal["audio_url"]
    audio_url: _Url


class AudioPart(_Strict):
    """A sound in base64."""

    type: Literal["input_audio"]
    input_audio: _Sound


RequestPart = Annotated[TextPart | ImagePart | VideoPart | AudioUrlPart | AudioPart, Field(discriminator="type")]


class RequestMessage(_Strict):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[RequestPart]
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, value: object) -> object:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value


class StreamOptions(_Strict):
    """How an answer is streamed."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatBody(_Strict):
    """A request for a chat completion."""

    model: str
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class ChatRequest:
    """A request that has been read.

    Attributes:
        body: its fields, but for the messages: their media are large.
        messages: its turns, with their media.
        characters: of all texts.
    """

    body: ChatBody
    messages: list[Message]
    characters: int

    @property
    def asked_tokens(self) -> int | None:
        """The longest answer that is asked for; None: the request doesn't say."""
        longest = self.body.max_completion_tokens
        return self.body.max_tokens if longest is None else longest

    def settings(self, usual: GenerationSettings, longest: int) -> GenerationSettings:
        """Return how the answer is generated.

        Args:
            usual: settings of the launch, which fields of the request replace.
            longest: the longest answer in tokens.

        Raises:
            RequestError: `top_p` without a temperature to draw tokens with.
        """
        body, values = self.body, {**usual.values, "max_new_tokens": longest}
        if body.temperature is not None:
            values["do_sample"] = body.temperature > 0
            if body.temperature > 0:
                values["temperature"] = body.temperature
        if body.top_p is not None and values.get("do_sample"):
            values["top_p"] = body.top_p
        elif body.top_p is not None and body.top_p < 1 and body.temperature is None:
            raise RequestError(
                "top_p: the most likely token is taken each time; send a temperature above 0 to draw tokens", "top_p"
            )
        seed = usual.seed if body.seed is None else body.seed
        return replace(usual, values=values, stop=(*usual.stop, *body.stop), seed=seed)


def read_chat(content: Mapping[str, Any], name: str, limits: ServeLimits) -> ChatRequest:
    """Read the body of a request, with its media.

    Args:
        content: the JSON object.
        name: of the model.

    Raises:
        RequestError: another model is asked, a field has a wrong value or can't be honoured, a limit is passed.
        BadSample: an image can't be read.
    """
    check_model(content, name)
    body = _validated({key: value for key, value in content.items() if value is not None and not _is_idle(key, value)})
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: expected only with stream true", "stream_options")
    if None not in (both := (body.max_tokens, body.max_completion_tokens)) and both[0] != both[1]:
        raise RequestError("max_tokens: differs from max_completion_tokens; send one of them", "max_tokens")
    if body.messages[-1].role == "assistant":
        raise RequestError("messages: the last one is the assistant's; expected one to be answered", "messages")
    parts = [part for message in body.messages for part in message.content]
    check_count(sum(not isinstance(part, TextPart) for part in parts), limits)
    messages = [_read_message(message, number, limits) for number, message in enumerate(body.messages)]
    check_pixels([ref for message in messages for ref in message.media], limits)
    characters = sum(len(part.text) for part in parts if isinstance(part, TextPart))
    return ChatRequest(body.model_copy(update={"messages": []}), messages, characters)


def check_model(content: Mapping[str, Any], name: str) -> None:
    """Refuse requests to other models.

    Raises:
        RequestError: the field is missing, or has another name.
    """
    asked = content.get("model")
    if not isinstance(asked, str):
        raise RequestError(f"model: expected '{name}', the model of this server", "model")
    if asked != name:
        raise RequestError(
            f"model: there is no model {shorten(repr(asked))} here; the model of this server is '{name}'",
            "model",
            status=404,
            code="model_not_found",
        )


def check_answer_length(content: Mapping[str, Any], most: int | None) -> None:
    """Refuse requests for longer answers than there may be.

    Args:
        most: of tokens; None: there is no limit.

    Raises:
        RequestError: a longer one is asked for.
    """
    for name in ("max_completion_tokens", "max_tokens"):
        asked = content.get(name)
        if most is not None and isinstance(asked, int) and asked > most:
            raise RequestError(f"{name}: {asked:,} are asked for, and an answer has at most {most:,}", name)


def _is_idle(key: str, value: object) -> bool:
    """Whether a field changes nothing; one that can't be honoured is refused."""
    if key in _IDLE:
        return True
    if key not in _REFUSED:
        return False
    harmless, why = _REFUSED[key]
    if any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless):
        return True
    raise RequestError(f"{key}: found {shorten(repr(value))}: {why}; leave it out", key, code="unsupported_parameter")


def _validated(content: Mapping[str, Any]) -> ChatBody:
    try:
        return ChatBody.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        path, place = _path_of(fault["loc"]), fault["loc"][-1]
        found = "" if fault["type"] == "missing" else f", found {shorten(repr(fault.get('input')))}"
        if fault["type"] == "extra_forbidden":
            known = (*ChatBody.model_fields, *_REFUSED) if len(fault["loc"]) == 1 else ()
            sentence = f"{path}: unknown field{did_you_mean(str(place), known)}"
        elif fault["type"] == "missing":
            sentence = f"{path}: the field is missing"
        else:
            sentence = f"{path}: {fault['msg'][0].lower()}{fault['msg'][1:]}{found}"
        raise RequestError(sentence, path) from None


def _path_of(places: Sequence[int | str]) -> str:
    """A place in a body, as one writes it in a program; the tag of a part is none."""
    path = ""
    for number, place in enumerate(places):
        if isinstance(place, int):
            path += f"[{place}]"
        elif not (number > 1 and places[number - 2] == "content"):
            path += f".{place}" if path else place
    return path


def _read_message(message: RequestMessage, number: int, limits: ServeLimits) -> Message:
    parts = [_read_part(part, f"messages[{number}].content[{at}]", limits) for at, part in enumerate(message.content)]
    role = "system" if message.role == "developer" else message.role
    return Message(role, parts, extra={} if message.name is None else {"name": message.name})


def _read_part(part: RequestPart, where: str, limits: ServeLimits) -> MessagePart:
    match part:
        case TextPart():
            return part.text
        case AudioPart():
            return read_base64("audio", part.input_audio.data, limits, f"{where}.input_audio.data")
        case ImagePart():
            return _read_named("image", part.image_url.url, where, limits)
        case VideoPart():
            return _read_named("video", part.video_url.url, where, limits)
        case AudioUrlPart():
            return _read_named("audio", part.audio_url.url, where, limits)


def _read_named(kind: MediaKind, url: str, where: str, limits: ServeLimits) -> MediaRef:
    return read_url(kind, url, limits, f"{where}.{kind}_url.url")
