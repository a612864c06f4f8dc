"""What an answer to a question of MMMU says: the option that it chooses, or the texts and numbers that it contains.

Source: MMMU's evaluation, https://github.com/MMMU-Benchmark/MMMU, eval/eval_utils.py; as lmms-eval has it in
`tasks._task_utils.mmmu_mcq_utils` and `tasks.mmmu.utils`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_MARKS = (",", ".", "!", "?", ";", ":", "'")
#: an answer with at most so many words that names no letter is not searched for the text of an option
_SHORT = 5
_BEFORE_THE_ANSWER = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",  # commas between its digits
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",  # scientific notation
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)


def letters_of(options: Sequence[str]) -> list[str]:
    """Return the letters of options: A, B, …"""
    return [chr(ord("A") + number) for number in range(len(options))]


def chosen_option(answer: str, options: Sequence[str], guesses: random.Random) -> str:
    """Return the letter of the option that an answer chooses.

    Searched for, in this order: letters in parentheses, letters before a space, letters before a full stop, and, in an
    answer of more than five words, the texts of the options. Of several, the last one in the answer counts; where
    letters are found before a full stop only, the first one of the alphabet does. An answer in which nothing is found
    counts as a guess: both as in MMMU's evaluation.

    Args:
        answer: what the model wrote.
        options: texts of the options.
        guesses: generator of the guesses.
    """
    for mark in _MARKS:
        answer = answer.strip(mark)
    answer = f" {answer} "
    texts = dict(zip(letters_of(options), options, strict=True))
    for pattern, place in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        found = [letter for letter in texts if pattern.format(letter) in answer]
        if found:
            return max(found, key=lambda letter: answer.rfind(place.format(letter)))
    if len(answer.split()) > _SHORT:
        lower = answer.lower()
        found = [letter for letter, text in texts.items() if text.lower() in lower]
        if found:
            return max(found, key=lambda letter: lower.rfind(texts[letter].lower()))
    return guesses.choice(list(texts))


def open_answer_is_right(answer: str, references: Sequence[str]) -> bool:
    """Whether an answer contains a reference: one of its numbers is equal to it, or one of its texts contains it.

    A reference that is a list written as a text is not taken apart, as in lmms-eval.
    """
    expected = [form for reference in references for form in _forms(reference)]
    for form in _stated(answer):
        if isinstance(form, str):
            if any(isinstance(text, str) and text in form for text in expected):
                return True
        elif form in expected:
            return True
    return False


def _stated(answer: str) -> list[str | float]:
    """The ends of the lines that state something, and the numbers in them."""
    answer = answer.strip().strip(".").lower()
    lines = answer.split("\n")
    statements = []
    for number, line in enumerate(lines, start=1):
        signs = (*_BEFORE_THE_ANSWER, "=") if number == len(lines) else _BEFORE_THE_ANSWER
        shortest = ""
        for end in (line.split(sign)[-1].strip() for sign in signs if sign in line):
            if not shortest or len(end) < len(shortest):
                shortest = end
        if shortest and shortest not in (":", ",", ".", "!", "?", ";", "'"):
            statements.append(shortest)
    statements = statements or [answer]
    numbers = [number for text in statements for pattern in _NUMBERS for number in re.findall(pattern, text)]
    return [form for text in (*statements, *numbers) for form in _forms(text)]


def _forms(text: str) -> list[str | float]:
    """A number rounded to two places, or a text in lower case; a single character with a space on either side."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]
