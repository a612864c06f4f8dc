"""Rows of conversations or plain text, as `mindspeed-mm init` measures them: form, lengths, media, faults."""

from __future__ import annotations

import itertools
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mindspeed_mm.configs.data_config import DataConfig, DatasetAttr
from mindspeed_mm.configs.sections import build_section
from mindspeed_mm.data.conversation.named_templates import TEMPLATES
from mindspeed_mm.data.generation.annotations import PATH_COLUMNS
from mindspeed_mm.data.sources.files import DataEntry
from mindspeed_mm.data.sources.registry import find_data_sets
from mindspeed_mm.data.sources.row_files import open_rows
from mindspeed_mm.data.sources.row_forms import UnknownForm, recognise
from mindspeed_mm.tools.init.model_directory import ModelDirectory
from mindspeed_mm.utils.errors import ConfigError, DataError

#: rows that are rendered and measured, spread evenly over the files
MEASURED = 256
_SHOWN = 3
_TEXT = "text"
#: columns of conversations, answers and media
_NOT_PLAIN = {"messages", "conversations", "output", "response", "answer", "images", "videos", *PATH_COLUMNS}
_FILE = "run.yaml, section data"


@dataclass(frozen=True)
class RowFiles:
    """What is read of the rows.

    Attributes:
        names: files, folders or patterns.
        folder: the one that paths of media are relative to.
        attr: names of columns and roles; {}: recognised from the rows.
        template: name of a chat template; None: the model's own.
        is_text: plain text for pretraining, all of which is trained.
        skips: leave rows out that can't be used; else they are errors.
        form: the rows' form in words.
    """

    names: tuple[str, ...]
    folder: str
    attr: Mapping[str, str]
    template: str | None
    is_text: bool
    skips: bool
    form: str

    def section(self, model: str, **basic: Any) -> dict[str, Any]:
        """Return the section `data` of a run's file.

        Args:
            model: directory of the tokenizer or processor.
            basic: further keys of `basic_parameters`.
        """
        names = list(self.names) if len(self.names) > 1 else self.names[0]
        content: dict[str, Any] = {"dataset": names, "dataset_dir": self.folder}
        if self.is_text:
            content["stage"] = "pretrain"
        if self.template is not None:
            content["template"] = self.template
        if self.skips:
            content["on_bad_sample"] = "skip"
        param: dict[str, Any] = {
            "dataset_type": "huggingface",
            "basic_parameters": {**content, **basic},
            "preprocess_parameters": {"model_name_or_path": model},
        }
        if self.attr:
            param["attr"] = dict(self.attr)
        return {"dataset_param": param}


@dataclass(frozen=True)
class MeasuredRows:
    """Lengths of rows as the model's own processor and chat template give them.

    Attributes:
        files: what is read.
        rows: their number.
        lengths: tokens of the samples that were looked at.
        looked_at: number of the rows that were looked at.
        trained_share: share of the tokens that are targets.
        media: kind → media a row.
        left_out: number of rows with faults among those looked at, with `skips`.
        cut: number of rows that lose their last turns, as the model has too few positions for them.
        too_long: number of rows whose first answer has too many tokens, which are left out.
    """

    files: RowFiles
    rows: int
    lengths: tuple[int, ...]
    looked_at: int
    trained_share: float
    media: Mapping[str, float]
    left_out: int = 0
    cut: int = 0
    too_long: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that was looked at."""
        return max(self.lengths)

    @property
    def mean(self) -> float:
        """Mean number of tokens of a sample."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def is_whole(self) -> bool:
        """Whether every row was looked at."""
        return self.looked_at == self.rows

    @property
    def usable(self) -> int:
        """Estimated number of the rows that give a sample."""
        return max(1, round(self.rows * len(self.lengths) / self.looked_at)) if self.lengths else 0


def find_rows(
    names: Sequence[str], folder: str, attr: Mapping[str, str], template: str | None, *, skips: bool
) -> RowFiles:
    """Find data files and recognise the form of their rows, without torch.

    Raises:
        ConfigError, DataError: there is no such file, or its rows have no form that is known; with the nearest one.
    """
    typed, _ = build_section(DatasetAttr, dict(attr), "--attr", "--attr")
    entries = find_data_sets(names, folder, typed, is_text=all(name.lower().endswith(".txt") for name in names))
    _refuse_empty(entries)
    if not attr and _is_plain_text(entries):
        return RowFiles(tuple(names), folder, attr, template, True, skips, f"plain text in the column '{_TEXT}'")
    forms = dict.fromkeys(_describe(_recognised(entry).attr) for entry in entries)
    return RowFiles(tuple(names), folder, attr, template, False, skips, "; ".join(forms))


def _recognised(entry: DataEntry) -> DataEntry:
    """A data set with the names of its columns.

    Raises:
        DataError: its rows have no form that is trained on; with how they are made, or named, so that they are.
    """
    from mindspeed_mm.tools.convert_data.coco import is_coco
    from mindspeed_mm.tools.convert_data.forms import has_captions

    names = " ".join(entry.paths)
    if all(is_coco(path) for path in entry.paths):
        raise DataError(
            f"--data {names}: COCO's annotations, not rows; mindspeed-mm data convert {names} --output FOLDER makes "
            "rows of them, with captions or boxes as answers"
        )
    if not entry.attr.model_fields_set and has_captions(entry):
        raise DataError(
            f"--data {names}: rows of captions, which models that make images or videos are trained on (--model with "
            f"the directory of a diffusers pipeline); for a model that reads images, mindspeed-mm data convert {names} "
            "--as conversations --output FOLDER makes questions and answers of them"
        )
    try:
        return recognise(entry)
    except UnknownForm as error:
        if not error.nearest:
            raise
        words = " ".join(shlex.quote(f"{key}={name}") for key, name in error.nearest.items())
        raise DataError(f"{error}; here: --attr {words}") from None


def _refuse_empty(entries: Sequence[DataEntry]) -> None:
    for path in itertools.chain.from_iterable(entry.paths for entry in entries):
        if os.path.getsize(path) == 0:
            raise DataError(f"{path}: the file is empty; expected rows")


def _is_plain_text(entries: Sequence[DataEntry]) -> bool:
    """Whether the first rows of all files have the column text, and nothing that a conversation is made of."""
    for path in itertools.chain.from_iterable(entry.paths for entry in entries):
        rows = [row for row in itertools.islice(open_rows(path, is_text=True).head(16), 16) if isinstance(row, dict)]
        if not rows or not all(isinstance(row.get(_TEXT), str) for row in rows):
            return False
        if any(row.keys() & _NOT_PLAIN for row in rows):
            return False
    return True


def _describe(attr: DatasetAttr) -> str:
    if attr.formatting == "alpaca":
        columns = [name for name in (attr.prompt, attr.query, attr.response, attr.history) if name]
        form = " and ".join([", ".join(f"'{name}'" for name in columns[:-1]), f"'{columns[-1]}'"])
    else:
        form = f"'{attr.messages}' with turns of {attr.role_tag} and {attr.content_tag}"
    media = [name for name in (attr.images, attr.videos, attr.audios) if name]
    return form + "".join(f", media in '{name}'" for name in media)


def require_template(model: ModelDirectory, files: RowFiles) -> None:
    """Refuse conversations for a model without a chat template, unless its family writes rows in its own way.

    Raises:
        ConfigError: with the names of those that can be chosen.
    """
    if files.is_text or files.template or model.has_template:
        return
    from mindspeed_mm.models.transformers.adapters import find_adapter

    if find_adapter(SimpleNamespace(init_from_hf_path=model.path)).encoder_class is None:
        raise ConfigError(
            f"--model '{model.path}' has no chat template (base models have none), and rows of conversations need one: "
            f"name one by --template NAME, of {', '.join(TEMPLATES)}; or give the directory of the instruct model"
        )


def measure_rows(model: ModelDirectory, files: RowFiles, positions: int | None) -> MeasuredRows:
    """Render and count up to `MEASURED` rows, spread evenly, without decoding their media.

    Args:
        model: whose processor and chat template render them.
        files: what is read.
        positions: of the model, the most tokens of a row; None: any number.

    Raises:
        ConfigError: tokenizer or processor don't fit the model.
        DataError: rows can't be used, with their names and reasons.
    """
    from mindspeed_mm.data.conversation.encode import TOO_LONG
    from mindspeed_mm.tools.data_check import facts_of_rows, open_all_rows

    dataset, wanted = open_all_rows(DataConfig.from_dict(files.section(model.path), file=_FILE), positions, MEASURED)
    facts = facts_of_rows(dataset, wanted, decode=False, workers=0)
    faults = [row for row in facts if row.fault and row.fault != TOO_LONG]
    good = [row for row in facts if row.lengths]
    if faults and (not files.skips or not good):
        raise DataError(report_faults([(str(r.fault), r.note) for r in faults], len(facts), skips=files.skips))
    if not good:
        raise DataError(
            f"--data {files.form}: of no row does the first answer fit into the {positions} positions of the model "
            f"(max_position_embeddings): {facts[0].note}"
        )
    lengths = tuple(length for row in good for length in row.lengths)
    media: Counter[str] = Counter()
    for row in good:
        media.update(row.media)
    return MeasuredRows(
        files,
        len(dataset.source),
        lengths,
        len(facts),
        sum(row.targets for row in good) / sum(lengths),
        {kind: count / len(good) for kind, count in media.items()},
        len(faults),
        sum(row.cut_from > 0 for row in good),
        sum(row.fault == TOO_LONG for row in facts),
    )


def report_faults(faults: Sequence[tuple[str, str]], looked_at: int, *, skips: bool) -> str:
    """Return the sentence about rows that can't be used.

    Args:
        faults: of each, the reason in a few words, and the message with its file and row.
        looked_at: number of the rows that were looked at.
        skips: whether such rows were to be left out.
    """
    counts = Counter(reason for reason, _ in faults)
    first = dict(reversed(faults))  # of each reason
    shown = [f"{count} × {reason}: {first[reason]}" for reason, count in counts.most_common(_SHOWN)]
    more = f"; and {len(counts) - _SHOWN} more reasons" if len(counts) > _SHOWN else ""
    all_of_them = skips or len(faults) == looked_at
    advice = "" if all_of_them else ". To leave such rows out: --on-bad-sample skip"
    return f"{len(faults)} of {looked_at} rows that were looked at can't be used: {'; '.join(shown)}{more}{advice}"
