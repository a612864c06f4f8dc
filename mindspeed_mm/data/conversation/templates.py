"""Render conversations with a chat template: the model's own, or a named one."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mindspeed_mm.data.conversation.named_templates import named_template
from mindspeed_mm.data.conversation.stop_tokens import stop_tokens
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.utils.errors import ConfigError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "\ue0f1probe\ue0f2"

Messages = Sequence[Mapping[str, Any]]
Content = str | list[dict[str, str]]  # of a message: plain text, or typed parts
TextSpan = tuple[int, int]


class Turn(NamedTuple):
    """Character span [start, end) that one assistant message contributes as target; `message` is its index."""

    start: int
    end: int
    message: int


class ChatTemplate:
    """Renders conversations (lists of `{"role", "content", …}`) to the text that the model reads.

    Args:
        source: Jinja text, as transformers compiles it.
        variables: Variables of the template beside messages and tools: special tokens, `enable_thinking`, ….
        added_tokens: Texts of the tokenizer's added tokens, to recognise the end-of-turn token by.
        name: For messages.
        stop_tokens: Texts of the tokens at which generation stops, the one to put behind an answer first.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        added_tokens: Sequence[str],
        name: str,
        stop_tokens: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.variables = dict(variables)
        self.added_tokens = tuple(sorted((t for t in added_tokens if t), key=len, reverse=True))
        self.name = name
        self.stop_tokens = tuple(stop_tokens)
        self.has_marks = _MARK.search(source) is not None
        self._written_for: dict[str, str] = {}
        self._heads: dict[str, str] = {}

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation. Errors of the template are raised as Jinja raises them."""
        return self._render(messages, tools, add_generation_prompt, marks=False)[0]

    def render_marked(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, list[TextSpan]]:
        """Return the text and the character spans of its `{% generation %}` blocks."""
        return self._render(messages, tools, False, marks=True)

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, add_generation_prompt: bool, marks: bool
    ) -> tuple[str, list[TextSpan]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) if tools else None,
            chat_template=self.source,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=add_generation_prompt,
            **self.variables,
        )
        return texts[0], [tuple(span) for span in spans[0]] if marks else []

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether content may be plain text (some templates of vision models want lists of parts)."""
        return self._shows(_PROBE)

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether content may be a list of typed parts."""
        return self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Content) -> bool:
        try:
            text = self.render([{"role": "user", "content": content}])
        except Exception:  # a template that can't take this form may fail in any way
            return False
        return _PROBE in text and "'type'" not in text

    def content(self, text: str) -> Content:
        """`text` in the form that this template takes."""
        return text if self.takes_text else [{"type": "text", "text": text}]

    def written_for(self, kind: str) -> str:
        """Return the text that this template writes for a medium: its placeholder and the marks around it.

        It is found between two texts; empty where the template refuses such a turn, or moves its media elsewhere.
        """
        if kind not in self._written_for:
            text = {"type": "text", "text": _PROBE}
            try:
                pieces = self.render([{"role": "user", "content": [text, {"type": kind}, text]}]).split(_PROBE)
            except Exception:  # the template's author chose what it refuses, and how
                pieces = []
            self._written_for[kind] = pieces[1] if len(pieces) == 3 else ""
        return self._written_for[kind]

    @functools.cached_property
    def headers(self) -> tuple[str, ...]:
        """The text that `add_generation_prompt` adds before an answer, longest form first.

        A second form has the role's header alone, for templates that open (or close) a thought in the prompt:
        earlier turns are rendered without it.
        """
        question = [{"role": "user", "content": self.content("?")}]
        try:
            plain, prompted = self.render(question), self.render(question, add_generation_prompt=True)
        except Exception:  # a template that refuses a lone question: answers start where they differ from a placeholder
            return ("",)
        if not prompted.startswith(plain) or prompted == plain:
            return ("",)
        header = prompted[len(plain) :]
        tokens = [match.start() for match in re.finditer("|".join(map(re.escape, self.added_tokens)) or "(?!)", header)]
        shorter = header[: tokens[1]] if len(tokens) > 1 else header
        return (header,) if shorter == header else (header, shorter)

    @functools.cached_property
    def end_of_turn(self) -> str:
        """The token that the template emits right after an answer (with space before it, if any), or an empty text."""
        talk = [{"role": "user", "content": self.content("?")}, {"role": "assistant", "content": self.content(_PROBE)}]
        return self._opening_token(self.render(talk).rpartition(_PROBE)[2])

    @functools.cached_property
    def end_of_earlier_turn(self) -> str:
        """The same for an answer that isn't the last message; an empty text if there is none, or it can't be found."""
        question = {"role": "user", "content": self.content("?")}
        answer = {"role": "assistant", "content": self.content(_PROBE)}
        try:
            once, twice = self.render([question]), self.render([question, question])
            tail = self.render([question, answer, question]).rpartition(_PROBE)[2]
        except Exception:  # a template that wants turns to alternate
            return ""
        following = twice[len(once) :]
        if not twice.startswith(once) or not following or not tail.endswith(following):
            return ""
        return self._opening_token(tail.removesuffix(following))

    @functools.cached_property
    def _ends(self) -> tuple[str, ...]:
        found = {*self.stop_tokens, self.end_of_turn.strip(), self.end_of_earlier_turn.strip()} - {""}
        return tuple(sorted(found, key=len, reverse=True))

    def is_ended(self, answer: str) -> bool:
        """Whether a target's text has its end token already."""
        return answer.rstrip().endswith(self._ends) if self._ends else False

    def end_at(self, following: str) -> str:
        """The end token that the text behind an answer opens with (and the space before it), or an empty text."""
        return _opening(following, self._ends)

    def space_in_marks(self, answer: str) -> int:
        """Number of characters of space at the end of a marked answer that the template writes itself."""
        return len(self._marked_space) if answer.endswith(self._marked_space) else 0

    @functools.cached_property
    def _marked_space(self) -> str:
        if not self.has_marks:
            return ""
        talk = [{"role": "user", "content": self.content("?")}, {"role": "assistant", "content": self.content(_PROBE)}]
        text, spans = self.render_marked(talk)
        tail = text[spans[-1][0] : spans[-1][1]].rpartition(_PROBE)[2] if spans else ""
        return tail if tail.isspace() else ""

    def missing_end(self, message: Mapping[str, Any]) -> str:
        """The end token of an answer without one: that of other answers, else the first stop token; or an empty text.

        Args:
            message: The answer; one that calls tools is followed by their results.
        """
        if self.end_of_earlier_turn:
            return self.end_of_earlier_turn
        head = (message.get("tool_calls") and self.head_after("tool")) or self.head_after("user")
        return head or next(iter(self.stop_tokens), "")

    @functools.cached_property
    def end_for_earlier_turn(self) -> str:
        """The end token to train after earlier answers in place of the one that the template writes; or an empty text.

        Harmony ends the last answer with `<|return|>`, at which generation stops, and writes `<|end|>` after earlier
        ones, at which it doesn't: a model that learned it would continue.
        """
        last, earlier = self.end_of_turn.strip(), self.end_of_earlier_turn.strip()
        return last if last in self.stop_tokens and earlier and earlier not in self.stop_tokens else ""

    def head_after(self, role: str) -> str:
        """The token that opens a message of `role` (user or tool) behind an answer, if generation stops at it."""
        if role not in self._heads:
            self._heads[role] = self._find_head(role)
        return self._heads[role]

    def _find_head(self, role: str) -> str:
        answer: dict[str, Any] = {"role": "assistant", "content": self.content("" if role == "tool" else _PROBE)}
        if role == "tool":
            answer["tool_calls"] = [{"type": "function", "function": {"name": "probe", "arguments": {}}}]
        talk = [{"role": "user", "content": self.content("?")}, answer]
        try:
            before = self.render(talk).rstrip()
            after = self.render([*talk, {"role": role, "content": self.content("?"), "name": "probe"}])
        except Exception:  # a template without tools, say
            return ""
        if role == "user":
            return _opening(after.partition(_PROBE)[2], self.stop_tokens)
        return _opening(after.removeprefix(before), self.stop_tokens) if after.startswith(before) else ""

    def _opening_token(self, text: str) -> str:
        return _opening(text, self.added_tokens)


def _opening(text: str, tokens: Sequence[str]) -> str:
    """The first of `tokens` that a text opens with, and the space before it; or an empty text."""
    space = text[: len(text) - len(text.lstrip())]
    return next((space + token for token in tokens if text.startswith(token, len(space))), "")


def chat_template_of(processor: Processor, name: str | None, enable_thinking: bool, path: str) -> ChatTemplate:
    """Return the chat template of a run.

    Args:
        processor: The model's processor, or its tokenizer.
        name: A published name, or None for the processor's own template.
        enable_thinking: Passed to the template.
        path: The model directory, for the stop tokens of its generation_config.json and for messages.

    Raises:
        ConfigError: Unknown name, or a model without a chat template of its own.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    variables = {**tokenizer.special_tokens_map, "enable_thinking": enable_thinking}
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    stops = stop_tokens(tokenizer, path)
    if name is not None:
        named = named_template(name)
        return ChatTemplate(named.source, {**variables, **named.variables}, added, name, stops)
    source = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        source = source.get("default")
    if not source:
        raise ConfigError(
            f"{path}: neither the processor nor the tokenizer has a chat template; name one in "
            "dataset_param.basic_parameters.template"
        )
    return ChatTemplate(source, variables, added, f"the chat template of {path}", stops)
