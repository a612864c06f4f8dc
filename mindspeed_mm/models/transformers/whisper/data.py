"""Data adapter of Whisper: one audio clip, and its transcript after the tokenizer's prompt of language and task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter, DefaultAdapter
from mindspeed_mm.data.conversation.encode import TOO_LONG, MediaSource, PlannedMedium, Prepared, TokenSample
from mindspeed_mm.data.conversation.records import Conversation, Message
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.labels import IGNORE_INDEX
from mindspeed_mm.utils.log import notice

_POSITIONS = 448  # of every published size


class TranscriptEncoder:
    """Encodes rows of an audio clip and its transcript; it replaces `Encoder`, which needs a chat template.

    A row is a user turn with one audio clip and nothing else, and an assistant turn. The tokenizer states the ids: the
    prompt (language, task and timestamps as in tokenizer_config.json), the transcript and the end token; transcript
    and end token are targets.

    Args:
        processor: WhisperProcessor.
        adapter: The model family.
        param: `dataset_param`.
        max_length: Longest sample in tokens; None: the decoder's positions are the only limit.
    """

    def __init__(self, processor: Processor, adapter: DataAdapter, param: DatasetParam, max_length: int | None) -> None:
        options = param.preprocess_parameters
        self.adapter = adapter
        self.max_length = min(max_length or _POSITIONS, _positions(options.model_name_or_path))
        self.pad_token_id: int = processor.tokenizer.pad_token_id
        self._processor = processor
        self._splits = options.split_special_tokens
        self._trains_prompt = param.basic_parameters.train_on_prompt
        if param.basic_parameters.template is not None:
            notice("dataset_param.basic_parameters.template has no effect: Whisper's prompt is its tokenizer's")

    def filler(self) -> TokenSample:
        """Return a sample without targets for a batch without rows: two padding tokens and a window of zeros."""
        sound = self._processor.feature_extractor
        ids = torch.full((2,), self.pad_token_id, dtype=torch.int64)
        features = torch.zeros(1, sound.feature_size, sound.nb_max_frames)
        return {"input_ids": ids, "labels": torch.full_like(ids, IGNORE_INDEX), "input_features": features}

    def prepare(self, conversation: Conversation, source: MediaSource, limit: int | None = None) -> list[Prepared]:
        """Compute ids and labels of a row.

        Args:
            conversation: The row.
            source: Its audio clip.
            limit: Longest sample in tokens, below `max_length`.

        Raises:
            BadSample: The row has another form, the audio file is missing, or the transcript is too long (with the
                reason TOO_LONG).
        """
        where, (ref, answer) = conversation.where, _sound_and_transcript(conversation)
        tokenizer, transcript = (
            self._processor.tokenizer,
            "".join(part for part in answer.parts if isinstance(part, str)),
        )
        text = tokenizer(transcript, add_special_tokens=False, split_special_tokens=self._splits).input_ids
        prompt = tokenizer.prefix_tokens
        ids = np.asarray([*prompt, *text, tokenizer.eos_token_id], dtype=np.int64)
        longest = min(limit or self.max_length, self.max_length)
        if len(ids) > longest:
            raise BadSample(
                f"{where}: the transcript takes {len(ids)} tokens, its prompt and end among them; {longest} fit, and "
                "nothing is trained",
                TOO_LONG,
            )
        source.look(ref)
        labels = ids.copy()
        labels[: 0 if self._trains_prompt else len(prompt)] = IGNORE_INDEX
        if not answer.train:
            labels[len(prompt) :] = IGNORE_INDEX
        frames = self._processor.feature_extractor.nb_max_frames
        medium = PlannedMedium(ref, "", frames, frames**2)
        return [Prepared(ids, labels, np.zeros_like(ids), (medium,), len(ids))]

    def prepare_prompt(self, conversation: Conversation, source: MediaSource) -> Prepared:
        """Return the tokenizer's prompt, after which a transcript begins.

        Args:
            conversation: A turn of the user with one audio clip and no text.
            source: The audio clip.

        Raises:
            BadSample: The conversation has another form, or the audio file is missing.
        """
        ref = _sound(conversation, conversation.messages)
        source.look(ref)
        ids = np.asarray(self._processor.tokenizer.prefix_tokens, dtype=np.int64)
        frames = self._processor.feature_extractor.nb_max_frames
        medium = PlannedMedium(ref, "", frames, frames**2)
        return Prepared(ids, np.full_like(ids, IGNORE_INDEX), np.zeros_like(ids), (medium,), len(ids))

    def finish(self, prepared: Prepared, source: MediaSource, where: object) -> TokenSample:
        """Decode the audio clip of a prepared row and return the sample, with `input_features` [1, mel bins, frames].

        Raises:
            BadSample: The audio clip can't be decoded.
        """
        extractor, sound = self._processor.feature_extractor, source.open(prepared.media[0].ref)
        features = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        ids, labels = torch.from_numpy(prepared.ids), torch.from_numpy(prepared.labels)
        sample = {"input_ids": ids, "labels": labels, "input_features": features["input_features"]}
        return {**sample, "media_sizes": prepared.media_sizes}


def _sound_and_transcript(conversation: Conversation) -> tuple[MediaRef, Message]:
    answer = conversation.messages[-1]
    if answer.role != "assistant" or answer.media:
        raise _other_form(conversation)
    return _sound(conversation, conversation.messages[:-1]), answer


def _sound(conversation: Conversation, asked: Sequence[Message]) -> MediaRef:
    """The audio clip of the messages before the answer."""
    if [message.role for message in asked] == ["user"]:
        (question,) = asked
        text = any(isinstance(part, str) and part.strip() for part in question.parts)
        if not text and [ref.kind for ref in question.media] == ["audio"]:
            return question.media[0]
    raise _other_form(conversation)


def _other_form(conversation: Conversation) -> BadSample:
    found = []
    for message in conversation.messages:
        parts = [part.kind if isinstance(part, MediaRef) else "text" for part in message.parts]
        found.append(f"{message.role} with {' and '.join(parts)}")
    return BadSample(
        f"{conversation.where}: Whisper takes a turn of the user with one sound and no text, and a turn of the "
        f"assistant with its transcript; the row has: {', '.join(found)}",
        "not a sound with its transcript",
    )


def _positions(path: str) -> int:
    """Return the longest sequence of the decoder; a tokenizer's directory may have no config.json."""
    with contextlib.suppress(OSError, ValueError):
        return int(json.loads(Path(path, "config.json").read_text(encoding="utf-8"))["max_target_positions"])
    return _POSITIONS


class WhisperAdapter(DefaultAdapter):
    """One window of audio per row; longer audio clips are cut to it."""

    media_keys = {"audio": ("input_features",)}
    token_keys = ()
    encoder_class = TranscriptEncoder


ADAPTER = WhisperAdapter()
