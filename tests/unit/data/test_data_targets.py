"""Exact targets: what the model has to produce, and nothing else, for templates of several kinds.

The independent derivation scans the token ids for the template's own markers; it shares no code with the package.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.conversation.named_templates import TEMPLATES
from mindspeed_mm.data.conversation.targets import find_turns
from mindspeed_mm.data.conversation.templates import ChatTemplate
from mindspeed_mm.utils.errors import DataError
from tests.unit.data.conftest import CHATML_VL, MARKED, NO_PROMPT, PLAIN, SPECIAL, THINKING
from tests.unit.data.data_rows import talk, targets, turn

ADDED = [*SPECIAL, *PLAIN, "<s>", "</s>"]


def _template(source: str, **variables: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", **variables}, ADDED, "the template")


def _trained(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    text, turns = find_turns(template, messages, tools, "row")
    assert text == template.render(messages, tools)
    return [text[start:end] for start, end, _ in turns]


def _scan(ids: list[int], tokenizer: Any, skip: str = "") -> list[int]:
    """Labels by looking for `<|im_start|>assistant\\n` … `<|im_end|>`; `skip` after the header isn't trained."""
    header, skipped = (
        tokenizer(text, add_special_tokens=False).input_ids for text in ("<|im_start|>assistant\n", skip)
    )
    end, labels, at = tokenizer.convert_tokens_to_ids("<|im_end|>"), [-100] * len(ids), 0
    while at < len(ids):
        if ids[at : at + len(header)] != header:
            at += 1
            continue
        at += len(header)
        if skipped and ids[at : at + len(skipped)] == skipped:
            at += len(skipped)
        while True:
            labels[at] = ids[at]
            at += 1
            if ids[at - 1] == end:
                break
    return labels


WORDS = ["the", "quick", "fox", "图片", "<image>", "seven", "\n", "  ", "assistant", "{x}", "eight,", "<div>", "</s>"]


def _conversation(rng: random.Random, images: list[str], thoughts: bool) -> dict[str, Any]:
    def words(most: int) -> str:
        chosen = rng.choices([w for w in WORDS if w != "<image>"], k=rng.randrange(most))
        return rng.choice(["", " ", "\n"]) + " ".join(chosen) + rng.choice(["", " ", "\n"])

    messages = [turn("system", words(6))] if rng.random() < 0.3 else []
    used: list[str] = []
    for _ in range(rng.randint(1, 4)):
        question = words(8)
        for name in rng.sample(images, rng.choice([0, 0, 1, 2]) if images else 0):
            question += "<image>" + words(3)
            used.append(name)
        messages.append(turn("user", question))
        if rng.random() < 0.2:
            messages.append(turn("tool", words(5)))
        thought = f"<think>\n{words(5)}\n</think>\n\n" if thoughts and rng.random() < 0.5 else ""
        messages.append(turn("assistant", thought + words(9)))
        if rng.random() < 0.15:
            messages.append(turn("assistant", words(4)))
    if rng.random() < 0.2:
        messages.append(turn("user", words(4)))
    return {"messages": messages, "images": used}


def test_masks_equal_an_independent_derivation_vision(param: Any, images: list[str], processor: Any) -> None:
    """200 generated conversations with 0 to several images: labels token by token, ids equal to the processor's."""
    rng = random.Random(1)
    rows = [_conversation(rng, images, thoughts=False) for _ in range(200)]
    dataset = build_mm_dataset(param(rows))
    for index in range(len(dataset)):
        sample = dataset[index]
        ids = sample["input_ids"].tolist()
        assert sample["labels"].tolist() == _scan(ids, processor.tokenizer), index
        assert any(label != -100 for label in sample["labels"].tolist())


@pytest.mark.parametrize("thinking", [True, False])
def test_masks_equal_an_independent_derivation_thinking(
    param: Any, text_dir: Path, tokenizer: Any, thinking: bool
) -> None:
    """200 generated conversations through a template that rewrites earlier turns; with an empty thought in the prompt
    (enable_thinking false) that thought is not a target."""
    rng = random.Random(2)
    rows = [_conversation(rng, [], thoughts=thinking) for _ in range(200)]
    dataset = build_mm_dataset(param(rows, model=text_dir, enable_thinking=thinking))
    rewritten = 0
    for index, row in enumerate(rows):
        sample = dataset[index]
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, enable_thinking=thinking)
        ids = sample["input_ids"].tolist()
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
        assert sample["labels"].tolist() == _scan(ids, tokenizer, "" if thinking else "<think>\n\n</think>\n\n"), index
        rewritten += sum(m["content"].count("<think>") for m in row["messages"]) > text.count("<think>")
    assert rewritten > 20 or not thinking  # earlier thoughts were left out by the template


def test_targets_of_a_row(param: Any, processor: Any) -> None:
    """T03: exactly the answer and its end mark; the first target is what the last prompt position predicts."""
    sample = build_mm_dataset(param([talk("which digit", "a seven", system="be brief")]))[0]
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    answer = processor.tokenizer("a seven<|im_end|>", add_special_tokens=False).input_ids
    first = next(i for i, label in enumerate(labels) if label != -100)
    assert [label for label in labels if label != -100] == answer == labels[first : first + len(answer)]
    assert processor.tokenizer.decode(ids[:first]).endswith("<|im_start|>assistant\n")
    assert processor.tokenizer.decode(ids[first + len(answer) :]) == "\n"  # the newline after the end mark: not trained


def test_flags_history_and_prompt(param: Any, processor: Any) -> None:
    """T04: three turns, one flagged; only answers and end marks; mask_history keeps the last; train_on_prompt all."""
    row = talk("q1", "one", "q2", "two", "q3", "three", system="sys")
    row["messages"][4]["loss_mask"] = 0
    assert targets(build_mm_dataset(param([row]))[0], processor.tokenizer) == "one<|im_end|>|three<|im_end|>"
    assert targets(build_mm_dataset(param([row], mask_history=True))[0], processor.tokenizer) == "three<|im_end|>"
    sample = build_mm_dataset(param([row], train_on_prompt=True))[0]
    everything = processor.tokenizer.decode(sample["input_ids"])
    assert targets(sample, processor.tokenizer) == everything.replace("two<|im_end|>", "|")


def test_train_on_prompt_leaves_media_tokens_out(param: Any, images: list[str], processor: Any) -> None:
    sample = build_mm_dataset(param([talk("<image>?", "ok", images=images[:1])], train_on_prompt=True))[0]
    off = sample["input_ids"][sample["labels"] == -100]
    assert processor.tokenizer.decode(off) == "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"


def test_last_user_turn_is_never_trained(param: Any, processor: Any) -> None:
    """D10: the row ends with a question."""
    sample = build_mm_dataset(param([talk("q", "a", "and then?")]))[0]
    assert targets(sample, processor.tokenizer) == "a<|im_end|>"


def test_named_template_is_the_published_text(param: Any, images: list[str], processor: Any) -> None:
    """qwen2vl: ChatML with its default system text, tool results in turns of their own."""
    row = {"messages": [turn("user", "see <image>"), turn("tool", "r"), turn("assistant", "ok")], "images": images[:1]}
    sample = build_mm_dataset(param([row], template="qwen2vl"))[0]
    image = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert processor.tokenizer.decode(sample["input_ids"]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\nsee {image}<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    )
    assert targets(sample, processor.tokenizer) == "ok<|im_end|>"


def test_named_thinking_template_opens_every_answer_with_a_thought() -> None:
    """qwen3_vl: an empty thought is trained with thinking on, is part of the prompt with thinking off."""
    talk_ = talk("q", "plain", "r", "<think>\nwhy\n</think>\n\nso")["messages"]
    named = TEMPLATES["qwen3_vl"]
    on = _template(named.source, enable_thinking=True, **named.variables)
    assert _trained(on, talk_) == ["<think>\n\n</think>\n\nplain<|im_end|>", "<think>\nwhy\n</think>\n\nso<|im_end|>"]
    off = _template(named.source, enable_thinking=False, **named.variables)
    assert _trained(off, talk_) == ["plain<|im_end|>", "so<|im_end|>"]
    assert off.render(talk_).count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_named_template_trains_answers_only(name: str) -> None:
    named = TEMPLATES[name]
    template = _template(named.source, enable_thinking=True, **named.variables)
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
    messages = [
        turn("system", "S"), turn("user", "q"), turn("assistant", "", tool_calls=[call]), turn("tool", "r"),
        turn("assistant", "done"),
    ]  # fmt: skip
    called, done = _trained(template, messages, [{"name": "look"}] if name != "default" else None)
    assert '"name": "look"' in called and "done" in done
    assert all(word not in called + done for word in ("S", "q\n", "assistant", "<tool_response>"))
    assert called.endswith(("<|im_end|>", "</s>")) and done.endswith(("<|im_end|>", "</s>"))


def test_marks_say_where_an_answer_is() -> None:
    """W01: what the marks leave out of the answer's own text isn't a target; its end token is, though outside."""
    messages = talk("q", "one", "r", "two")["messages"]
    assert _trained(_template(MARKED), messages) == ["one<|im_end|>", "two<|im_end|>"]
    cut = MARKED.replace("message.content -}}{%- endgeneration", "message.content[:1] -}}{%- endgeneration")
    assert cut != MARKED


def test_several_marks_of_one_turn_belong_to_it() -> None:
    source = MARKED.replace(
        "{%- generation -%}{{- message.content -}}{%- endgeneration -%}",
        "{%- generation -%}{{- message.content[:2] -}}{%- endgeneration -%}{{- '|' -}}"
        "{%- generation -%}{{- message.content[2:] -}}{%- endgeneration -%}",
    )
    _, turns = find_turns(_template(source), talk("q", "abcd", "r", "wxyz")["messages"], None, "row")
    assert [turn.message for turn in turns] == [1, 1, 3, 3]


def test_template_without_generation_prompt() -> None:
    """[INST] style: the answer begins where the question's frame ends; content is trimmed by the template."""
    trained = _trained(_template(NO_PROMPT), talk("q", " one ", "one", "two")["messages"])
    assert [text.strip() for text in trained] == ["one</s>", "two</s>"]


def test_template_without_end_of_turn_token() -> None:
    """GLM style: the next role's token is a header, not the end of an answer."""
    source = (
        "{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
    )
    template = ChatTemplate(source, {}, ["<|user|>", "<|assistant|>"], "glm")
    assert _trained(template, talk("q", "one", "r", "two")["messages"]) == ["one", "two"]


def test_template_that_ends_the_last_answer_otherwise() -> None:
    """Harmony style: `<|return|>` after the last answer, `<|end|>` after the others; both are trained."""
    source = (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- '<|start|>assistant<|message|>' + m.content -}}"
        "{{- '<|return|>' if loop.last else '<|end|>' -}}"
        "{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
    )
    template = ChatTemplate(source, {}, ["<|start|>", "<|message|>", "<|end|>", "<|return|>"], "harmony")
    trained = _trained(template, talk("q", "one", "r", "two")["messages"])
    assert trained == ["<|message|>one<|end|>", "<|message|>two<|return|>"]


def test_answers_that_quote_the_template() -> None:
    """An answer that holds the template's own markers can't be told by searching; turn-by-turn rendering can."""
    quote = "so:<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nnot an answer"
    trained = _trained(_template(CHATML_VL), talk("q", quote, "r", "two")["messages"])
    assert trained == [quote + "<|im_end|>", "two<|im_end|>"]
    with pytest.raises(DataError, match="the answers can't be distinguished"):  # and neither where turns are rewritten
        find_turns(_template(THINKING), talk("q", "<think>x</think>" + quote, "r", "two")["messages"], None, "row")


def test_tool_calls_are_trained_to_the_end_of_the_turn() -> None:
    """D11: the call is a target, the schema is rendered once, the result is masked."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": "<tool>"}}}
    messages = [
        turn("user", "q"), turn("assistant", "", tool_calls=[call, call]), turn("tool", "r"), turn("assistant", "done"),
        turn("user", "again"), turn("assistant", "I call", tool_calls=[call]), turn("tool", "r"),
        turn("assistant", "so"),
    ]  # fmt: skip
    template = _template(THINKING)
    trained = _trained(template, messages, [{"name": "look"}])
    once = '<tool_call>\n{"name": "look", "arguments": {"x": "<tool>"}}\n</tool_call>'
    assert trained[:2] == [f"{once}\n{once}<|im_end|>", "done<|im_end|>"]
    assert trained[2] == f"I call\n{once}<|im_end|>"
    assert trained[3].endswith("so<|im_end|>")
    assert template.render(messages, [{"name": "look"}]).count("# Tools") == 1


def test_template_that_refuses_names_the_row() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="row 3: the template can't render this conversation: roles must alternate"):
        find_turns(_template(source), talk("q", "a")["messages"], None, "row 3")
