"""A sample as text that people read: what the model is given, and which of it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mindspeed_mm.utils.labels import IGNORE_INDEX

_MANY = 4  # equal tokens in a row that are shown once, with their number


@dataclass(frozen=True)
class TextPiece:
    """A part of a sample.

    Attributes:
        text: of its tokens, special ones included; a placeholder of media that stands many times, once.
        is_trained: whether its tokens are targets.
        tokens: their number.
    """

    text: str
    is_trained: bool
    tokens: int


def text_pieces(ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> list[TextPiece]:
    """Return a sample's text in pieces that are trained, and pieces that aren't, in turn.

    Args:
        ids: tokens of the sample, [L].
        labels: [L], not shifted; -100 where there is no target.
        tokenizer: of the model, by transformers.
    """
    found = []
    for is_trained, places in groupby(range(len(ids)), lambda place: labels[place] != IGNORE_INDEX):
        tokens = [int(ids[place]) for place in places]
        found.append(TextPiece(_text(tokens, tokenizer), bool(is_trained), len(tokens)))
    return found


def _text(tokens: Sequence[int], tokenizer: Any) -> str:
    """The text of tokens; special ones that stand many times in a row are shown once."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    parts: list[str] = []
    plain: list[int] = []
    for token, same in groupby(tokens):
        number = len(list(same))
        if token in special and number > _MANY:
            parts += [tokenizer.decode(plain), f"{tokenizer.decode([token])} × {number}"]
            plain = []
        else:
            plain += [token] * number
    return "".join([*parts, tokenizer.decode(plain)])
