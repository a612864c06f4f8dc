"""Prompts, and how answers are generated; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_mm.data.media.media import MediaKind


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of generation.

    Attributes:
        values: keys of transformers' GenerationConfig that replace those of the model's own; without `do_sample` the
            most likely token is taken each time.
        stop: texts that end an answer.
        seed: tokens are drawn by it and a request's index.
        batch_size: requests answered at a time.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int = 42
    batch_size: int = 1

    @property
    def draws_tokens(self) -> bool:
        """Whether tokens are drawn at random: requests are then answered one by one, so that each has its own seed."""
        return bool(self.values.get("do_sample"))


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt of the command line or of model.json.

    Attributes:
        text: what the user says.
        media: kind and path of each medium, before the text.
    """

    text: str
    media: tuple[tuple[MediaKind, str], ...] = ()
