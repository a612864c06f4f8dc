"""Prompts, and how answers are generated; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_mm.data.media.media import MediaKind


#: tokens of the longest answer, where neither the launch nor generation_config.json says it
LONGEST_ANSWER = 512


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of generation.

    Attributes:
        values: keys of transformers' GenerationConfig that replace those of the model's own; without `do_sample` the
            most likely token is taken each time.
        stop: texts that end an answer.
        seed: tokens are drawn by it and a request's index.
        batch_size: requests answered at a time; None: chosen by their lengths.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int = 42
    batch_size: int | None = None

    @property
    def draws_tokens(self) -> bool:
        """Whether tokens are drawn at random: requests are then answered one by one, so that each has its own seed."""
        return bool(self.values.get("do_sample"))

    @property
    def rows_at_once(self) -> int | None:
        """Most requests of a batch; None: chosen by their lengths."""
        return 1 if self.draws_tokens else self.batch_size

    @property
    def foreseen_tokens(self) -> int:
        """Tokens that a request's answer may take, of all beams, as far as the launch says it."""
        longest: int = self.values.get("max_new_tokens", LONGEST_ANSWER)
        return longest * int(self.values.get("num_beams", 1))


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt of the command line or of model.json.

    Attributes:
        text: what the user says.
        media: kind and path of each medium, before the text.
    """

    text: str
    media: tuple[tuple[MediaKind, str], ...] = ()
