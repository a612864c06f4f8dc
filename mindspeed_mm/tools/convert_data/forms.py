"""Forms of data sets: recognised by their content, and read as new rows."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_mm.data.conversation.contents import read_medium
from mindspeed_mm.data.conversation.messages import Conversation, Message, RowFault
from mindspeed_mm.data.generation.annotations import CAPTION_COLUMNS, PATH_COLUMNS, Annotation, read_annotation
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.files import DataEntry, RowSource
from mindspeed_mm.data.sources.row_files import open_rows
from mindspeed_mm.data.sources.row_forms import recognise
from mindspeed_mm.tools.convert_data.coco import CocoFile, CocoImage, boxes_as_text, is_coco
from mindspeed_mm.tools.convert_data.media import MediaPlacer
from mindspeed_mm.tools.convert_data.rows import NewRow, row_of_annotation, row_of_conversation
from mindspeed_mm.utils.errors import BadSample, ConfigError

#: form of conversations → the column by which its rows are recognised
CONVERSATIONS: Mapping[str, str] = {
    "llava": "conversations",
    "sharegpt": "conversations",
    "messages": "messages",
    "alpaca": "instruction",
    "query": "query",
}
FORMS = (*CONVERSATIONS, "captions", "coco")
ROW_KINDS = ("conversations", "captions")
#: columns that the reader of rows takes beside those that `attr` names
_BESIDE = ("video_fps", "fps")
_ANNOTATION_COLUMNS = (*PATH_COLUMNS, *CAPTION_COLUMNS, "num_frames", "fps", "resolution", "cut", "crop")
_BOX_PROMPTS = {
    None: "Locate every object in the image. Answer with a JSON list of objects with bbox_2d, [left, top, right, "
    "bottom] in pixels, and label.",
    1000: "Locate every object in the image. Answer with a JSON list of objects with bbox_2d, [left, top, right, "
    "bottom] in thousandths of the image's width and height, and label.",
}


@dataclass(frozen=True)
class Wanted:
    """What the new rows are to be.

    Attributes:
        kind: conversations or captions; None: what the data set is (COCO: conversations).
        prompt: the question that a caption or boxes answer; None: a usual one.
        box_unit: see `boxes_as_text`.
        kept: columns that are taken over as they are.
    """

    kind: str | None = None
    prompt: str | None = None
    box_unit: int | None = 1000
    kept: tuple[str, ...] = ()


class Source(Protocol):
    """A data set that is read as new rows."""

    form: str
    kind: str
    unread: set[str]
    """Columns that have been found and that the new rows lack."""

    def read(self, placer: MediaPlacer) -> Iterator[NewRow | BadSample]:
        """Yield its rows with their media placed; for a row that can't be used, its fault."""


def open_source(entry: DataEntry, form: str | None, wanted: Wanted, pictures_only: bool = False) -> Source:
    """Open a data set.

    Args:
        entry: its files; `attr` describes its rows, or they are recognised.
        form: one of FORMS; None: recognised.
        wanted: the new rows.
        pictures_only: as in `read_annotation`.

    Raises:
        ConfigError: rows of this form don't become what is wanted.
        DataError: a file can't be read, or its form isn't known.
    """
    if form == "coco" or (form is None and all(is_coco(path) for path in entry.paths)):
        return _CocoSource(entry, wanted)
    if form == "captions" or (form is None and not entry.attr.model_fields_set and has_captions(entry)):
        return _CaptionSource(entry, wanted, pictures_only)
    if wanted.kind == "captions":
        raise ConfigError(f"--as captions: {', '.join(entry.paths)} holds conversations, which aren't captions")
    if entry.attr.ranking:
        raise ConfigError(f"data set '{entry.name}': rows are preference pairs, which can't be trained on")
    if entry.attr.pretrain:
        raise ConfigError(f"data set '{entry.name}': rows are plain text, which is trained on as it is")
    return _ConversationSource(recognise(entry, None if form is None else CONVERSATIONS[form]), form, wanted)


def has_captions(entry: DataEntry) -> bool:
    """Whether the first row that can be read names a file and a caption, and holds no conversation."""
    rows = itertools.chain.from_iterable(open_rows(path).head(100) for path in entry.paths)
    first = next((row for row in rows if isinstance(row, dict)), {})
    talks = set(CONVERSATIONS.values()) & first.keys()
    return not talks and all(first.keys() & names for names in (set(PATH_COLUMNS), set(CAPTION_COLUMNS)))


class _ConversationSource:
    kind = "conversations"

    def __init__(self, entry: DataEntry, form: str | None, wanted: Wanted) -> None:
        attr = entry.attr.resolved()
        read = [value for value in attr.model_dump().values() if isinstance(value, str)]
        self.form = form or ("alpaca" if attr.formatting == "alpaca" else attr.messages)
        self.unread: set[str] = set()
        self._known = {*read, *_BESIDE, *wanted.kept}
        self._kept = wanted.kept
        self._source = RowSource([entry])

    def read(self, placer: MediaPlacer) -> Iterator[NewRow | BadSample]:
        for number in range(len(self._source.files)):
            file, reader, rows = self._source.head(number, len(self._source))
            folders = self._source.folders_of(number)
            for local, row in rows:
                where = Place(file, local)
                try:
                    if isinstance(row, BadSample):
                        raise row
                    self.unread |= row.keys() - self._known
                    talk = reader.read(row, where)
                    if not talk.has_target:
                        raise BadSample(f"{where}: no answer to train on", "no answer to train on")
                    named = [medium.path for medium in talk.media if medium.path and medium.content is None]
                    columns = row_of_conversation(_with_media(talk, placer, folders))
                    group = named[0] if named else f"{number}:{local}"
                    yield NewRow({**columns, **_kept_of(row, self._kept, columns, where)}, group)
                except BadSample as fault:
                    yield fault


def _with_media(talk: Conversation, placer: MediaPlacer, folders: Sequence[str]) -> Conversation:
    """A conversation with its media placed."""
    messages = [
        dataclasses.replace(
            message,
            parts=[
                placer.place(part, folders, talk.where) if isinstance(part, MediaRef) else part
                for part in message.parts
            ],
        )
        for message in talk.messages
    ]
    return dataclasses.replace(talk, messages=messages)


def _kept_of(row: Mapping[str, Any], kept: Sequence[str], columns: Mapping[str, Any], where: object) -> dict[str, Any]:
    found = {name: row[name] for name in kept if name in row}
    if taken := sorted(found.keys() & columns):
        raise BadSample(f"{where}: --keep {taken[0]}: the new rows have a column of this name", "a column is taken")
    return found


class _CaptionSource:
    form = "captions"

    def __init__(self, entry: DataEntry, wanted: Wanted, pictures_only: bool) -> None:
        self.kind = wanted.kind or "captions"
        self.unread: set[str] = set()
        self._wanted, self._pictures_only = wanted, pictures_only
        self._source = RowSource([entry])

    def read(self, placer: MediaPlacer) -> Iterator[NewRow | BadSample]:
        for number in range(len(self._source.files)):
            file, _, rows = self._source.head(number, len(self._source))
            folders = self._source.folders_of(number)
            for local, row in rows:
                where = Place(file, local)
                try:
                    if isinstance(row, BadSample):
                        raise row
                    self.unread |= row.keys() - {*_ANNOTATION_COLUMNS, *self._wanted.kept}
                    yield from self._of(row, where, placer, folders)
                except BadSample as fault:
                    yield fault

    def _of(
        self, row: Mapping[str, Any], where: Place, placer: MediaPlacer, folders: Sequence[str]
    ) -> Iterator[NewRow]:
        annotation, group = self._placed(row, where, placer, folders)
        if self.kind == "captions":
            columns = row_of_annotation(annotation, self._pictures_only, where)
            yield NewRow({**columns, **_kept_of(row, self._wanted.kept, columns, where)}, group)
            return
        if annotation.cut is not None or annotation.crop is not None:
            what = "'cut' and 'crop' have no place in a conversation"
            raise BadSample(f"{where}: {what}", what)
        for caption in annotation.captions:
            prompt = self._wanted.prompt or f"Describe the {annotation.ref.kind}."
            columns = row_of_conversation(_question(annotation.ref, prompt, caption, where))
            yield NewRow({**columns, **_kept_of(row, self._wanted.kept, columns, where)}, group)

    def _placed(
        self, row: Mapping[str, Any], where: Place, placer: MediaPlacer, folders: Sequence[str]
    ) -> tuple[Annotation, str]:
        """An annotation with its file placed, which may be in the row as bytes, and the file's name before."""
        column = next((name for name in PATH_COLUMNS if isinstance(row.get(name), (dict, bytes))), None)
        if column is None:
            found = read_annotation(row, self._pictures_only, where)
            return dataclasses.replace(found, ref=placer.place(found.ref, folders, where)), found.ref.path
        value = {"bytes": row[column]} if isinstance(row[column], bytes) else row[column]
        try:
            ref = read_medium(value, "video" if column == "video" else "image")
        except RowFault as fault:
            raise BadSample(f"{where}: column '{column}': {fault}", fault.reason) from None
        path = placer.place(ref, folders, where).path
        return read_annotation({**row, "path": path}, self._pictures_only, where), path


def _question(ref: MediaRef, prompt: str, answer: str, where: Place) -> Conversation:
    turns = [Message("user", [ref, f"\n{prompt}"]), Message("assistant", [answer])]
    return Conversation(turns, None, where)


class _CocoSource:
    form = "coco"

    def __init__(self, entry: DataEntry, wanted: Wanted) -> None:
        self.kind = wanted.kind or "conversations"
        self.unread: set[str] = set()
        if wanted.kept:
            raise ConfigError("--keep: columns of rows are kept, and COCO's files have none")
        self._wanted, self._media_dir = wanted, entry.media_dir
        self._files = [CocoFile(path) for path in entry.paths]

    def read(self, placer: MediaPlacer) -> Iterator[NewRow | BadSample]:
        for file in self._files:
            folders = _folders_of_coco(file.path, self._media_dir)
            for image in file.read():
                if isinstance(image, BadSample):
                    yield image
                    continue
                yield from image.faults
                try:
                    yield from self._of(image, placer, folders)
                except BadSample as fault:
                    yield fault

    def _of(self, image: CocoImage, placer: MediaPlacer, folders: Sequence[str]) -> Iterator[NewRow]:
        where = image.place
        if self.kind == "captions":
            if not image.captions:
                what = "an image without captions"
                raise BadSample(f"{where}: {what}: '{image.name}'", what)
            ref = placer.place(MediaRef("image", image.name), folders, where)
            annotation = Annotation(ref, image.captions, height=image.height, width=image.width)
            yield NewRow(row_of_annotation(annotation, True, where), image.name)
            return
        unit = self._wanted.box_unit
        pairs = [(self._wanted.prompt or "Describe the image.", caption) for caption in image.captions]
        if image.boxes:
            pairs.append((self._wanted.prompt or _BOX_PROMPTS[unit], boxes_as_text(image, unit)))
        if not pairs:
            what = "an image without captions or boxes of single objects"
            raise BadSample(f"{where}: {what}: '{image.name}'", what)
        ref = placer.place(MediaRef("image", image.name), folders, where)
        for prompt, answer in pairs:
            yield NewRow(row_of_conversation(_question(ref, prompt, answer, where)), image.name)


def _folders_of_coco(path: str, media_dir: str) -> tuple[str, ...]:
    """Where images are looked for: the given folder, else beside the file, in `images` and in the split's folder.

    COCO's own layout is annotations/captions_train2017.json beside train2017/000000000009.jpg.
    """
    folder = os.path.dirname(path)
    split = re.split(r"[_.]", os.path.basename(path))[-2:][0]
    beside = [os.path.join(place, name) for place in (folder, os.path.join(folder, "..")) for name in ("images", split)]
    return tuple(dict.fromkeys((*([media_dir] if media_dir else ()), folder, *beside)))
