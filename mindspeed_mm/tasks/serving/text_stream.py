"""The text of an answer while its tokens are generated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Writes an answer's text piece by piece: whole characters, and never a part of a text that ends it.

    Args:
        tokenizer: a fast tokenizer of transformers.
        ends: ids that end the answer.
        stop: texts that end it; they aren't part of it.
        write: receives the pieces.
    """

    def __init__(
        self, tokenizer: Any, ends: Collection[int], stop: Sequence[str], write: Callable[[str], None]
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._pieces = DecodeStream([], skip_special_tokens=True)
        self._ends, self._stop, self._write = ends, tuple(stop), write
        self._sent, self._held = "", ""
        self._is_over = False

    def put(self, token: int) -> None:
        """Take the next token."""
        self._is_over = self._is_over or token in self._ends
        if self._is_over or (piece := self._pieces.step(self._backend, token)) is None:
            return
        self._held += piece
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self._is_over, ready = True, min(found)
        else:
            ready = len(self._held) - self._begun()
        self._send(self._held[:ready])
        self._held = self._held[ready:]

    def finish(self, text: str) -> None:
        """Write what is left of the whole answer."""
        self._send(text.removeprefix(self._sent))

    def _begun(self) -> int:
        """Characters at the end of what is held that a stop text may begin with."""
        longest = min(len(self._held), max(map(len, self._stop), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)

    def _send(self, piece: str) -> None:
        if piece:
            self._sent += piece
            self._write(piece)
