"""One conversation to one sample: rendered, tokenised, labelled, and cut at whole turns if it is too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.files import Place
from mindspeed_mm.data.records import Conversation, ImageRef, Message
from mindspeed_mm.data.targets import Turn, find_turns
from mindspeed_mm.data.templates import ChatTemplate, chat_template_of
from mindspeed_mm.data.tokens import Tokenizer, Tokens
from mindspeed_mm.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL import Image

IGNORE_INDEX = -100

Sample = dict[str, torch.Tensor]


@dataclass
class Encoded:
    """A sample, and for each assistant message the number of tokens up to the end of its target."""

    sample: Sample
    ends: dict[int, int]

    def __len__(self) -> int:
        return len(self.sample["input_ids"])


class Encoder:
    """Turns conversations into samples with a model's processor and chat template.

    Args:
        processor: What `adapter.load_processor` returned.
        adapter: The model family.
        param: `dataset_param`.
        max_length: Longest sample in tokens; None means no limit.
    """

    def __init__(self, processor: Any, adapter: DataAdapter, param: DatasetParam, max_length: int | None) -> None:
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
        self.template: ChatTemplate = chat_template_of(processor, basic.template, basic.enable_thinking, path)
        self.tokenizer = Tokenizer(processor, image_options, options.split_special_tokens)
        self._media_ids = self.tokenizer.media_ids
        self._media_keys = [key for keys in adapter.media_keys.values() for key in keys]
        self._types_tokens = bool(getattr(processor, "return_mm_token_type_ids", False))

    @property
    def pad_token_id(self) -> int:
        """Id that batches are padded with: the tokenizer's own, else its end token."""
        tokenizer = self.tokenizer.tokenizer
        for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if isinstance(value, int):
                return value
        raise ConfigError(f"{self.path}: the tokenizer has no padding token; give collate_param.pad_id")

    def filler(self) -> Sample:
        """A text of two padding tokens without targets: it stands where a batch has no row."""
        ids = torch.full((2,), self.pad_token_id, dtype=torch.int64)
        return self._typed({"input_ids": ids, "labels": torch.full_like(ids, IGNORE_INDEX)}, torch.zeros_like(ids))

    def encode(
        self, conversation: Conversation, load_image: Callable[[ImageRef], Image.Image]
    ) -> tuple[Sample | None, int]:
        """Encode a conversation; if it is longer than `max_length`, without its last turns (and their images).

        Args:
            conversation: The row.
            load_image: Opens an image of the row.

        Returns:
            The sample (None if not even the first answer fits), and the length of the whole conversation in tokens.

        Raises:
            DataError: The row can't be rendered, or has images for a model without an image processor.
        """
        refs = conversation.images
        if refs and not self.tokenizer.reads_images:
            raise DataError(
                f"{conversation.where}: the row has {len(refs)} image(s), but {self.path} has a tokenizer only and "
                "no image processor; use a model that reads images, or set attr.images to null and take the tags out"
            )
        pictures = [load_image(ref) for ref in refs]
        whole = self._encode(conversation, len(conversation.messages), pictures)
        if self.max_length is None or len(whole) <= self.max_length:
            return whole.sample, len(whole)
        assistants = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        for index in reversed(assistants):
            if index + 1 == len(conversation.messages) or whole.ends.get(index, 0) > self.max_length:
                continue
            shorter = self._encode(conversation, index + 1, pictures)
            if len(shorter) <= self.max_length:
                return shorter.sample, len(whole)
        return None, len(whole)

    def _encode(self, conversation: Conversation, count: int, pictures: Sequence[Image.Image]) -> Encoded:
        """Encode the first `count` messages, with as many of the pictures as they hold."""
        messages = conversation.messages[:count]
        pictures = pictures[: sum(len(message.images) for message in messages)]
        written = [self._as_template_input(message, conversation.where) for message in messages]
        tools = _map_texts(conversation.tools, self.tokenizer.hide) if conversation.tools else None
        text, turns = find_turns(self.template, written, tools, conversation.where)
        try:
            tokens = self.tokenizer(text, pictures)
        except (ValueError, RuntimeError, TypeError) as error:
            raise DataError(f"{conversation.where}: the processor refuses this row: {error}") from error
        return self._label(tokens, turns, messages)

    def _label(self, tokens: Tokens, turns: Sequence[Turn], messages: Sequence[Message]) -> Encoded:
        masks = {turn: (tokens.starts < turn.end) & (tokens.ends > turn.start) for turn in turns}
        trained = {turn for turn in turns if messages[turn.message].train}
        if self.mask_history:
            last = max((turn.message for turn in turns), default=-1)
            trained = {turn for turn in trained if turn.message == last}
        target = np.full(len(tokens.ids), self.train_on_prompt)
        for turn, mask in masks.items():
            target[mask] = turn in trained
        for media_id in self._media_ids:
            target &= tokens.ids != media_id
        ids = torch.from_numpy(tokens.ids)
        labels = torch.where(torch.from_numpy(target), ids, IGNORE_INDEX)
        media = {key: tokens.media[key] for key in self._media_keys if key in tokens.media}
        sample = self._typed({"input_ids": ids, "labels": labels, **media}, torch.from_numpy(tokens.types))
        ends = {turn.message: int(np.flatnonzero(mask)[-1]) + 1 for turn, mask in masks.items() if mask.any()}
        return Encoded(sample, ends)

    def _typed(self, sample: Sample, types: torch.Tensor) -> Sample:
        return {**sample, "mm_token_type_ids": types} if self._types_tokens else sample

    def _as_template_input(self, message: Message, where: Place) -> dict[str, Any]:
        hide, template = self.tokenizer.hide, self.template
        if message.images:
            if not template.takes_parts:
                raise DataError(f"{where}: {template.name} can't place images; it takes text only")
            content: Any = [
                {"type": "text", "text": hide(part)} if isinstance(part, str) else {"type": "image"}
                for part in message.parts
            ]
        else:
            content = template.content("".join(hide(part) for part in message.parts if isinstance(part, str)))
        return {"role": message.role, "content": content, **_map_texts(message.extra, hide)}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text inside a JSON value."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return value
