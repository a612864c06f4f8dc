"""Tokenise rendered text and media into ids with character positions, equal to the processor's own result."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.media.media import KINDS, DecodedVideo, Foreseen, Geometry, MediaKind
from mindspeed_mm.data.media.stacking import as_tensor, stack_media
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.versions import installed_version

if TYPE_CHECKING:
    from PIL import Image

# A special token in the text of a message is ordinary content: while the text is rendered and its turns are found, a
# private character replaces it, so that it isn't mistaken for a marker of the template. Afterwards it is restored, or,
# where it has to stay text, tokenised as plain text.
_FIRST_PRIVATE = 0xF0000

TokenColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # ids, starts, ends, types, each [L] int64
Move = tuple[tuple[int, int], str]  # a placeholder's span in the text before, and its replacement
#: a decoded medium: a picture, a clip, or a sound of [samples] float32
Decoded: TypeAlias = "Image.Image | DecodedVideo | np.ndarray"

_ARGUMENTS: Mapping[MediaKind, tuple[str, str]] = {
    "image": ("images", "images_kwargs"),
    "video": ("videos", "videos_kwargs"),
    "audio": ("audio", "audio_kwargs"),
}


@dataclass
class Tokens:
    """A tokenised text.

    Attributes:
        ids: [L] int64.
        starts: [L] int64, first character of each token in the text before media were expanded.
        ends: [L] int64, one past its last character.
        types: [L] int64, 0 for text, 1 for image, 2 for video, 3 for audio tokens.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    types: np.ndarray


class Tokenizer:
    """Tokenises rendered conversations through a processor or a plain (fast) tokenizer.

    Args:
        processor: The model's processor, or a tokenizer.
        adapter: The model family.
        image_options: Extra arguments for the image processor.
        split_special_tokens: Whether special tokens in messages are split like ordinary text; media tokens always
            are, since no medium belongs to them.
    """

    def __init__(
        self,
        processor: Processor,
        adapter: DataAdapter,
        image_options: Mapping[str, Any],
        split_special_tokens: bool = False,
    ) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.adapter = adapter
        self.reads = adapter.reads(processor)
        self._image_options = dict(image_options)
        self._backend = self.tokenizer.backend_tokenizer
        self._media_tokens: dict[MediaKind, Any] = {kind: getattr(processor, f"{kind}_token", None) for kind in KINDS}
        spelt_out = {token for token in self._media_tokens.values() if isinstance(token, str)}
        spelt_out |= {
            self.tokenizer.convert_ids_to_tokens(number)
            for kind in self.reads
            for number in media_token_ids(processor, kind)
        }
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        ordered = sorted(spelt_out | special, key=len, reverse=True)
        self._private = {literal: chr(_FIRST_PRIVATE + number) for number, literal in enumerate(ordered)}
        self._literal = {private: literal for literal, private in self._private.items()}
        self._typed = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        text = [self._private[token] for token in (spelt_out | special if split_special_tokens else spelt_out)]
        self._hidden = re.compile(f"([{''.join(text)}])" if text else "(?!)")
        groups = [f"(?P<{kind}>{re.escape(self._media_tokens[kind])})" for kind in self.reads]
        groups += [f"(?P<typed>[{''.join(self._literal)}])"] if self._literal else []
        self._placeholder = re.compile("|".join(groups) or "(?!)")
        self._trusted: dict[MediaKind, bool] = {}
        self._kinds: dict[int, int] = {}
        for number, kind in enumerate(KINDS, start=1):
            self._kinds.update(dict.fromkeys(media_token_ids(processor, kind), number))

    @property
    def media_ids(self) -> list[int]:
        """Ids of the tokens that replace media."""
        return sorted(self._kinds)

    def hide(self, text: str) -> str:
        """Replace the special tokens in the text of a message by private characters."""
        return self._typed.sub(lambda match: self._private[match.group()], text) if self._typed.search(text) else text

    def count(self, kind: MediaKind, text: str) -> int:
        """Return how many placeholders of a kind a rendered text has."""
        return sum(match.lastgroup == kind for match in self._placeholder.finditer(text))

    def find_media(self, text: str, written: Mapping[MediaKind, str]) -> list[tuple[int, int]]:
        """Return the spans [start, end) of media in a rendered text, the marks around them included.

        Args:
            text: As in `__call__`.
            written: Kind → the text that the template writes for a medium; numbers in it match any ("Audio 1: ").
        """
        spans = []
        for kind, whole in written.items():
            placeholder = self._media_tokens[kind] or ""
            before, found, after = whole.partition(placeholder)
            around = [re.sub(r"\d+", r"\\d+", re.escape(mark if found else "")) for mark in (before, after)]
            pattern = f"(?:{around[0]})?{re.escape(placeholder)}(?:{around[1]})?"
            spans += [match.span() for match in re.finditer(pattern, text)]
        return spans

    def foresee(self, geometry: Geometry) -> Foreseen | None:
        """Predict the tokens of a medium; None where this processor needs the medium itself.

        Raises:
            ValueError: The processor refuses a medium of this geometry.
        """
        kind = geometry.kind
        if kind not in self._trusted:
            self._trusted[kind] = self._is_right(kind)
        return self.adapter.foresee(self.processor, geometry) if self._trusted[kind] else None

    def plain(self, text: str) -> np.ndarray:
        """Return the ids of a text without a template, [L] int64: the tokenizer's own, and its end token behind them.

        Tokens that the tokenizer adds to every text by itself (Gemma's `<bos>`) are included, also without a processor;
        the end token comes once, whether the tokenizer adds it, the text ends with it, or neither.
        """
        ids, end = self(self.hide(text), specials=True).ids, self.tokenizer.eos_token_id
        return ids if end is None or (len(ids) and ids[-1] == end) else np.append(ids, end)

    def __call__(self, text: str, media: Sequence[tuple[MediaKind, str]] = (), specials: bool | None = None) -> Tokens:
        """Tokenise a rendered text.

        Args:
            text: The rendered text; special tokens of messages are hidden.
            media: Kind and replacing text of each medium, in their order; of each kind there are as many as the text
                has placeholders.
            specials: Whether the tokenizer adds its special tokens around the text; None: as transformers does for
                rendered text.
        """
        pieces = self._hidden.split(text)
        segments, literals = pieces[::2], pieces[1::2]
        waiting: dict[str, list[str]] = defaultdict(list)
        for kind, written in media:
            waiting[kind].append(written)
        supply = {kind: iter(texts) for kind, texts in waiting.items()}
        expanded, moves = [], []
        for segment in segments:
            found = [
                (
                    match.span(),
                    next(supply[kind]) if kind in supply else self._literal.get(match.group(), match.group()),
                )
                for match in self._placeholder.finditer(segment)
                for kind in (match.lastgroup or "",)
            ]
            expanded.append(_expand(segment, found))
            moves.append(found)
        encoded = self._encode(expanded, specials)
        parts = [_unexpanded(columns, move) for columns, move in zip(encoded, moves, strict=True)]
        base, whole = 0, []
        for number, segment in enumerate(segments):
            ids, starts, ends, types = parts[number]
            whole.append((ids, starts + base, ends + base, types))
            base += len(segment)
            if number < len(literals):
                ids = self._as_text(self._literal[literals[number]])
                whole.append((ids, np.full_like(ids, base), np.full_like(ids, base + 1), np.zeros_like(ids)))
                base += 1
        tokens = Tokens(*(np.concatenate(column) for column in zip(*whole, strict=True)))
        tokens.types = self._types(tokens.ids)
        return tokens

    def process(self, media: Sequence[tuple[MediaKind, Decoded]]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Convert decoded media to tensors.

        Args:
            media: Kind and content (PIL image, DecodedVideo, or [samples] float32) of each, in order.

        Returns:
            The processor's tensors, those of each kind stacked in order; and for each medium the text that its
            placeholder is replaced by.

        Raises:
            ConfigError: The processor doesn't return the text that replaces a medium.
            ValueError, RuntimeError, TypeError: As the processor raises them.
        """
        if self.adapter.one_at_a_time:
            calls = [[number] for number in range(len(media))]
        else:
            ordered = [number for kind in self.reads for number, (own, _) in enumerate(media) if own == kind]
            calls = [list(run) for _, run in itertools.groupby(ordered, lambda number: self._call_of(*media[number]))]
        parts, texts = [], [""] * len(media)
        for numbers in filter(None, calls):
            found, written = self._process(media[numbers[0]][0], [media[number][1] for number in numbers])
            parts.append(found)
            for number, text in zip(numbers, written, strict=True):
                texts[number] = text
        return self.stack(parts), texts

    def _call_of(self, kind: MediaKind, content: Decoded) -> tuple[MediaKind, dict[str, Any]]:
        """The group key of media that the processor gets in one call."""
        return kind, self.adapter.video_options(content) if kind == "video" else {}

    def stack(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Concatenate media tensors in the order of the row."""
        return stack_media(parts, (key for part in parts for key in part), self.adapter.padded_keys)

    def _process(self, kind: MediaKind, items: Sequence[Decoded]) -> tuple[dict[str, torch.Tensor], list[str]]:
        if kind == "image" and self._trusted.get(kind) and hasattr(self.processor, "_process_images"):
            # the images alone: the rest of the processor's work isn't needed
            output, texts = self.processor._process_images(list(items), **self._image_call())
            return self._tensors(kind, output), texts
        result = self._whole([(self._media_tokens[kind] or "") * len(items)], {kind: items})
        moves = result.get("text_replacement_offsets")
        if moves is None:
            raise ConfigError(
                f"{type(self.processor).__name__} of transformers {installed_version('transformers')} doesn't say what "
                f"it writes for {kind}s (text_replacement_offsets), which exact labels need; a newer transformers may "
                "have one that does"
            )
        return self._tensors(kind, result), [move["replacement"] for move in moves[0]]

    def _tensors(self, kind: MediaKind, output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        known = self.adapter.media_keys[kind]
        return {key: as_tensor(output[key]) for key in known if output.get(key) is not None}

    def _whole(self, text: list[str], media: Mapping[MediaKind, Sequence[Decoded]]) -> Any:
        """Call the whole processor."""
        arguments: dict[str, Any] = {}
        for kind, items in media.items():
            name, options_name = _ARGUMENTS[kind]
            options: dict[str, Any] = self._image_call() if kind == "image" else {}
            if kind == "video":
                options = {"do_sample_frames": False, "video_metadata": self._metadata(items)}
                options |= self.adapter.video_options(items[0])
                items = [clip.frames for clip in items]
            if kind == "audio":
                options["sampling_rate"] = self.adapter.limits(self.processor).sampling_rate
            arguments |= {name: list(items), options_name: options}
        return self.processor(text=text, return_text_replacement_offsets=True, **arguments)

    def _image_call(self) -> dict[str, Any]:
        """Explicit arguments for images: before transformers 5.23 a processor ignores its own `images_kwargs`."""
        return {**(getattr(self.processor, "images_kwargs", None) or {}), **self._image_options}

    def _metadata(self, clips: Sequence[DecodedVideo]) -> list[Any]:
        from transformers.video_utils import VideoMetadata

        return [VideoMetadata(**self.adapter.video_metadata(clip)) for clip in clips]

    def _is_right(self, kind: MediaKind) -> bool:
        """Whether predictions for this kind equal the results of the whole processor.

        Raises:
            ConfigError: The processor returns other ids for a text than its tokenizer for the expanded text.
        """
        sample, geometry = _specimen(kind, self.adapter.limits(self.processor).sampling_rate)
        for copies in (2, 1):  # some processors take one medium a text
            text = f"one {self._media_tokens[kind]} two {(self._media_tokens[kind] or '') * (copies - 1)}\n"
            try:
                whole = self._whole([text], {kind: [sample] * copies})
                written = [move["replacement"] for move in whole["text_replacement_offsets"][0]]
                break
            except Exception:  # this processor refuses specimens: real media are decoded to be measured
                if copies == 1:
                    return False
        tokens, types = self(text, [(kind, own) for own in written]), whole.get(self.adapter.token_keys[0])
        if tokens.ids.tolist() != list(whole["input_ids"][0]) or (
            types is not None and tokens.types.tolist() != list(types[0])
        ):
            raise ConfigError(
                f"{type(self.processor).__name__} makes other token ids of a text with {kind}s than its tokenizer "
                "makes of the same text with its placeholders replaced: exact labels aren't possible with it"
            )
        try:
            foreseen = self.adapter.foresee(self.processor, geometry)
        except Exception:
            return False
        if foreseen is None or written != [foreseen.text] * copies:
            return False
        rows = foreseen.patches if foreseen.rows is None else foreseen.rows
        return kind == "audio" or len(whole[self.adapter.media_keys[kind][0]]) == copies * rows

    def _types(self, ids: np.ndarray) -> np.ndarray:
        if getattr(
            self.processor, "return_mm_token_type_ids", False
        ):  # by the processor's own rule: GLM's depends on the context
            return np.asarray(self.processor.create_mm_token_type_ids([ids.tolist()])[0], dtype=np.int64)
        types = np.zeros_like(ids)
        for token, kind in self._kinds.items():
            types[ids == token] = kind
        return types

    def _adds_specials(self, text: str) -> bool:
        """Whether special tokens are added: in transformers by processors, unless the template wrote the first one."""
        if self.processor is self.tokenizer:
            return False
        bos = self.tokenizer.bos_token
        return bos is None or not text.startswith(bos)

    def _encode(self, segments: Sequence[str], specials: bool | None) -> list[TokenColumns]:
        if (
            self._backend.truncation is not None
        ):  # it is changed by no call that has nothing to change: threads share it
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        encodings = [self._backend.encode(segment, add_special_tokens=False) for segment in segments]
        parts = [_columns(encoding.ids, encoding.offsets) for encoding in encodings]
        specials = self._adds_specials(segments[0]) if specials is None else specials
        before, after = self._around if specials else ([], [])
        if before:
            parts[0] = _joined(_columns(before, [(0, 0)] * len(before)), parts[0])
        if after:
            end = len(segments[-1]) + 1  # behind every target
            parts[-1] = _joined(parts[-1], _columns(after, [(end, end)] * len(after)))
        return parts

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer adds before and after a text by itself."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]

    def _as_text(self, literal: str) -> np.ndarray:
        # No added token is recognised when it is cut after its first character.
        ids = [self._backend.encode(part, add_special_tokens=False).ids for part in (literal[:1], literal[1:])]
        return np.asarray([token for part in ids for token in part], dtype=np.int64)


def media_token_ids(processor: Processor, kind: MediaKind) -> list[int]:
    """Return the ids of the tokens that a processor writes for a medium; empty where it has none of that kind."""
    found = getattr(processor, f"{kind}_token_ids", None) or getattr(processor, f"{kind}_token_id", None)
    found = found if isinstance(found, (list, tuple)) else [found]  # a tokenizer returns a number for both
    return [token for token in found if isinstance(token, int)]


def _specimen(kind: MediaKind, sampling_rate: int) -> tuple[Decoded, Geometry]:
    """A small medium of odd sizes, and its geometry."""
    if kind == "image":
        from PIL import Image

        return Image.new("RGB", (61, 45), (90, 120, 30)), Geometry("image", 45, 61)
    if kind == "video":
        clip = DecodedVideo(np.zeros((4, 45, 61, 3), dtype=np.uint8), (0.0, 0.5, 1.0, 1.5), 2.0, 2.0, 4)
        return clip, Geometry("video", 45, 61, frames=4, fps=2.0)
    samples = sampling_rate + 37
    return np.zeros(samples, dtype=np.float32), Geometry("audio", samples=samples)


def _expand(segment: str, moves: Sequence[Move]) -> str:
    written, at = [], 0
    for (start, end), text in moves:
        written += [segment[at:start], text]
        at = end
    return "".join((*written, segment[at:]))


def _joined(first: TokenColumns, second: TokenColumns) -> TokenColumns:
    ids, starts, ends, types = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    return ids, starts, ends, types


def _columns(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> TokenColumns:
    table = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = table[:, 0].copy(), table[:, 1]
    # Tokens of trimmed space have an empty span at its end: give them the character before it.
    empty = (starts == ends) & (ends > 0)
    starts[empty] -= 1
    return np.asarray(ids, dtype=np.int64), starts, ends, np.zeros_like(starts)


def _unexpanded(columns: TokenColumns, moves: Sequence[Move]) -> TokenColumns:
    """Map positions in a text with expanded media to the text before."""
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
