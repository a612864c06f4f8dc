"""W01: the token that ends an answer is a target after every answer, wherever the template writes it, if at all."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.data.conversation.answer_ends import log_how_answers_end
from mindspeed_mm.data.conversation.stop_tokens import stop_tokens
from mindspeed_mm.data.conversation.targets import find_turns
from mindspeed_mm.data.conversation.templates import ChatTemplate
from mindspeed_mm.utils.log import forget_notices
from tests.support.families import deepseek_vl, glm4v_moe, gpt_oss, llava
from tests.unit.data.data_rows import talk, turn

# the end token at the head of the message after an answer, as Vicuna's conversations have it
HEAD = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- ' ASSISTANT: ' + m.content -}}
{%- else -%}{{- (eos_token if loop.index0 else '') + 'USER: ' + m.content -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- ' ASSISTANT: ' -}}{%- endif -%}"""
# nothing at all, not even marks
NOTHING = HEAD.replace("(eos_token if loop.index0 else '')", "(' ' if loop.index0 else '')")
# marks around the words; the end token behind them, after a line break
OUTSIDE = """{%- for m in messages -%}{{- '<s>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content -}}{%- endgeneration -%}
{%- else -%}{{- m.content -}}{%- endif -%}{{- '\\n</s>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<s>assistant\\n' -}}{%- endif -%}"""
GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
GLM_ADDED = (*GLM_STOPS, "<|assistant|>", "<|system|>", "[gMASK]", "<sop>", "<think>", "</think>", "</tool_call>")
# turns and calls as GLM writes them: what follows an answer ends it
GLM = """[gMASK]<sop>{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- '<|observation|>\\n' + m.content -}}
{%- else -%}{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}{{- '\\n<tool_call>' + call.function.name + '</tool_call>' -}}{%- endfor -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""


def template_of(source: str, stops: tuple[str, ...] = ("</s>",), added: tuple[str, ...] = ("<s>",)) -> ChatTemplate:
    """A template whose tokenizer has `stops` and `added`."""
    variables = {"bos_token": "<s>", "eos_token": stops[0] if stops else None}
    return ChatTemplate(source, variables, [*stops, *added], "the template", stops)


def in_parts(*contents: str) -> list[dict[str, Any]]:
    """Turns of the user and the assistant, their contents lists of parts."""
    return [turn(m["role"], [{"type": "text", "text": m["content"]}]) for m in talk(*contents)["messages"]]


def trained(template: ChatTemplate, messages: Any) -> list[str]:
    """The targets; but for what was put there, the text is the template's."""
    text, turns = find_turns(template, messages, None, "row")
    bare = [
        re.sub("|".join(map(re.escape, template.stop_tokens)), "", t).rstrip()
        for t in (text, template.render(messages))
    ]
    assert bare[0] == bare[1]
    return [text[start:end] for start, end, _ in turns]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        pytest.param(HEAD, 1, id="at the head of the next message"),
        pytest.param(NOTHING, 0, id="nowhere"),
        pytest.param(OUTSIDE, 2, id="outside of the marks"),
    ],
)
def test_every_answer_ends_with_the_stop_token(source: str, written: int) -> None:
    template = template_of(source)
    messages = talk("q", "one", "r", "two")["messages"]
    assert template.render(messages[1:]).count("</s>") >= written
    assert [answer.replace("\n", "") for answer in trained(template, messages)] == ["one</s>", "two</s>"]
    both = [*messages[:2], turn("assistant", "more"), *messages[2:]]  # two answers in a row
    assert [answer.replace("\n", "") for answer in trained(template, both)] == ["one</s>", "more</s>", "two</s>"]
    text, _ = find_turns(template, talk("q", "one", "r")["messages"], None, "row")
    assert text.count("</s>") == (3 if source is OUTSIDE else 1)  # a question isn't ended by us


def test_a_marked_answer_ends_before_the_space_that_the_template_adds() -> None:
    """LLaVA-1.5 marks "one ", and its authors trained "one</s>"; space of the answer's own stays."""
    template = template_of(llava.TEMPLATE)
    messages = in_parts("q", "one", "r", "two ")
    assert trained(template, messages) == ["one</s>", "two </s>"]
    text, _ = find_turns(template, messages, None, "row")
    assert text == "USER: q ASSISTANT: one</s> USER: r ASSISTANT: two </s> "


def test_what_ends_all_answers_but_the_last_is_put_behind_it() -> None:
    """DeepSeek-VL."""
    template = template_of(deepseek_vl.TEMPLATE)
    messages = in_parts("q", "one", "r", "two")
    assert template.render(messages).endswith("two")
    assert trained(template, messages) == ["one</s>", "two</s>"]


def test_the_next_messages_head_ends_an_answer_where_generation_stops_at_it() -> None:
    """GLM: `<|user|>` after an answer, `<|observation|>` after a call, also behind the last one."""
    template = template_of(GLM, GLM_STOPS, GLM_ADDED)
    assert trained(template, talk("q", "one", "r", "two")["messages"]) == ["one<|user|>", "two<|user|>"]
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [turn("user", "q"), turn("assistant", "I see", tool_calls=[call]), turn("tool", "r")]
    called = "I see\n<tool_call>look</tool_call><|observation|>"
    assert trained(template, [*messages, turn("assistant", "so")]) == [called, "so<|user|>"]
    assert trained(template, messages[:2]) == [called]
    # without its stop tokens, the tokenizer's own ends all answers
    other = template_of(GLM, ("<|endoftext|>",), GLM_ADDED[1:])
    assert trained(other, talk("q", "one", "r", "two")["messages"]) == ["one<|endoftext|>", "two<|endoftext|>"]


def test_a_head_after_a_line_break_ends_an_answer_too() -> None:
    """GLM-4.5V's form: a closed thought before every answer."""
    template = template_of(glm4v_moe.TEMPLATE, GLM_STOPS, GLM_ADDED)
    first, last = trained(template, talk("q", "one", "r", "two")["messages"])
    assert first.endswith("one\n<|user|>") and last.endswith("two\n<|user|>")
    text, _ = find_turns(template, talk("q", "one")["messages"], None, "row")
    assert text.endswith("one\n<|user|>")


def test_a_token_typed_by_a_person_ends_nothing() -> None:
    """An answer that ends with the template's own end token keeps it as its text, and gets another."""
    typed = chr(0xF0000)  # what a typed special token is while the text is rendered
    assert trained(template_of(NOTHING), talk("q", f"one{typed}")["messages"]) == [f"one{typed}</s>"]


def test_stop_tokens_are_those_of_generation(tmp_path: Path, tokenizer: Any) -> None:
    """generation_config.json before config.json, the tokenizer's own first; ordinary tokens end nothing."""
    own, other = tokenizer.eos_token, "<|endoftext|>"
    assert stop_tokens(tokenizer, str(tmp_path)) == (own,)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (own, other)}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": ids[other]}}))
    assert stop_tokens(tokenizer, str(tmp_path)) == (own, other)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, ids[own]]}))
    assert stop_tokens(tokenizer, str(tmp_path)) == (own,)
    assert stop_tokens(tokenizer, "some/name") == (own,)


@pytest.mark.parametrize(
    ("source", "stops", "said"),
    [
        (OUTSIDE, ("</s>",), ""),
        (NOTHING, ("</s>",), "ends answers with no token: </s>"),
        (deepseek_vl.TEMPLATE, ("</s>",), "nothing after the last answer: </s>"),
        (GLM, GLM_STOPS, "nothing after the last answer: <|user|>"),
        (NOTHING, (), "isn't taught to stop"),
        (OUTSIDE, ("<|end|>",), "<|end|>"),
        (gpt_oss.TEMPLATE, ("<|return|>",), ""),
    ],
)
def test_what_a_template_leaves_out_is_said(
    source: str, stops: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    forget_notices()
    template = template_of(source, stops, ("<s>", "</s>", "<|end|>", *GLM_ADDED))
    with caplog.at_level(logging.WARNING):
        log_how_answers_end(template)
        log_how_answers_end(template)
    assert len(caplog.messages) == bool(said) and all(said in message for message in caplog.messages)
