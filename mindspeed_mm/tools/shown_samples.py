"""Samples on the console, as a run trains on them: their text, with the trained tokens marked, and their media."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mindspeed_mm.data.conversation.rendered import TextPiece, text_pieces
from mindspeed_mm.utils.errors import BadSample

if TYPE_CHECKING:
    from mindspeed_mm.data.loading.dataset import RecordDataset

_MARKS = ("⟦", "⟧")


def show_samples(dataset: RecordDataset, rows: Iterable[int]) -> None:
    """Print rows as they are trained: on a terminal trained tokens are green, elsewhere they stand between ⟦ and ⟧.

    Args:
        dataset: the opened rows.
        rows: which of them.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    tokenizer = dataset.encoder.tokenizer.tokenizer
    for row in rows:
        found = dataset.prepare(row)
        console.print(Text(f"\n── {dataset.where(row)}", style="bold"))
        if isinstance(found, BadSample):
            console.print(Text(f"left out: {found}", style="red"))
            continue
        for number, sample in enumerate(found):
            trained = int((sample.labels != -100).sum())
            part = f"part {number + 1} of {len(found)}: " if len(found) > 1 else ""
            media = "".join(f", {medium.ref.kind} {medium.ref.path or 'in the row'}" for medium in sample.media)
            cut = f", cut from {sample.whole_length}" if sum(map(len, found)) < sample.whole_length else ""
            console.print(Text(f"{part}{len(sample)} tokens{cut}, {trained} of them trained{media}", style="dim"))
            pieces = text_pieces(sample.ids, sample.labels, tokenizer)
            text = Text()
            for piece in pieces:
                text.append(_marked(piece, is_coloured=console.is_terminal), style="green" if piece.is_trained else "")
            console.print(text)
    console.print()


def _marked(piece: TextPiece, *, is_coloured: bool) -> str:
    before, after = ("", "") if is_coloured or not piece.is_trained else _MARKS
    return f"{before}{piece.text}{after}"
