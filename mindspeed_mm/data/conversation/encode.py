"""One conversation to one sample, in two steps: ids and labels without decoding any medium, then its tensors.

The first step costs a template, a tokenizer and the headers of the media; it gives the exact length of the sample, so
that batches can be planned before anything is decoded. The second one decodes, and checks the predictions of the first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.conversation.answer_ends import log_how_answers_end
from mindspeed_mm.data.conversation.records import Conversation, Message
from mindspeed_mm.data.conversation.targets import find_turns, render_prompt
from mindspeed_mm.data.conversation.templates import ChatTemplate, Turn, chat_template_of
from mindspeed_mm.data.conversation.tokens import Decoded, Tokenizer, Tokens
from mindspeed_mm.data.media.media import KINDS, Geometry, MediaRef, SampleSize
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.utils.errors import BadSample, ConfigError, MMError
from mindspeed_mm.utils.labels import IGNORE_INDEX
from mindspeed_mm.utils.text import map_texts

#: reason of the one fault that never ends a run: the row is left out, counted and logged
TOO_LONG = "longer than the length limit"

TokenSample = dict[str, torch.Tensor]


class MediaSource(Protocol):
    """The source of the media of one row."""

    def look(self, ref: MediaRef) -> Geometry:
        """Read the header of a medium."""

    def open(self, ref: MediaRef) -> Decoded:
        """Decode a medium."""


@dataclass(frozen=True)
class PlannedMedium:
    """A medium of a prepared row.

    Attributes:
        ref: the row's reference to it.
        text: the text that replaced its placeholder.
        patches, squared_patches: as in `Foreseen`.
        tensors: the decoded medium, where the text could not be predicted; None: not decoded yet.
    """

    ref: MediaRef
    text: str
    patches: int
    squared_patches: int
    tensors: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class Prepared:
    """A row without the tensors of its media.

    Attributes:
        ids, labels, types: [L] int64; labels are not shifted, -100 = no target.
        media: its media, in order.
        whole_length: tokens of the row before it was cut.
    """

    ids: np.ndarray
    labels: np.ndarray
    types: np.ndarray
    media: tuple[PlannedMedium, ...]
    whole_length: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> SampleSize:
        """Its length and the sizes of its media."""
        patches = sum(medium.patches for medium in self.media)
        return SampleSize(len(self), patches, sum(medium.squared_patches for medium in self.media))

    @property
    def media_sizes(self) -> torch.Tensor:
        """Sizes of its media: [kinds, 3] int64, a `MediaSize` for each of KINDS."""
        sizes = torch.zeros(len(KINDS), 3, dtype=torch.int64)
        for number, kind in enumerate(KINDS):
            sizes[number, 0] = int((self.types == number + 1).sum())
            for medium in self.media:
                if medium.ref.kind == kind:
                    sizes[number, 1] += medium.patches
                    sizes[number, 2] += medium.squared_patches
        return sizes


class Encoder:
    """Turns conversations into samples with a model's processor and chat template.

    Args:
        processor: The processor that `adapter.load_processor` returned.
        adapter: The model family.
        param: `dataset_param`.
        max_length: Longest sample in tokens; None means no limit.
    """

    def __init__(self, processor: Processor, adapter: DataAdapter, param: DatasetParam, max_length: int | None) -> None:
        basic, options = param.basic_parameters, param.preprocess_parameters
        path = options.model_name_or_path
        tokenizer = getattr(processor, "tokenizer", processor)
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"{path}: {type(tokenizer).__name__} is not a fast tokenizer, which exact targets need")
        image_options = {key: True for key in ("image_do_pan_and_scan", "crop_to_patches") if getattr(options, key)}
        if image_options.pop("image_do_pan_and_scan", False):
            image_options["do_pan_and_scan"] = True
        self.adapter = adapter
        self.max_length = max_length
        self.train_on_prompt = basic.train_on_prompt
        self.mask_history = basic.mask_history
        self.path = path
        self._processor, self._template_args = processor, (basic.template, basic.enable_thinking, path)
        self._template: ChatTemplate | None = None
        self._draws_frames = param.draws_frames
        self.tokenizer = Tokenizer(processor, adapter, image_options, options.split_special_tokens)
        self._types_tokens = bool(getattr(processor, "return_mm_token_type_ids", False))

    @property
    def template(self) -> ChatTemplate:
        """The chat template; plain text does without one."""
        if self._template is None:
            self._template = chat_template_of(self._processor, *self._template_args)
            log_how_answers_end(self._template)
        return self._template

    @property
    def pad_token_id(self) -> int:
        """Id that batches are padded with: the tokenizer's own, else its end token."""
        tokenizer = self.tokenizer.tokenizer
        for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if isinstance(value, int):
                return value
        raise ConfigError(f"{self.path}: the tokenizer has no padding token; give collate_param.pad_id")

    def filler(self) -> TokenSample:
        """A text of two padding tokens without targets: it stands where a batch has no row."""
        ids = torch.full((2,), self.pad_token_id, dtype=torch.int64)
        return self._typed({"input_ids": ids, "labels": torch.full_like(ids, IGNORE_INDEX)}, torch.zeros_like(ids))

    def prepare(self, conversation: Conversation, source: MediaSource, limit: int | None = None) -> list[Prepared]:
        """Return ids and labels of a row; one that is too long loses its last turns, with their media.

        Args:
            conversation: The row.
            source: Its media.
            limit: Longest sample in tokens, below `max_length`; a plain text is cut by `max_length` alone.

        Returns:
            The sample; several pieces where a plain text is longer than `max_length`.

        Raises:
            BadSample: The row can't be rendered, or has media that this model or template doesn't take; or, with the
                reason TOO_LONG, not even its first answer fits.
        """
        if conversation.is_text:
            return self._pieces(conversation)
        limit = min((length for length in (limit, self.max_length) if length is not None), default=None)
        self._check_kinds(conversation)
        media = [self._plan(ref, source, conversation.where) for ref in conversation.media]
        whole, ends = self._prepare(conversation, len(conversation.messages), media)
        if limit is None or len(whole) <= limit:
            return [whole]
        assistants = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        for index in reversed(assistants):
            if index + 1 == len(conversation.messages) or ends.get(index, 0) > limit:
                continue
            shorter, _ = self._prepare(conversation, index + 1, media)
            if len(shorter) <= limit:
                return [Prepared(shorter.ids, shorter.labels, shorter.types, shorter.media, len(whole))]
        raise BadSample(
            f"{conversation.where}: {len(whole)} tokens, not even the first answer fits into {limit}; "
            "nothing is trained",
            TOO_LONG,
        )

    def prepare_prompt(self, conversation: Conversation, source: MediaSource) -> Prepared:
        """Return the ids of a conversation up to where the next answer begins; nothing is cut, and nothing a target.

        Args:
            conversation: Its last turn isn't the assistant's.
            source: Its media.

        Raises:
            BadSample: It can't be rendered, or has media that this model or template doesn't take.
        """
        self._check_kinds(conversation)
        media = [self._plan(ref, source, conversation.where) for ref in conversation.media]
        written, tools = self._template_inputs(conversation, len(conversation.messages))
        text = render_prompt(self.template, written, tools, conversation.where)
        self._check_placeholders(text, media, conversation.where)
        tokens = self.tokenizer(text, [(medium.ref.kind, medium.text) for medium in media])
        return Prepared(tokens.ids, np.full_like(tokens.ids, IGNORE_INDEX), tokens.types, tuple(media), len(tokens.ids))

    def finish(self, prepared: Prepared, source: MediaSource, where: object) -> TokenSample:
        """Decode the media of a prepared row and put the sample together.

        Raises:
            BadSample: A medium can't be decoded, or takes another number of tokens than was predicted.
        """
        ids, types = torch.from_numpy(prepared.ids), torch.from_numpy(prepared.types)
        sample = self._typed({"input_ids": ids, "labels": torch.from_numpy(prepared.labels)}, types)
        parts: list[Mapping[str, torch.Tensor]] = []
        for is_ready, run in itertools.groupby(prepared.media, lambda medium: medium.tensors is not None):
            media = list(run)
            if is_ready:
                parts += [medium.tensors for medium in media if medium.tensors is not None]
                continue
            tensors, texts = self._process([(medium.ref, source.open(medium.ref)) for medium in media], where)
            parts.append(tensors)
            for medium, text in zip(media, texts, strict=True):
                if text != medium.text:
                    raise BadSample(
                        f"{where}: {medium.ref.kind} {medium.ref.path or '(pictures)'} takes another number of tokens "
                        f"than its header lets expect ({len(text)} characters in place of {len(medium.text)}); the "
                        "file is damaged, or changed while it was read",
                        "a medium differs from its header",
                    )
        sizes = {"media_sizes": prepared.media_sizes} if prepared.media else {}
        return {**sample, **self.tokenizer.stack(parts), **sizes}

    def _pieces(self, conversation: Conversation) -> list[Prepared]:
        """Plain text: every token is a target, the end token too; cut where the limit falls."""
        text = "".join(part for message in conversation.messages for part in message.parts if isinstance(part, str))
        ids = self.tokenizer.plain(text)
        if not len(ids):
            raise BadSample(f"{conversation.where}: the text is empty", "empty text")
        step = self.max_length or len(ids)
        return [
            Prepared(part, part.copy(), np.zeros_like(part), (), len(ids))
            for part in (ids[start : start + step] for start in range(0, len(ids), step))
        ]

    def _check_kinds(self, conversation: Conversation) -> None:
        for kind in {ref.kind for ref in conversation.media}:
            if kind == "video" and self._draws_frames:
                keys = ", ".join(f"dataset_param.{key}" for key in self._draws_frames)
                raise ConfigError(
                    f"{conversation.where}: the row has a video, and {keys} ask for frames drawn by their number, "
                    "which isn't there: frames are taken by time; remove these keys, and write "
                    "preprocess_parameters.video_fps and video_maxlen if other frames are wanted"
                )
            if kind not in self.tokenizer.reads:
                number = sum(ref.kind == kind for ref in conversation.media)
                takes = ", ".join(self.tokenizer.reads) or "text only: it has a tokenizer and no processor"
                raise BadSample(
                    f"{conversation.where}: the row has {number} {kind}(s), but the model in {self.path} takes "
                    f"{takes}; use a model that reads {kind}s, or set attr.{kind}s to null and take the tags out",
                    f"a model that doesn't read {kind}s",
                )

    def _plan(self, ref: MediaRef, source: MediaSource, where: Place) -> PlannedMedium:
        try:
            foreseen = self.tokenizer.foresee(source.look(ref))
        except ValueError as error:
            if isinstance(error, MMError):
                raise
            raise self._refused(where, ref, error) from error
        if foreseen is not None:
            return PlannedMedium(ref, foreseen.text, foreseen.patches, foreseen.squared_patches)
        tensors, (text,) = self._process([(ref, source.open(ref))], where)
        keys = self.adapter.media_keys[ref.kind]
        rows, grid = len(tensors[keys[0]]), tensors.get(keys[-1])
        groups = int(grid[0, 0]) if keys[-1].endswith("grid_thw") and grid is not None else 1
        return PlannedMedium(ref, text, rows, rows**2 // groups, tensors)

    def _process(
        self, media: Sequence[tuple[MediaRef, Decoded]], where: object
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        try:
            return self.tokenizer.process([(ref.kind, content) for ref, content in media])
        except ConfigError:
            raise
        except (ValueError, RuntimeError, TypeError) as error:
            raise self._refused(where, media[0][0], error) from error

    @staticmethod
    def _refused(where: object, ref: MediaRef, error: Exception) -> BadSample:
        name = ref.path or "(pictures)"
        return BadSample(f"{where}: the processor refuses {ref.kind} {name}: {error}", "refused by the processor")

    def _prepare(
        self, conversation: Conversation, count: int, media: Sequence[PlannedMedium]
    ) -> tuple[Prepared, dict[int, int]]:
        """Prepare the first `count` messages with their media; also return where each answer ends."""
        messages, where = conversation.messages[:count], conversation.where
        media = media[: sum(len(message.media) for message in messages)]
        written, tools = self._template_inputs(conversation, count)
        text, turns = find_turns(self.template, written, tools, where)
        self._check_placeholders(text, media, where)
        tokens = self.tokenizer(text, [(medium.ref.kind, medium.text) for medium in media])
        markers = {kind: self.template.written_for(kind) for kind in {medium.ref.kind for medium in media}}
        labels, ends = self._label(tokens, turns, messages, self.tokenizer.find_media(text, markers))
        return Prepared(tokens.ids, labels, tokens.types, tuple(media), len(tokens.ids)), ends

    def _check_placeholders(self, text: str, media: Sequence[PlannedMedium], where: Place) -> None:
        for kind in {medium.ref.kind for medium in media}:
            given, placed = sum(medium.ref.kind == kind for medium in media), self.tokenizer.count(kind, text)
            if given != placed:
                raise BadSample(
                    f"{where}: the row has {given} {kind}(s), and {self.template.name} places {placed}; "
                    "name a template that places them (basic_parameters.template)",
                    "the template doesn't place every medium",
                )

    def _label(
        self, tokens: Tokens, turns: Sequence[Turn], messages: Sequence[Message], media: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, dict[int, int]]:
        masks = {turn: (tokens.starts < turn.end) & (tokens.ends > turn.start) for turn in turns}
        trained = {turn for turn in turns if messages[turn.message].train}
        if self.mask_history:
            last = max((turn.message for turn in turns), default=-1)
            trained = {turn for turn in trained if turn.message == last}
        target = np.full(len(tokens.ids), self.train_on_prompt)
        for turn, mask in masks.items():
            target[mask] = turn in trained
        for start, end in media:  # no medium is a target, nor what the template writes around it
            target &= (tokens.starts < start) | (tokens.ends > end)
        ends = {turn.message: int(np.flatnonzero(mask)[-1]) + 1 for turn, mask in masks.items() if mask.any()}
        labels, (written, trained_end) = np.where(target, tokens.ids, IGNORE_INDEX), self._other_end
        final = [end - 1 for end in ends.values()]
        labels[final] = np.where(labels[final] == written, trained_end, labels[final])
        return labels, ends

    @functools.cached_property
    def _other_end(self) -> tuple[int, int]:
        """The token that the template writes after earlier answers, and the one that is trained there."""
        trained = self.template.end_for_earlier_turn
        if not trained:
            return IGNORE_INDEX, IGNORE_INDEX
        names = self.template.end_of_earlier_turn.strip(), trained
        written, ended = (int(self.tokenizer.tokenizer.convert_tokens_to_ids(name)) for name in names)
        return written, ended

    def _typed(self, sample: TokenSample, types: torch.Tensor) -> TokenSample:
        return {**sample, self.adapter.token_keys[0]: types} if self._types_tokens else sample

    def _template_inputs(self, conversation: Conversation, count: int) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """The first `count` messages and the tools, as the template takes them."""
        written = [self._as_template_input(message, conversation.where) for message in conversation.messages[:count]]
        return written, map_texts(conversation.tools, self.tokenizer.hide) if conversation.tools else None

    def _as_template_input(self, message: Message, where: Place) -> dict[str, Any]:
        hide, template = self.tokenizer.hide, self.template
        if message.media:
            if not template.takes_parts:
                raise BadSample(
                    f"{where}: {template.name} can't place media; it takes text only",
                    "the template doesn't place every medium",
                )
            content: Any = [
                {"type": "text", "text": hide(part)} if isinstance(part, str) else {"type": part.kind}
                for part in message.parts
            ]
        else:
            content = template.content("".join(hide(part) for part in message.parts if isinstance(part, str)))
        return {"role": message.role, "content": content, **map_texts(message.extra, hide)}
