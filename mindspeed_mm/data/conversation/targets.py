"""Find the target characters of a rendered conversation, by rendering, never by searching for role names.

A target is text that the model has to produce: the answer, and the token that ends it (`answer_ends.py`). Where the
template has `{% generation %}` marks, these enclose the answers. Else the conversation is rendered a second time with a
placeholder for every answer; text that is equal in the two renderings is no target. The start of an answer is where
`add_generation_prompt` would end. If the placeholders don't give one clear result, the turns are found by rendering the
conversation turn by turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm.data.conversation.answer_ends import end_answers
from mindspeed_mm.data.conversation.templates import ChatTemplate, Messages, Turn
from mindspeed_mm.data.places import Place
from mindspeed_mm.utils.errors import BadSample


def find_turns(
    template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, where: Place
) -> tuple[str, list[Turn]]:
    """Render a conversation and find its targets.

    Args:
        template: The chat template.
        messages: `{"role", "content", …}`, content in the form the template takes.
        tools: Tool schemas.
        where: The row, for messages.

    Returns:
        The rendered text, with the end tokens that the template left out, and the targets in order (usually one for
        each assistant message).

    Raises:
        BadSample: The template refuses the conversation, or its answers can't be distinguished from the rest.
    """
    try:
        text, turns = _find(template, messages, tools)
        if turns is not None:
            text, turns = end_answers(template, messages, text, turns)
    except Exception as error:  # Jinja raises what the template's author chose, TypeErrors included
        raise _refused(template, where, error) from error
    if turns is None:
        raise BadSample(
            f"{where}: the answers can't be distinguished from the rest of the text that {template.name} renders; a "
            "template with {% generation %} marks shows them (or leave out the row)",
            "answers can't be distinguished from the rest",
        )
    return text, turns


def render_prompt(template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, where: Place) -> str:
    """Return the text of a conversation up to where the next answer begins; arguments as `find_turns` takes them.

    Raises:
        BadSample: The template refuses the conversation.
    """
    try:
        return template.render(messages, tools, add_generation_prompt=True)
    except Exception as error:
        raise _refused(template, where, error) from error


def _refused(template: ChatTemplate, where: Place, error: Exception) -> BadSample:
    return BadSample(f"{where}: {template.name} can't render this conversation: {error}", "refused by the template")


def _find(template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None) -> tuple[str, list[Turn] | None]:
    if template.has_marks:
        return _by_marks(template, messages, tools)
    text = template.render(messages, tools)
    turns = _by_placeholders(template, messages, tools, text)
    return text, _by_prefixes(template, messages, tools, text) if turns is None else turns


def _assistants(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _by_marks(template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None) -> tuple[str, list[Turn]]:
    text, spans = template.render_marked(messages, tools)
    assistants = _assistants(messages)
    if len(spans) == len(assistants):
        return text, [Turn(*span, index) for span, index in zip(spans, assistants, strict=True)]
    # Several marks for a message (or none): the number of marks up to each message assigns them.
    turns: list[Turn] = []
    for index in assistants:
        upto = len(template.render_marked(messages[: index + 1], tools)[1])
        turns += [Turn(*span, index) for span in spans[len(turns) : upto]]
    return text, turns


def _by_placeholders(
    template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, text: str
) -> list[Turn] | None:
    """Compare renderings with answers and with placeholders: the text between these is also between the answers."""
    assistants = _assistants(messages)
    if not assistants:
        return []
    names = [f"\ue0f3{index}\ue0f4" for index in range(len(assistants))]
    changed = list(messages)
    for name, index in zip(names, assistants, strict=True):
        changed[index] = _with_placeholder(template, messages[index], name)
    pieces, rest = [], template.render(changed, tools)
    for name in names:
        piece, found, rest = rest.partition(name)
        if not found or name in rest:
            return None
        pieces.append(piece)
    if not text.endswith(rest):
        return None
    end = template.end_of_turn
    # After answer k comes pieces[k + 1], or the rest; it opens with the end-of-turn token (after the call, for calls).
    tails = []
    for piece, index in zip([*pieces[1:], rest], assistants, strict=True):
        at, token = piece.find(end), end
        if at < 0 and template.end_of_earlier_turn and piece.startswith(template.end_of_earlier_turn):
            at, token = 0, template.end_of_earlier_turn
        if at < 0 or (not end and messages[index].get("tool_calls")):
            return None
        tails.append(at + len(token))
    anchors = [_anchors(template, piece) for piece in pieces]
    forward = _from_the_left(text, anchors)
    if forward is None or forward != _from_the_right(text, anchors, len(text) - len(rest)):
        return None
    nexts = [*(start - length for start, length in forward[1:]), len(text) - len(rest)]
    return [
        Turn(start, following + tail, index)
        for (start, _), following, tail, index in zip(forward, nexts, tails, assistants, strict=True)
    ]


def _with_placeholder(template: ChatTemplate, message: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return {**message, "content": template.content(name)}
    first, *others = message["tool_calls"]
    function = {**first["function"], "name": name}
    return {**message, "tool_calls": [{**first, "function": function}, *others]}


def _anchors(template: ChatTemplate, piece: str) -> list[str]:
    """The unchanging text up to the start of an answer: a piece as far as the header of the answer goes."""
    found = []
    for header in template.headers:
        at = piece.rfind(header) if header else len(piece)
        if at >= 0:
            found.append(piece[: at + len(header)])
    return found


def _from_the_left(text: str, anchors: Sequence[Sequence[str]]) -> list[tuple[int, int]] | None:
    """(start of the answer, length of the anchor before it) for every answer, each anchor at its first place."""
    position, result = 0, []
    for number, forms in enumerate(anchors):
        places = [(text.find(form, position), form) for form in forms]
        places = [(at, form) for at, form in places if at >= 0 and (number or at == 0)]
        if not places:
            return None
        at, form = min(places, key=lambda place: place[0])  # the longest form wins a tie
        position = at + len(form)
        result.append((position, len(form)))
    return result


def _from_the_right(text: str, anchors: Sequence[Sequence[str]], end: int) -> list[tuple[int, int]] | None:
    """The same, each anchor at its last place: if the two disagree, an answer quotes the template."""
    result: list[tuple[int, int]] = []
    for number in reversed(range(len(anchors))):
        places = [(text.rfind(form, 0, end) if number else 0, form) for form in anchors[number]]
        places = [(at, form) for at, form in places if at >= 0 and text.startswith(form, at)]
        if not places:
            return None
        at, form = max(places, key=lambda place: place[0])
        result.append((at + len(form), len(form)))
        end = at
    return result[::-1]


def _by_prefixes(
    template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None, text: str
) -> list[Turn] | None:
    """Render up to each assistant message, with the generation prompt, and up to its end; both must begin the text."""
    turns, end = [], template.end_of_turn.strip()
    for index in _assistants(messages):
        before = template.render(messages[:index], tools, add_generation_prompt=True)
        upto = template.render(messages[: index + 1], tools)
        if not text.startswith(before) or not text.startswith(upto) or len(upto) < len(before):
            return None
        body = upto[len(before) :].rstrip()
        if end and not body.endswith(end):
            return None
        turns.append(Turn(len(before), len(before) + len(body), index))
    return turns
