"""A chat template rendered to text: the model's own, or a named one."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm.data.named_templates import named_template
from mindspeed_mm.utils.errors import ConfigError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "\ue0f1probe\ue0f2"

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


class ChatTemplate:
    """Renders conversations (lists of `{"role", "content", …}`) to the text that the model reads.

    Args:
        source: Jinja text, as transformers compiles it.
        variables: What the template may read beside messages and tools: special tokens, `enable_thinking`, ….
        added_tokens: Texts of the tokenizer's added tokens, to recognise the end-of-turn token by.
        name: For messages.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], added_tokens: Sequence[str], name: str) -> None:
        self.source = source
        self.variables = dict(variables)
        self.added_tokens = tuple(sorted((t for t in added_tokens if t), key=len, reverse=True))
        self.name = name
        self.has_marks = _MARK.search(source) is not None

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation. Template errors come through as Jinja raises them."""
        return self._render(messages, tools, add_generation_prompt, marks=False)[0]

    def render_marked(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, list[Span]]:
        """Return the text and the character spans of its `{% generation %}` blocks."""
        return self._render(messages, tools, False, marks=True)

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, add_generation_prompt: bool, marks: bool
    ) -> tuple[str, list[Span]]:
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

    def _shows(self, content: Any) -> bool:
        try:
            text = self.render([{"role": "user", "content": content}])
        except Exception:  # a template that can't take this form may fail in any way
            return False
        return _PROBE in text and "'type'" not in text

    def content(self, text: str) -> Any:
        """`text` in the form that this template takes."""
        return text if self.takes_text else [{"type": "text", "text": text}]

    @functools.cached_property
    def headers(self) -> tuple[str, ...]:
        """What `add_generation_prompt` adds before an answer, longest form first.

        A second form without what follows the role's header is there for templates that open (or close) a thought
        in the prompt: earlier turns are rendered without it.
        """
        question = [{"role": "user", "content": self.content("?")}]
        try:
            plain, prompted = self.render(question), self.render(question, add_generation_prompt=True)
        except Exception:  # a template that can't ask: answers then start where they differ from a stand-in
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
        """The same of an answer that isn't the last message; an empty text if there is none, or it can't be told."""
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

    def _opening_token(self, text: str) -> str:
        space = text[: len(text) - len(text.lstrip())]
        for token in self.added_tokens:
            if text.startswith(token, len(space)):
                return space + token
        return ""


def chat_template_of(processor: Any, name: str | None, enable_thinking: bool, path: str) -> ChatTemplate:
    """Make the template of a run.

    Args:
        processor: The model's processor, or its tokenizer.
        name: A published name, or None for the processor's own template.
        enable_thinking: Passed to the template.
        path: The model directory, for messages.

    Raises:
        ConfigError: Unknown name, or a model without a chat template of its own.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    variables = {**tokenizer.special_tokens_map, "enable_thinking": enable_thinking}
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    if name is not None:
        named = named_template(name)
        return ChatTemplate(named.source, {**variables, **named.variables}, added, name)
    source = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        source = source.get("default")
    if not source:
        raise ConfigError(
            f"{path}: neither the processor nor the tokenizer has a chat template; name one in "
            "dataset_param.basic_parameters.template"
        )
    return ChatTemplate(source, variables, added, f"the chat template of {path}")
