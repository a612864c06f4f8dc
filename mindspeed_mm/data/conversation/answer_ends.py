"""The token that ends each answer: found where the template wrote it, and put where the template writes none.

A template may write it after the answer, outside of its `{% generation %}` marks, at the head of the next message (the
`<|user|>` of GLM), after all answers but the last, or not at all. What was not written is put behind the answer, so
that the model learns to stop after every answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm.data.conversation.templates import ChatTemplate, Messages, Turn
from mindspeed_mm.utils.log import notice

_REACH = 200  # characters behind an answer within which its end token begins


def end_answers(template: ChatTemplate, messages: Messages, text: str, turns: Sequence[Turn]) -> tuple[str, list[Turn]]:
    """Extend the target of each answer by its end token.

    Args:
        template: The chat template.
        messages: The conversation.
        text: The text that the template rendered.
        turns: The targets, in order; in a message with several, the last one ends it.

    Returns:
        The text with the missing end tokens, and the targets in it.
    """
    closing = {turn.message: number for number, turn in enumerate(turns)}
    pieces, position, grown, ended = [], 0, 0, []
    for number, (start, end, message) in enumerate(turns):
        missing = ""
        if closing[message] == number and not template.is_ended(text[start:end]):
            end = max(start, end - template.space_in_marks(text[start:end]))
            written = template.end_at(text[end : end + _REACH])
            end += len(written)
            missing = "" if written else template.missing_end(messages[message])
            space = missing[: len(missing) - len(missing.lstrip())]
            if text.startswith(space, end):  # the template has written that much
                end, missing = end + len(space), missing[len(space) :]
        pieces += [text[position:end], missing]
        ended.append(Turn(start + grown, end + grown + len(missing), message))
        position, grown = end, grown + len(missing)
    return "".join((*pieces, text[position:])), ended


def log_how_answers_end(template: ChatTemplate) -> None:
    """Log once that a template leaves out end tokens, or writes some at which generation doesn't stop."""
    try:
        last, earlier = template.end_of_turn.strip(), template.end_of_earlier_turn.strip()
        missing = "" if last else template.missing_end({}).strip()
    except Exception:  # a template that refuses the probe's conversation: the errors of its rows show it
        return
    stops = " or ".join(template.stop_tokens)
    if last:
        if template.stop_tokens and last not in template.stop_tokens:
            notice(
                f"{template.name} ends an answer with {last}, and generation stops at {stops} (generation_config.json, "
                f"the tokenizer's eos_token): {last} is trained; add it to eos_token_id there before the model is used"
            )
    elif not missing:
        notice(
            f"{template.name} writes no token at the end of an answer, and neither generation_config.json nor the "
            "tokenizer names one: the model isn't taught to stop; set the tokenizer's eos_token"
        )
    elif missing == earlier or missing == template.head_after("user").strip():
        notice(f"{template.name} writes nothing after the last answer: {missing}, which ends the others, is put there")
    else:
        notice(f"{template.name} ends answers with no token: {missing}, at which generation stops, is put there")
