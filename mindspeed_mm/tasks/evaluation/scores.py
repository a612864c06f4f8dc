"""The standard scores of answers; each equals the function of lmms-eval 0.7.3 that its docstring names.

A score of a row is a pair (sum, denominator); that of many rows is the quotient of the two sums, times the score's
scale. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import random
import re
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_mm.configs.eval_metrics import TranscriptLanguage
from mindspeed_mm.tasks.evaluation.choices import chosen_option, open_answer_is_right
from mindspeed_mm.tasks.evaluation.transcripts import require_language, words_of
from mindspeed_mm.utils.errors import ConfigError

_ANLS_THRESHOLD = 0.5
_TOLERANCE = 0.05
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LETTER = re.compile(r"\s*([A-Z])\.")

#: what a row adds to the sum and to the denominator of a score
RowScore = tuple[float, float]


@dataclass(frozen=True)
class Target:
    """What an answer is compared with.

    Attributes:
        references: the right answers, of which one is enough; of a question with options the letter.
        options: texts of the options A, B, …; empty: the answer is free.
    """

    references: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """A score.

    Attributes:
        name: its name in flags and reports.
        of_row: prediction, target, and the generator of guesses → sum and denominator of the row.
        scale: 1: a fraction; 100: a percentage.
        unit: of the score, for reports.
        higher_is_better: whether a larger value is the better one.
        needs_options: whether rows must have options.
        language: of the transcripts that it compares; None: any.
    """

    name: str
    of_row: Callable[[str, Target, random.Random], RowScore]
    scale: float = 1.0
    unit: str = "fraction"
    higher_is_better: bool = True
    needs_options: bool = field(default=False, kw_only=True)
    language: TranscriptLanguage | None = field(default=None, kw_only=True)

    def total(self, rows: Sequence[RowScore]) -> float | None:
        """Return the score of rows; None: there is nothing to divide by (no rows, or references without a word)."""
        denominator = sum(below for _, below in rows)
        return sum(above for above, _ in rows) / denominator * self.scale if denominator else None


def exact_match(
    prediction: str, reference: str, *, ignore_case: bool = False, ignore_punctuation: bool = False
) -> bool:
    """Whether two texts are the same.

    Args:
        ignore_punctuation: leave out the ASCII punctuation of both.

    Source: lmms-eval, `api.metrics.exact_match_hf_evaluate`. Spaces count there, and here.
    """
    if ignore_case:
        prediction, reference = prediction.lower(), reference.lower()
    if ignore_punctuation:
        prediction, reference = (text.translate(_WITHOUT_PUNCTUATION) for text in (prediction, reference))
    return prediction == reference


def relaxed_match(prediction: str, reference: str) -> bool:
    """Whether two numbers differ by at most 5 % of the reference, or two texts are the same but for their case.

    A number with % at its end is a hundredth of it. A reference of 0 is compared as a text, as is a number with commas
    between its digits: both as in lmms-eval.

    Source: Methani et al. 2020, https://arxiv.org/abs/1909.00997, as ChartQA uses it,
    https://arxiv.org/abs/2203.10244, section 5.1; lmms-eval, `tasks.chartqa.utils.relaxed_correctness`.
    """
    found, expected = _number(prediction), _number(reference)
    if found is not None and expected:
        return abs(found - expected) / abs(expected) <= _TOLERANCE
    return prediction.lower() == reference.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(prediction: str, references: Sequence[str]) -> float:
    """Return the average normalised Levenshtein similarity of a prediction and the nearest reference, from 0 to 1.

    It is 1 minus the distance of the two texts over the length of the longer one; below 0.5 it is 0. Case and repeated
    spaces don't count for the distance; they do for the lengths, as in lmms-eval.

    Source: Biten et al. 2019, https://arxiv.org/abs/1905.13648, equation 1; lmms-eval, `api.metrics.anls`.
    """
    found = " ".join(prediction.lower().split())
    distances = []
    for reference in references:
        longest = max(len(reference.upper()), len(prediction.upper()))
        edits = edit_distance(" ".join(reference.lower().split()), found)
        distances.append(edits / longest if longest else 0.0)
    similarity = 1 - min(distances)
    return similarity if similarity >= _ANLS_THRESHOLD else 0.0


def option_letter(prediction: str) -> str:
    """Return the capital letter with a full stop that an answer begins with; else the whole answer.

    Source: lmms-eval, `tasks.ai2d.utils.MultiChoiceRegexFilter`.
    """
    found = _LETTER.match(prediction)
    return found[1] if found else prediction


def word_errors(prediction: str, reference: str, language: TranscriptLanguage | None = None) -> RowScore:
    """Return the number of wrong, missing and superfluous words of a prediction, and that of the reference's words.

    Of Chinese texts characters are counted. Both texts are normalised first: see `words_of`.

    Source: word error rate; lmms-eval, `tasks.asr_wer_utils.compute_wer`.
    """
    found, expected = words_of(prediction, language), words_of(reference, language)
    return float(edit_distance(expected, found)), float(len(expected))


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the least number of insertions, deletions and replacements that make one sequence of the other.

    Source: Levenshtein 1966, by the recurrence of Wagner and Fischer 1974.
    """
    before = list(range(len(other) + 1))
    for row, item in enumerate(one, start=1):
        now = [row]
        for column, its in enumerate(other, start=1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (item != its)))
        before = now
    return before[-1]


def _exact(prediction: str, target: Target, _: random.Random) -> RowScore:
    return float(any(exact_match(prediction, reference) for reference in target.references)), 1.0


def _relaxed(prediction: str, target: Target, _: random.Random) -> RowScore:
    return float(any(relaxed_match(prediction, reference) for reference in target.references)), 1.0


def _anls(prediction: str, target: Target, _: random.Random) -> RowScore:
    return anls(prediction, target.references), 1.0


def _letter(prediction: str, target: Target, _: random.Random) -> RowScore:
    letter = option_letter(prediction)
    matches = (exact_match(letter, ref, ignore_case=True, ignore_punctuation=True) for ref in target.references)
    return float(any(matches)), 1.0


def _choice(prediction: str, target: Target, guesses: random.Random) -> RowScore:
    """A question with options by the option that the answer chooses, another one by what the answer contains."""
    if target.options:
        return float(chosen_option(prediction, target.options, guesses) in target.references), 1.0
    return float(open_answer_is_right(prediction, target.references)), 1.0


def _wer(prediction: str, target: Target, _: random.Random, *, language: TranscriptLanguage | None = None) -> RowScore:
    return word_errors(prediction, target.references[0], language)


#: scores that a user's own rows may have
SCORES: Mapping[str, Score] = {
    score.name: score
    for score in (
        Score("exact_match", _exact),
        Score("relaxed_accuracy", _relaxed),
        Score("anls", _anls),
        Score("multiple_choice", _choice, needs_options=True),
        Score("wer", _wer, scale=100.0, unit="percent", higher_is_better=False),
    )
}


def find_score(name: str, language: TranscriptLanguage | None = None, named_by: str = "--language") -> Score:
    """Return a score that a user's own rows may have.

    Args:
        name: a key of `SCORES`.
        language: of transcripts; None: any.
        named_by: flag or key that named the language, for messages.

    Raises:
        ConfigError: the score has nothing to do with a language, or its rules need a package that isn't installed.
    """
    if language is None:
        return SCORES[name]
    if name != "wer":
        raise ConfigError(f"{named_by} {language}: it is the language of transcripts, for wer; the score is {name}")
    require_language(language, named_by)
    return replace(SCORES[name], of_row=functools.partial(_wer, language=language), language=language)


#: of AI2D: the letter that the answer begins with
OPTION_LETTER = Score("exact_match", _letter)
#: of MMMU: questions with options and open ones
OPTION_OR_TEXT = Score("accuracy", _choice)
