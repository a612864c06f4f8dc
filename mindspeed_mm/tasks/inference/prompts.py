"""Requests as inputs of a model: the ids and media tensors that training makes of the same conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.conversation.encode import Encoder, Prepared, TokenSample
from mindspeed_mm.data.conversation.stop_tokens import stop_tokens
from mindspeed_mm.data.loading.dataset import LazyEncoder, RowMedia
from mindspeed_mm.data.loading.model_match import check_model_match
from mindspeed_mm.data.media.media import MediaKind
from mindspeed_mm.data.media.stacking import stack_media
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.tasks.inference.requests import AnswerRequest


@dataclass(frozen=True)
class PromptSize:
    """What batches are planned by.

    Attributes:
        tokens: length of the prompt.
        kinds: kinds of its media, each once.
    """

    tokens: int
    kinds: tuple[MediaKind, ...] = ()


class PromptEncoder:
    """Encodes requests with a model's processor and chat template, as training data are.

    Args:
        param: processor, template and limits of media.
        adapter: the model family.
        encoder: a training's encoder of the same parameters; None: one is made.
    """

    def __init__(self, param: DatasetParam, adapter: DataAdapter, encoder: LazyEncoder | None = None) -> None:
        self.adapter, self.param = adapter, param
        self._encoder = LazyEncoder(param, None, adapter) if encoder is None else encoder
        self._path = param.preprocess_parameters.model_name_or_path

    def check(self, config: Any, where: str) -> None:
        """Check that processor, tokenizer and chat template are the model's.

        Args:
            config: transformers' configuration of the model.
            where: where it was read from, for messages.

        Raises:
            ConfigError: they aren't, or there is no chat template.
        """
        check_model_match(self.processor, self.adapter, self._path, config, where)
        encoder = self._encoder.get()
        if isinstance(encoder, Encoder):
            _ = encoder.template

    @property
    def processor(self) -> Processor:
        """The model's processor, or its tokenizer where it reads text only."""
        return self._encoder.processor()

    @property
    def reads(self) -> tuple[MediaKind, ...]:
        """Kinds of media that the model takes."""
        return self.adapter.reads(self.processor)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        processor: Any = self.processor
        return getattr(processor, "tokenizer", processor)

    @property
    def pad_token_id(self) -> int:
        """Id that shorter prompts of a batch begin with."""
        return self._encoder.get().pad_token_id

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Ids of the tokens that end an answer, for a model whose generation configuration names none."""
        return [self.tokenizer.convert_tokens_to_ids(token) for token in stop_tokens(self.tokenizer, self._path)]

    def measure(self, request: AnswerRequest) -> PromptSize:
        """Return the size of a prompt, without decoding its media.

        Raises:
            BadSample: it can't be rendered, or has media that can't be found or that the model doesn't take.
        """
        kinds = tuple(sorted({ref.kind for ref in request.conversation.media}))
        return PromptSize(len(self._prepare(request)), kinds)

    def encode(self, request: AnswerRequest) -> TokenSample:
        """Return a prompt's tensors: `input_ids` [L] int64, token types [L] if the model has them, and media tensors.

        Raises:
            BadSample: as `measure`; or a medium can't be decoded.
        """
        sample = self._encoder.get().finish(self._prepare(request), self._media(request), request.conversation.where)
        return {key: value for key, value in sample.items() if key != "labels"}

    def _prepare(self, request: AnswerRequest) -> Prepared:
        return self._encoder.get().prepare_prompt(request.conversation, self._media(request))

    def _media(self, request: AnswerRequest) -> RowMedia:
        return RowMedia(self._encoder.reader(), request.folders, request.conversation.where)

    def batch(self, samples: Sequence[TokenSample]) -> dict[str, torch.Tensor]:
        """Put prompts together, padded on the left.

        Args:
            samples: results of `encode`.

        Returns:
            `input_ids`, `attention_mask` and token types [batch, longest] int64, and media tensors stacked on dim 0.
        """
        longest = max(len(sample["input_ids"]) for sample in samples)
        ids = [sample["input_ids"] for sample in samples]
        batch = {
            "input_ids": _padded(ids, longest, self.pad_token_id),
            "attention_mask": _padded([torch.ones_like(row) for row in ids], longest, 0),
        }
        for key in self.adapter.token_keys:
            if any(key in sample for sample in samples):
                batch[key] = _padded([_values(key, sample) for sample in samples], longest, 0)
        media_keys = [key for keys in self.adapter.media_keys.values() for key in keys]
        return {**batch, **stack_media(samples, media_keys, self.adapter.padded_keys)}


def _values(key: str, sample: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return sample[key] if key in sample else torch.zeros_like(sample["input_ids"])


def _padded(rows: Sequence[torch.Tensor], length: int, value: int) -> torch.Tensor:
    out = rows[0].new_full((len(rows), length), value)
    for target, row in zip(out, rows, strict=True):
        target[length - len(row) :] = row
    return out
