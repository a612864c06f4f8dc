"""Rendered text and pictures to token ids with character positions, equal to the processor's own result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL import Image

# A special token that a person typed stands for itself: while the text is rendered, a private character takes its
# place, and its tokens are made of the plain text afterwards.
_FIRST_PRIVATE = 0xF0000


@dataclass
class Tokens:
    """A tokenised text.

    Attributes:
        ids: [L] int64.
        starts: [L] int64, first character of each token in the text before media were expanded.
        ends: [L] int64, one past its last character.
        media: Tensors of the media, as the processor names them; empty without media.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    media: dict[str, torch.Tensor]


class Tokenizer:
    """Tokenises rendered conversations through a processor or a plain (fast) tokenizer.

    Args:
        processor: The model's processor, or a tokenizer.
        image_options: Extra arguments for the image processor.
        split_special_tokens: Whether every special token that a person typed is split like ordinary text; media
            tokens always are, since no medium belongs to them.
    """

    def __init__(self, processor: Any, image_options: Mapping[str, Any], split_special_tokens: bool = False) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.reads_images = getattr(processor, "image_processor", None) is not None
        self._image_options = dict(image_options)
        self._backend = self.tokenizer.backend_tokenizer
        media = [getattr(processor, f"{name}_token", None) for name in ("image", "video", "audio")]
        literals = {token for token in media if isinstance(token, str)}
        if split_special_tokens:
            literals |= {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        ordered = sorted(literals, key=len, reverse=True)
        self._private = {literal: chr(_FIRST_PRIVATE + number) for number, literal in enumerate(ordered)}
        self._literal = {private: literal for literal, private in self._private.items()}
        self._typed = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._hidden = re.compile(f"([{''.join(self._literal)}])" if self._literal else "(?!)")
        self._fast: bool | None = None

    @property
    def media_ids(self) -> list[int]:
        """Ids of the tokens that media are replaced by."""
        found: list[int] = []
        for name in ("image", "video", "audio"):
            one = getattr(self.processor, f"{name}_token_id", None)
            several = getattr(self.processor, f"{name}_token_ids", None)
            found += [one] if isinstance(one, int) else []
            found += [token for token in several or [] if isinstance(token, int)]
        return sorted(set(found))

    def hide(self, text: str) -> str:
        """Put private characters for the special tokens that a person typed into a message."""
        return self._typed.sub(lambda match: self._private[match.group()], text) if self._typed.search(text) else text

    def __call__(self, text: str, pictures: Sequence[Image.Image] = ()) -> Tokens:
        """Tokenise a rendered text; every image token in it takes the next picture."""
        pieces = self._hidden.split(text)
        segments, literals = pieces[::2], pieces[1::2]
        parts, media = self._with_images(segments, pictures) if pictures else (self._plain(segments), {})
        base, whole = 0, []
        for number, segment in enumerate(segments):
            ids, starts, ends = parts[number]
            whole.append((ids, starts + base, ends + base))
            base += len(segment)
            if number < len(literals):
                ids = self._as_text(self._literal[literals[number]])
                whole.append((ids, np.full(len(ids), base), np.full(len(ids), base + 1)))
                base += 1
        ids, starts, ends = (np.concatenate(column).astype(np.int64) for column in zip(*whole, strict=True))
        return Tokens(ids, starts, ends, media)

    def _adds_specials(self, segments: Sequence[str]) -> bool:
        """As transformers does: a processor lets its tokenizer add them unless the template wrote the first one."""
        if self.processor is self.tokenizer or len(segments) > 1:
            return False
        bos = self.tokenizer.bos_token
        return bos is None or not segments[0].startswith(bos)

    def _plain(self, segments: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        self._backend.no_truncation()
        self._backend.no_padding()
        adds = self._adds_specials(segments)
        encodings = [self._backend.encode(segment, add_special_tokens=adds) for segment in segments]
        return [_columns(encoding.ids, encoding.offsets) for encoding in encodings]

    def _as_text(self, literal: str) -> np.ndarray:
        # No added token survives being cut after its first character.
        ids = [self._backend.encode(part, add_special_tokens=False).ids for part in (literal[:1], literal[1:])]
        return np.asarray([token for part in ids for token in part], dtype=np.int64)

    def _with_images(self, segments: Sequence[str], pictures: Sequence[Image.Image]) -> tuple[list, dict[str, Any]]:
        """The processor's result; its parts are called directly once they have been seen to give the same."""
        if self._fast:
            return self._by_parts(segments, pictures)
        whole = self._by_processor(segments, pictures)
        if self._fast is None:
            self._fast = self._agrees(whole, segments, pictures)
        return whole

    def _by_processor(self, segments: Sequence[str], pictures: Sequence[Image.Image]) -> tuple[list, dict[str, Any]]:
        text_options = {"return_offsets_mapping": True, "add_special_tokens": self._adds_specials(segments)}
        result = self.processor(
            text=list(segments),
            images=list(pictures),
            return_text_replacement_offsets=True,
            text_kwargs=text_options,
            images_kwargs=self._image_options,
        )
        moves = result["text_replacement_offsets"]
        parts = [
            _unexpanded(_columns(ids, offsets), move)
            for ids, offsets, move in zip(result["input_ids"], result["offset_mapping"], moves, strict=True)
        ]
        return parts, {key: value for key, value in result.items() if isinstance(value, torch.Tensor)}

    def _by_parts(self, segments: Sequence[str], pictures: Sequence[Image.Image]) -> tuple[list, dict[str, Any]]:
        media = self.processor.image_processor(list(pictures), **self._image_options)
        written = [self.processor.replace_image_token(media, image_idx=number) for number in range(len(pictures))]
        expanded, moves = self.processor.get_text_with_replacements(list(segments), written)
        parts = [_unexpanded(columns, move) for columns, move in zip(self._plain(expanded), moves, strict=True)]
        return parts, dict(media)

    def _agrees(self, whole: tuple[list, dict[str, Any]], segments: Sequence[str], pictures: Sequence[Image.Image]) -> bool:
        try:
            parts, media = self._by_parts(segments, pictures)
        except Exception:  # a processor built in another way: it is called whole
            return False
        same_text = all(np.array_equal(a, b) for x, y in zip(whole[0], parts, strict=True) for a, b in zip(x, y, strict=True))
        same_keys = whole[1].keys() == media.keys()
        return same_text and same_keys and all(torch.equal(value, whole[1][key]) for key, value in media.items())


def _columns(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = table[:, 0].copy(), table[:, 1]
    # Tokens of trimmed space get an empty span at its end: they stand for the character before it.
    empty = (starts == ends) & (ends > 0)
    starts[empty] -= 1
    return np.asarray(ids, dtype=np.int64), starts, ends


def _unexpanded(columns: tuple[np.ndarray, ...], moves: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, ...]:
    """Bring positions in the text with expanded media back to the text before."""
    ids, starts, ends = columns
    if not moves:
        return columns
    news = np.asarray([move["new_span"] for move in moves], dtype=np.int64)
    olds = np.asarray([move["span"] for move in moves], dtype=np.int64)
    new_starts, new_ends = starts.copy(), ends.copy()
    after = np.searchsorted(news[:, 1], starts, side="right")  # media that end before each token
    shift = np.concatenate(([0], olds[:, 1] - news[:, 1]))[after]
    new_starts += shift
    new_ends += shift
    inside = (after < len(news)) & (starts >= news[np.minimum(after, len(news) - 1), 0])
    new_starts[inside], new_ends[inside] = olds[after[inside], 0], olds[after[inside], 1]
    return ids, new_starts, new_ends
