"""Captioned pictures and clips, as `mindspeed-mm init` finds and measures them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.configs.generation_data import GenerationBasicParameters, GenerationPreprocessParameters
from mindspeed_mm.data.sources.registry import find_data_sets, find_files
from mindspeed_mm.tools.init.rows import MEASURED, report_faults
from mindspeed_mm.utils.errors import BadSample, DataError

if TYPE_CHECKING:
    from mindspeed_mm.data.generation.clips import ClipGeometry

MEDIA_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".mp4", ".mov", ".mkv", ".webm")
#: the file that is made of captions beside pictures, in the run folder
CAPTIONS = "captions.jsonl"


@dataclass(frozen=True)
class CaptionFiles:
    """Where captions are.

    Attributes:
        paths: annotation files.
        folder: the one that their paths are relative to; "": that of each file.
        beside: rows of captions that stand in a .txt file beside each picture, and are written into one file of the
            run folder; (): there are annotation files.
        skips: leave rows out that can't be used.
    """

    paths: tuple[str, ...]
    folder: str
    beside: tuple[Mapping[str, str], ...]
    skips: bool

    @property
    def form(self) -> str:
        """The captions' form in words."""
        if self.beside:
            return f"pictures and clips of '{self.folder}' beside .txt files with their captions"
        return ", ".join(self.paths)


@dataclass(frozen=True)
class MeasuredClips:
    """Sizes of pictures and clips.

    Attributes:
        files: where captions are.
        rows: number of the rows.
        looked_at: number of those that were looked at.
        clips: sizes of those that can be used.
        frames: of each of them; 1: a picture.
        left_out: number of the rows with faults, with `skips`.
    """

    files: CaptionFiles
    rows: int
    looked_at: int
    clips: tuple[ClipGeometry, ...]
    frames: tuple[int, ...]
    left_out: int

    @property
    def usable(self) -> int:
        """Estimated number of the rows that give a sample."""
        return max(1, round(self.rows * len(self.clips) / self.looked_at))

    @property
    def are_pictures(self) -> bool:
        """Whether there are no clips."""
        return max(self.frames) == 1

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Heights and widths in pixels."""
        return {(clip.height, clip.width) for clip in self.clips}

    @property
    def area(self) -> int:
        """Median area in pixels."""
        return int(statistics.median(clip.height * clip.width for clip in self.clips))


def find_captions(names: Sequence[str], media: str | None, *, skips: bool) -> CaptionFiles:
    """Find annotation files, or pictures with captions beside them.

    Raises:
        ConfigError, DataError: there is neither.
    """
    if len(names) == 1 and Path(names[0]).is_dir() and not _has_annotations(names[0]):
        return CaptionFiles((), names[0], _captions_beside(Path(names[0])), skips)
    entries = find_data_sets(names, ".", DatasetAttr())
    paths = [path for entry in entries for path in entry.paths]
    return CaptionFiles(tuple(path.removeprefix("./") for path in paths), media or "", (), skips)


def _has_annotations(folder: str) -> bool:
    try:
        return bool(find_files(folder, "."))
    except DataError:
        return False


def _captions_beside(folder: Path) -> tuple[Mapping[str, str], ...]:
    media = sorted(file for file in folder.rglob("*") if file.suffix.lower() in MEDIA_SUFFIXES)
    if not media:
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"--data '{folder}' has neither an annotation file (metadata.jsonl with a path and a caption a line) nor "
            f"pictures; found {names}"
        )
    without = [file for file in media if not file.with_suffix(".txt").is_file()]
    if without:
        raise DataError(
            f"--data '{folder}': {len(without)} of {len(media)} pictures have no caption: expected a file "
            f"'{without[0].with_suffix('.txt').name}' beside '{without[0].name}', or one annotation file "
            '(metadata.jsonl, a line {"path": …, "caption": …} a picture)'
        )
    return tuple(
        {"path": str(file.relative_to(folder)), "caption": _caption(file.with_suffix(".txt"))} for file in media
    )


def _caption(file: Path) -> str:
    try:
        return " ".join(file.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def write_captions(files: CaptionFiles, folder: Path) -> CaptionFiles:
    """Write the captions that stand beside pictures into one file of the run folder, and return where captions are."""
    if not files.beside:
        return files
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CAPTIONS
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in files.beside), encoding="utf-8", newline="\n"
    )
    return CaptionFiles((str(path),), files.folder, files.beside, files.skips)


def measure_clips(files: CaptionFiles) -> MeasuredClips:
    """Read up to `MEASURED` rows, spread evenly, and the headers of their files.

    Args:
        files: annotation files that are there (`write_captions`).

    Raises:
        DataError: rows can't be used, with their names and reasons.
    """
    from mindspeed_mm.data.generation.annotations import open_annotations, read_annotation
    from mindspeed_mm.data.generation.clips import ClipReader
    from mindspeed_mm.data.media.media_files import find_media
    from mindspeed_mm.data.places import Place

    source = open_annotations(
        GenerationBasicParameters(data_path=list(files.paths), data_folder=files.folder), list(files.paths)
    )
    reader = ClipReader(GenerationPreprocessParameters())
    wanted = np.unique(np.linspace(0, len(source) - 1, min(MEASURED, len(source))).astype(int)).tolist()
    clips, frames, faults = [], [], []
    for number in wanted:
        place = Place(source, number)
        try:
            row = read_annotation(source.row(number), False, place)
            clip = reader.facts(row, find_media(row.ref, source.folders(number), place))
        except BadSample as error:
            faults.append((error.reason, str(error)))
            continue
        clips.append(clip)
        frames.append(reader.frames(clip, 1 << 30))
    if faults and (not files.skips or not clips):
        raise DataError(report_faults(faults, len(wanted), skips=files.skips))
    return MeasuredClips(files, len(source), len(wanted), tuple(clips), tuple(frames), len(faults))
