"""Transcripts of speech as the words or characters by which they are compared, by the rules of their language."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable

from mindspeed_mm.configs.eval_metrics import TranscriptLanguage
from mindspeed_mm.tasks.evaluation.chinese_text import normalise_chinese
from mindspeed_mm.utils.extras import require_extra

_SPACE_BEFORE_STOP = re.compile(" ?([!,.?;:])")


def words_of(text: str, language: TranscriptLanguage | None = None) -> list[str]:
    """Return the words of a transcript, or its characters if it is Chinese.

    Case doesn't count, and special tokens (`<|en|>`), punctuation and symbols are left out. With `en` contractions,
    titles and numbers are written in one way, and in American spelling; with `zh` numbers are written out in
    characters, and with any other language texts in brackets are left out, as they are with `en`.

    Args:
        language: None: any other than those that have rules of their own.

    Raises:
        ConfigError: English needs a package that isn't installed.

    Source: https://arxiv.org/abs/2212.04356, appendix C; lmms-eval 0.7.3, `tasks.asr_wer_utils.remove_sp` and
    `compute_wer` with the languages of `tasks.librispeech`.
    """
    text = re.sub(r"\s+", " ", re.sub(r"<\|.*?\|>", " ", text))
    text = _SPACE_BEFORE_STOP.sub(r"\1", text).lstrip(" ")
    if language == "zh":
        tokens = normalise_chinese(re.sub(r"\s+", "", text)).split()
        return list("".join(token for token in tokens if not _is_punctuation(token)).lower())
    if language == "en":
        text = _english_normaliser()(text)
    return _basic_normaliser()(text).split()


def require_language(language: TranscriptLanguage | None, named_by: str) -> None:
    """Raise if the rules of a language need a package that isn't installed.

    Args:
        named_by: flag or key that named the language, for the message.

    Raises:
        ConfigError: it isn't installed.
    """
    if language == "en":
        require_extra("speech", f"{named_by} en")


def _is_punctuation(token: str) -> bool:
    return all(unicodedata.category(character).startswith("P") for character in token)


@functools.cache
def _basic_normaliser() -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    normaliser: Callable[[str], str] = BasicTextNormalizer()
    return normaliser


@functools.cache
def _english_normaliser() -> Callable[[str], str]:
    """Whisper's rules; transformers has them without the spellings."""
    require_extra("speech", "the word error rate of English transcripts")
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer
    from whisper_normalizer.english import EnglishSpellingNormalizer

    normaliser: Callable[[str], str] = EnglishTextNormalizer(EnglishSpellingNormalizer().mapping)
    return normaliser
