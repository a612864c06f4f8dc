"""The command `mindspeed-mm data convert`: rows of common data sets as a folder that runs train on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.data_config import DataConfig, DatasetAttr
from mindspeed_mm.configs.generation_data import GenerationDataConfig, is_generation_data
from mindspeed_mm.data.generation.annotations import open_annotations
from mindspeed_mm.data.sources.files import DataEntry
from mindspeed_mm.data.sources.registry import find_data_sets
from mindspeed_mm.tools.convert_data.coco import BOX_UNITS
from mindspeed_mm.tools.convert_data.forms import FORMS, ROW_KINDS, Source, Wanted, open_source
from mindspeed_mm.tools.convert_data.media import MEDIA_FOLDER, MODES, MediaPlacer
from mindspeed_mm.tools.convert_data.output import FORMATS, LEFT_OUT, OutputFolder
from mindspeed_mm.tools.convert_data.rows import NewRow
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.files import is_inside

#: bytes of a file from which on it is no data.json
_LARGEST_DESCRIPTION = 4 << 20
#: between lines of progress
_SECONDS = 10.0


def main(words: Sequence[str]) -> int:
    """Run the words after `mindspeed-mm data convert`; return the exit status."""
    return convert(_parser().parse_args(list(words)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mindspeed-mm data convert", description="Write rows of common data sets as a folder that runs train on."
    )
    parser.add_argument(
        "what", nargs="+", help="data files, folders, patterns, names of dataset_info.json, or a run's data.json"
    )
    parser.add_argument("--output", required=True, help="folder for the rows; it is there only once all is done")
    parser.add_argument("--from", dest="form", choices=FORMS, help="form of the rows; absent = recognised")
    parser.add_argument("--as", dest="kind", choices=ROW_KINDS, help="of COCO and captions: what the new rows are")
    parser.add_argument("--to", choices=FORMATS, default="jsonl", help="format of the new files (jsonl)")
    parser.add_argument("--media", choices=MODES, default="relative", help="how media are named, or copy (relative)")
    parser.add_argument("--media-dir", default="", help="first folder in which relative media are looked for")
    parser.add_argument("--dataset-dir", default="", help="folder of data files and dataset_info.json")
    parser.add_argument("--prompt", help="question that captions or boxes answer; absent = a usual one")
    parser.add_argument("--boxes", choices=BOX_UNITS, default="thousandths", help="unit of boxes (thousandths)")
    parser.add_argument("--keep", default="", help="columns that the new rows have as well, separated by commas")
    parser.add_argument("--validation", type=float, help="share of the rows for validation; those of an image together")
    parser.add_argument("--seed", type=int, default=1234, help="which rows these are (1234)")
    parser.add_argument("--strict", action="store_true", help="write nothing if a row can't be used")
    parser.add_argument("--overwrite", action="store_true", help="replace a folder that this command has made")
    return parser


def convert(options: argparse.Namespace) -> int:
    """Convert data sets and print what has become of their rows.

    Returns:
        0; 1 if `--strict` and a row can't be used.

    Raises:
        ConfigError, DataError: the options don't fit, a file can't be read, or no row can be used.
    """
    if options.validation is not None and not 0 < options.validation < 1:
        raise ConfigError(f"--validation {options.validation:g}: expected a share between 0 and 1")
    output = Path(os.path.normpath(options.output))
    kept = tuple(name.strip() for name in options.keep.split(",") if name.strip())
    wanted = Wanted(options.kind, options.prompt, BOX_UNITS[options.boxes], kept)
    entries, pictures_only = _data_sets(options)
    for path in (path for entry in entries for path in entry.paths):
        if is_inside(path, output):
            raise ConfigError(f"--output '{output}' holds '{path}', which is to be converted; give another one")
    sources = [open_source(entry, options.form, wanted, pictures_only) for entry in entries]
    kinds = sorted({source.kind for source in sources})
    if len(kinds) > 1:
        raise ConfigError(f"{', '.join(options.what)}: {' and '.join(kinds)}, which aren't trained together; say --as")
    with OutputFolder(output, options.overwrite) as folder:
        placer = MediaPlacer(options.media, output, folder.working)
        for row in _counted(row for source in sources for row in source.read(placer)):
            if isinstance(row, BadSample):
                folder.leave_out(row)
            else:
                folder.add(row)
        if not len(folder):
            first = next(iter(folder.first_faults.values()), ["there are none"])[0]
            raise DataError(f"no row of {', '.join(options.what)} can be used; {first}")
        is_refused = options.strict and bool(folder.left_out)
        counts = {}
        if not is_refused:
            counts = folder.finish(options.to, options.validation, options.seed, _about(options, entries, sources))
    _print_summary(options, folder, sources, counts, placer.written)
    return 1 if is_refused else 0


def _counted(rows: Iterable[NewRow | BadSample]) -> Iterator[NewRow | BadSample]:
    """Yield rows, and print now and then how many there have been."""
    told = time.monotonic()
    for number, row in enumerate(rows, start=1):
        yield row
        if time.monotonic() - told >= _SECONDS:
            told = time.monotonic()
            print(f"{number} rows so far", file=sys.stderr, flush=True)


def _data_sets(options: argparse.Namespace) -> tuple[list[DataEntry], bool]:
    """The data sets that the words name, and whether all their files are pictures."""
    content = _description(options.what)
    if content is None:
        found = find_data_sets(options.what, options.dataset_dir, DatasetAttr())
        return _with_media_dir(found, options.media_dir), False
    if is_generation_data(content):
        clips = GenerationDataConfig.from_dict(content, file=options.what[0]).dataset_param
        if clips.dataset_type == "feature":
            raise ConfigError(f"{options.what[0]}: 'dataset_param.dataset_type' is feature; features have no rows")
        entries = open_annotations(clips.basic_parameters, clips.basic_parameters.data_path).entries
        return _with_media_dir(entries, options.media_dir), clips.dataset_type == "t2i"
    param = DataConfig.from_dict(content, file=options.what[0]).dataset_param
    basic = param.basic_parameters
    if param.dataset_type == "corpus" or basic.stage in ("pt", "pretrain"):
        raise ConfigError(f"{options.what[0]}: its rows are plain text, which is trained on as it is")
    found = find_data_sets(basic.dataset, basic.dataset_dir, param.attr, basic.max_samples)
    return _with_media_dir(found, options.media_dir), False


def _with_media_dir(entries: Sequence[DataEntry], folder: str) -> list[DataEntry]:
    return [dataclasses.replace(entry, media_dir=folder or entry.media_dir) for entry in entries]


def _description(names: Sequence[str]) -> Mapping[str, Any] | None:
    """The content of a data.json, if it is all that is named."""
    path = Path(names[0])
    if len(names) > 1 or not path.is_file() or path.stat().st_size > _LARGEST_DESCRIPTION:
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    return content if isinstance(content, Mapping) and "dataset_param" in content else None


def _about(options: argparse.Namespace, entries: Sequence[DataEntry], sources: Sequence[Source]) -> dict[str, Any]:
    """What the report says of how the rows were made."""
    named = ("kind", "to", "media", "media_dir", "prompt", "boxes", "keep", "validation", "seed")
    return {
        "files": [os.path.abspath(path) for entry in entries for path in entry.paths],
        "forms": [source.form for source in sources],
        "options": {name: value for name in named if (value := getattr(options, name)) not in (None, "")},
    }


def _print_summary(
    options: argparse.Namespace, folder: OutputFolder, sources: Sequence[Source], counts: Mapping[str, int], media: int
) -> None:
    left_out = sum(folder.left_out.values())
    for name, count in counts.items():
        print(f"written: {count} rows to {folder.folder / name}")
    if counts and media:
        print(f"written: {media} media to {folder.folder / MEDIA_FOLDER}")
    if not counts:
        print(f"nothing was written: {left_out} rows can't be used, and {len(folder)} can")
    for reason, count in folder.left_out.most_common():
        print(f"left out: {count} × {reason}")
        for note in folder.first_faults[reason]:
            print(f"    {note}")
    if counts and left_out:
        print(f"all {left_out} are listed in {folder.folder / LEFT_OUT}")
    unread = sorted(set().union(*(source.unread for source in sources)))
    if unread:
        print(f"columns that aren't read and were left out: {', '.join(unread)} (--keep takes them over)")
    if counts:
        print(f"in data.json: {_as_description(sources[0].kind, folder.folder, list(counts))}")


def _as_description(kind: str, folder: Path, names: Sequence[str]) -> str:
    """The part of a data.json that reads the new files."""
    if kind == "captions":
        keys = dict(zip(("data_path", "val_data_path"), (str(folder.resolve() / name) for name in names), strict=False))
    else:
        keys = dict(zip(("dataset", "val_dataset"), names, strict=False))
        keys["dataset_dir"] = str(folder.resolve())
    return json.dumps({"basic_parameters": keys}, ensure_ascii=False)
