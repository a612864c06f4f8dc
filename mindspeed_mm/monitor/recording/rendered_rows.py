"""Rows of training data as people look at them: text with the trained tokens marked, thumbnails of media."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_mm.data.conversation.rendered import TextPiece, text_pieces
from mindspeed_mm.data.generation.dataset import ShapedDataset
from mindspeed_mm.data.loading.corpus import CorpusRows
from mindspeed_mm.data.loading.dataset import RecordDataset, RowMedia
from mindspeed_mm.data.media.media import DecodedVideo, MediaRef
from mindspeed_mm.monitor.recording.thumbnails import pixels_of, spread, write_thumbnail
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.labels import IGNORE_INDEX

#: what is kept of a row; more would make the report of a run with long rows large
_CHARACTERS, _PIECES, _MEDIA = 2000, 40, 8


class RowRenderer(Protocol):
    """Renders rows of a data set."""

    def kinds(self, row: int) -> Sequence[str]:
        """Return the kinds of media of a row, for a choice of different rows."""

    def render(self, row: int, folder: Path) -> dict[str, Any] | None:
        """Return a row as a line of samples.jsonl; None: it gives no sample.

        Args:
            row: its number in the data set, as in `row_ids`.
            folder: the folder of the report, where thumbnails are written to `media/`.
        """


def renderer_of(dataset: object, epoch: int = 0) -> RowRenderer | None:
    """Return what renders rows of a data set; None: it is a user's own, whose rows may be anything.

    Args:
        epoch: passes over the data before those that are rendered.
    """
    if isinstance(dataset, RecordDataset):
        return ConversationRenderer(dataset)
    if isinstance(dataset, ShapedDataset):
        return CaptionRenderer(dataset, epoch)
    return CorpusRenderer(dataset) if isinstance(dataset, CorpusRows) else None


class ConversationRenderer:
    """Renders conversations, and plain texts."""

    def __init__(self, dataset: RecordDataset) -> None:
        self._dataset = dataset

    def kinds(self, row: int) -> Sequence[str]:
        """See `RowRenderer`."""
        return sorted({medium.kind for medium in self._dataset.conversation(row).media})

    def render(self, row: int, folder: Path) -> dict[str, Any] | None:
        """See `RowRenderer`; of a text that is trained in pieces, the first one."""
        dataset = self._dataset
        found = dataset.prepare(row)
        if isinstance(found, BadSample):
            return None
        sample = found[0]
        pieces = text_pieces(sample.ids, sample.labels, dataset.encoder.tokenizer.tokenizer)
        media, reader = [medium.ref for medium in sample.media], dataset.media_of(row)
        rate = dataset.lazy_encoder.reader().sampling_rate
        return {
            "where": dataset.where(row),
            "kind": "conversation",
            "tokens": len(sample),
            "trained": int((sample.labels != IGNORE_INDEX).sum()),
            "cut_from": sample.whole_length if len(sample) < sample.whole_length else None,
            **_shortened(pieces),
            "media": [render_medium(ref, reader, rate, folder) for ref in media[:_MEDIA]],
            "media_left_out": max(0, len(media) - _MEDIA),
        }


class CorpusRenderer:
    """Renders rows of a corpus: texts of one length, parts of one or more documents."""

    def __init__(self, dataset: CorpusRows) -> None:
        self._dataset = dataset

    def kinds(self, row: int) -> Sequence[str]:
        """See `RowRenderer`."""
        return []

    def render(self, row: int, folder: Path) -> dict[str, Any] | None:
        """See `RowRenderer`; a token is trained where the one before it has it as its label."""
        sample = self._dataset[row]
        ids, following = sample["input_ids"].tolist(), sample["labels"].tolist()
        labels = [IGNORE_INDEX, *following[:-1]]
        return {
            "where": self._dataset.where(row),
            "kind": "conversation",
            "tokens": len(ids),
            "trained": sum(label != IGNORE_INDEX for label in following),
            "cut_from": None,
            **_shortened(text_pieces(ids, labels, self._dataset.tokenizer)),
            "media": [],
            "media_left_out": 0,
        }


class CaptionRenderer:
    """Renders pictures and clips as they are trained, cropped and resized, with their captions."""

    def __init__(self, dataset: ShapedDataset, epoch: int) -> None:
        self._dataset, self._epoch = dataset, epoch

    def kinds(self, row: int) -> Sequence[str]:
        """See `RowRenderer`; rows of different shapes are different."""
        return [f"shape {self._dataset.bucket_of(row)}"]

    def render(self, row: int, folder: Path) -> dict[str, Any] | None:
        """See `RowRenderer`; of features, which nobody can look at, the caption alone."""
        dataset = self._dataset
        bucket = dataset.bucket_of(row)
        sample = None if bucket is None else dataset.get(row, bucket, self._epoch)
        if sample is None or bucket is None or "fault" in sample:
            return None
        shape, caption = dataset.shapes[bucket], sample.get("caption")
        medium: dict[str, Any] = {
            "kind": "image" if shape.frames == 1 else "video",
            "width": shape.width,
            "height": shape.height,
            "frames": shape.frames,
            "seconds": None,
            "path": None,
            **_thumbnails(None if "video" not in sample else pixels_of(sample["video"]), folder),
        }
        return {
            "where": dataset.where(row),
            "kind": "caption",
            "tokens": sample["num_tokens"],
            "trained": None,
            "cut_from": None,
            **_shortened([] if caption is None else [TextPiece(caption, False, 0)]),
            "media": [medium],
            "media_left_out": 0,
        }


def render_medium(ref: MediaRef, reader: RowMedia, rate: int, folder: Path) -> dict[str, Any]:
    """Return a medium of a conversation for samples.jsonl, after the limits of data.json.

    Args:
        ref: the medium.
        reader: of the row's media.
        rate: samples a second of a sound.
        folder: of the report.

    Raises:
        BadSample: it can't be decoded, so that its row isn't trained.
    """
    described: dict[str, Any] = {"kind": ref.kind, "width": None, "height": None, "frames": None, "seconds": None}
    described |= {"path": ref.path or None, **_thumbnails(None, folder)}
    found = reader.open(ref)
    if ref.kind == "audio":
        return {**described, "seconds": round(len(np.asarray(found)) / rate, 3)}
    if isinstance(found, DecodedVideo):
        frames, seconds = found.frames, found.source_frames / found.source_fps if found.source_fps else None
    else:
        frames, seconds = np.asarray(found)[None], None
    count, height, width = frames.shape[:3]
    return {
        **described,
        "width": width,
        "height": height,
        "frames": count if ref.kind == "video" else None,
        "seconds": None if seconds is None else round(seconds, 3),
        **_thumbnails(frames, folder),
    }


def _thumbnails(frames: np.ndarray | None, folder: Path) -> dict[str, Any]:
    """Thumbnails of some of [frames, height, width, 3] uint8, and their paths; None: there are no frames."""
    names = [] if frames is None else [write_thumbnail(frame, folder / "media") for frame in spread(frames)]
    paths = [f"media/{name}" for name in names]
    return {"thumbnail": paths[0] if paths else None, "thumbnails": paths}


def _shortened(pieces: Sequence[TextPiece]) -> dict[str, Any]:
    """The first pieces of a row; a long one loses its middle."""
    kept = [{"text": _cut(p.text), "is_trained": p.is_trained, "tokens": p.tokens} for p in pieces[:_PIECES]]
    return {"pieces": kept, "pieces_left_out": max(0, len(pieces) - _PIECES)}


def _cut(text: str) -> str:
    left = len(text) - _CHARACTERS
    half = _CHARACTERS // 2
    return text if left <= 0 else f"{text[:half]} … ({left} characters) … {text[-half:]}"
