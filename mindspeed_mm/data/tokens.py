"""Rendered text and pictures to token ids with character positions, equal to the processor's own result."""

from __future__ import annotations

import itertools
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

Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # ids, starts, ends, types, each [L] int64


@dataclass
class Tokens:
    """A tokenised text.

    Attributes:
        ids: [L] int64.
        starts: [L] int64, first character of each token in the text before media were expanded.
        ends: [L] int64, one past its last character.
        types: [L] int64, 0 for text, 1 for image, 2 for video, 3 for audio tokens.
        media: Tensors of the media, as the processor names them; empty without media.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    types: np.ndarray
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
        self._kinds: dict[int, int] = {}
        for kind, name in enumerate(("image", "video", "audio"), start=1):
            found = [
                getattr(processor, f"{name}_token_id", None),
                *(getattr(processor, f"{name}_token_ids", None) or []),
            ]
            self._kinds.update({token: kind for token in found if isinstance(token, int)})

    @property
    def media_ids(self) -> list[int]:
        """Ids of the tokens that media are replaced by."""
        return sorted(self._kinds)

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
            ids, starts, ends, types = parts[number]
            whole.append((ids, starts + base, ends + base, types))
            base += len(segment)
            if number < len(literals):
                ids = self._as_text(self._literal[literals[number]])
                whole.append((ids, np.full_like(ids, base), np.full_like(ids, base + 1), np.zeros_like(ids)))
                base += 1
        ids, starts, ends, types = (np.concatenate(column) for column in zip(*whole, strict=True))
        return Tokens(ids, starts, ends, types, media)

    def _types(self, ids: np.ndarray) -> np.ndarray:
        types = np.zeros_like(ids)
        for token, kind in self._kinds.items():
            types[ids == token] = kind
        return types

    def _adds_specials(self, segments: Sequence[str]) -> bool:
        """As transformers does: a processor lets its tokenizer add them unless the template wrote the first one."""
        if self.processor is self.tokenizer or len(segments) > 1:
            return False
        bos = self.tokenizer.bos_token
        return bos is None or not segments[0].startswith(bos)

    def _plain(self, segments: Sequence[str]) -> list[Columns]:
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
        if self._fast is None:
            self._fast = self._parts_agree(segments, pictures)
        return (self._by_parts if self._fast else self._by_processor)(segments, pictures)

    def _by_processor(self, segments: Sequence[str], pictures: Sequence[Image.Image]) -> tuple[list, dict[str, Any]]:
        text_options = {"return_offsets_mapping": True, "add_special_tokens": self._adds_specials(segments)}
        result = self.processor(
            text=list(segments),
            images=list(pictures),
            return_text_replacement_offsets=True,
            text_kwargs=text_options,
            images_kwargs=self._image_options,
        )
        moves = [
            [(move["span"], move["replacement"]) for move in moves] for moves in result["text_replacement_offsets"]
        ]
        columns = map(_columns, result["input_ids"], result["offset_mapping"])
        parts = [_unexpanded(part, move) for part, move in zip(columns, moves, strict=True)]
        for number, own in enumerate(result.get("mm_token_type_ids", [])):
            parts[number] = (*parts[number][:3], np.asarray(own, dtype=np.int64))
        return parts, {key: value for key, value in result.items() if isinstance(value, torch.Tensor)}

    def _by_parts(self, segments: Sequence[str], pictures: Sequence[Image.Image]) -> tuple[list, dict[str, Any]]:
        media = self.processor.image_processor(list(pictures), **self._image_options)
        written = iter([self._image_text(media, number) for number in range(len(pictures))])
        token = self.processor.image_token
        expanded, moves = [], []
        for segment in segments:
            between = segment.split(token)
            texts = [next(written) for _ in between[1:]]
            expanded.append("".join(itertools.chain.from_iterable(zip(between, [*texts, ""], strict=True))))
            places = [match.span() for match in re.finditer(re.escape(token), segment)]
            moves.append(list(zip(places, texts, strict=True)))
        parts = [_unexpanded(columns, move) for columns, move in zip(self._plain(expanded), moves, strict=True)]
        return [(ids, starts, ends, self._types(ids)) for ids, starts, ends, _ in parts], dict(media)

    def _image_text(self, media: Mapping[str, Any], number: int) -> str:
        """What the image token is replaced by for one image."""
        if hasattr(self.processor, "replace_image_token"):
            return self.processor.replace_image_token(media, image_idx=number)
        merged = self.processor.image_processor.merge_size**2
        return self.processor.image_token * (int(media["image_grid_thw"][number].prod()) // merged)

    def _parts_agree(self, segments: Sequence[str], pictures: Sequence[Image.Image]) -> bool:
        """Whether the processor's parts, called directly, give what the whole processor gives."""
        whole = self.processor(text=list(segments), images=list(pictures), images_kwargs=self._image_options)
        try:
            parts, media = self._by_parts(segments, pictures)
        except Exception:  # a processor built in another way: it is called whole
            return False
        if not all(ids.tolist() == list(own) for (ids, *_), own in zip(parts, whole["input_ids"], strict=True)):
            return False
        types = whole.get("mm_token_type_ids")
        if types is not None and [own.tolist() for *_, own in parts] != [list(own) for own in types]:
            return False
        tensors = {key: value for key, value in whole.items() if isinstance(value, torch.Tensor)}
        return tensors.keys() == media.keys() and all(torch.equal(tensors[key], media[key]) for key in media)


def _columns(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Columns:
    table = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = table[:, 0].copy(), table[:, 1]
    # Tokens of trimmed space get an empty span at its end: they stand for the character before it.
    empty = (starts == ends) & (ends > 0)
    starts[empty] -= 1
    return np.asarray(ids, dtype=np.int64), starts, ends, np.zeros_like(starts)


def _unexpanded(columns: Columns, moves: Sequence[tuple[tuple[int, int], str]]) -> Columns:
    """Bring positions in a text with expanded media back to the text before.

    Args:
        columns: Ids, starts and ends in the expanded text, types.
        moves: For each medium, its span in the text before and the text written there.
    """
    ids, starts, ends, types = columns
    if not moves:
        return columns
    old = np.asarray([span for span, _ in moves], dtype=np.int64)
    growth = np.cumsum([len(text) - (span[1] - span[0]) for span, text in moves])
    new_ends = old[:, 1] + growth
    new_starts = old[:, 0] + np.concatenate(([0], growth[:-1]))
    passed = np.searchsorted(new_ends, starts, side="right")  # media that end before a token
    shift = np.concatenate(([0], growth))[passed]
    at = np.minimum(passed, len(old) - 1)
    inside = (passed < len(old)) & (starts >= new_starts[at])
    return ids, np.where(inside, old[at, 0], starts - shift), np.where(inside, old[at, 1], ends - shift), types
