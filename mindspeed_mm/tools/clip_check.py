"""`mindspeed-mm data check data.json` for clips, pictures and features of generation models."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm.tools.row_workers import CHUNK, look_at
from mindspeed_mm.utils.errors import BadSample, ConfigError
from mindspeed_mm.utils.files import refuse_unwritable, write_json

if TYPE_CHECKING:
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.data.generation.dataset import ShapedDataset
    from mindspeed_mm.data.generation.rule import GenerationRule

_SHOWN = 3


@dataclass
class CheckedClip:
    """The result of checking a row.

    Attributes:
        bucket: number of its shape; None: it gives no sample.
        fault: the reason why it gives none.
        note: the message about it.
    """

    bucket: int | None = None
    fault: str | None = None
    note: str = ""


def check_clips(options: argparse.Namespace, content: Mapping[str, Any], folder: Path) -> int:
    """Check the data of a data.json; print a summary, and write report.json.

    Args:
        options: options of the command; without `mm_model` any number of frames and any sides are accepted.
        content: content of data.json.
        folder: folder of report.json.

    Returns:
        0; 1 if a run with this data.json would end at one of its rows, or no row gives a sample.

    Raises:
        ConfigError, DataError: data.json, model.json or an annotation file can't be used at all.
    """
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.data.generation.build import build_generation_datasets

    config = GenerationDataConfig.from_dict(content, file=options.data_json)
    raises = config.dataset_param.basic_parameters.on_bad_sample == "raise"
    refuse_unwritable(folder, "--output")
    dataset, _ = build_generation_datasets(_with(config, on_bad_sample="skip"), _rule(options.mm_model))
    dataset.dataset_param = _with(config, on_bad_sample="raise").dataset_param  # rows raise their faults
    total = len(dataset)
    if options.rows is not None and options.rows < 1:
        raise ConfigError(f"--rows {options.rows}: expected at least 1")
    count = min(options.rows or total, total)
    wanted = np.unique(np.linspace(0, total - 1, count).astype(int)).tolist()
    facts: list[CheckedClip] = list(look_at(_Facts(dataset, wanted, options.decode), options.num_workers))
    report = _summarise(facts, dataset, total, options.global_batch_size)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    _print_summary(report, folder)
    return 1 if not report["samples"] or (raises and report["left_out"]) else 0


def _with(config: GenerationDataConfig, **changes: object) -> GenerationDataConfig:
    """The same data.json with other basic_parameters, and all rows in one part."""
    basic = config.dataset_param.basic_parameters.model_copy(
        update={"val_rate": None, "val_data_path": None, **changes}
    )
    param = config.dataset_param.model_copy(update={"basic_parameters": basic})
    return config.model_copy(update={"dataset_param": param})


def _rule(model_file: str | None) -> GenerationRule:
    from mindspeed_mm.data.generation.rule import GenerationRule

    if model_file is None:
        return GenerationRule(made_by="any model")
    from mindspeed_mm.configs.files import read_json
    from mindspeed_mm.configs.sora_config import SoRAModelConfig
    from mindspeed_mm.models.generation.sora_model import generation_rule

    return generation_rule(SoRAModelConfig.from_dict(read_json(model_file), file=model_file), seed=1234)


class _Facts:
    """Facts of rows, a chunk at a time, computed in the loader's workers."""

    def __init__(self, dataset: ShapedDataset, wanted: Sequence[int], decode: bool) -> None:
        self._dataset, self._wanted, self._decode = dataset, wanted, decode

    def __len__(self) -> int:
        return -(-len(self._wanted) // CHUNK)

    def __getitem__(self, chunk: int) -> list[CheckedClip]:
        return [self._of(index) for index in self._wanted[chunk * CHUNK : (chunk + 1) * CHUNK]]

    def _of(self, index: int) -> CheckedClip:
        try:
            bucket = self._dataset.measure(index)[0].bucket
            if self._decode and bucket is not None:
                self._dataset.get(index, bucket)
        except BadSample as error:
            return CheckedClip(fault=error.reason, note=str(error))
        return CheckedClip(bucket=bucket)


def _summarise(facts: Sequence[CheckedClip], dataset: ShapedDataset, rows: int, batch: int) -> dict[str, Any]:
    """`rows`, `looked_at`, `samples`, `buckets` (shape → samples, tokens of one), `steps_per_epoch`, `left_out`."""
    found = Counter(row.bucket for row in facts if row.bucket is not None)
    faults = Counter(row.fault for row in facts if row.fault is not None)
    buckets = {
        str(dataset.shapes[number]): {"samples": found[number], "tokens": dataset.rule.tokens(*dataset.shapes[number])}
        for number in sorted(found, key=dataset.shapes.rank)
    }
    return {
        "rows": rows,
        "looked_at": len(facts),
        "samples": sum(found.values()),
        "buckets": buckets,
        "steps_per_epoch": rows // batch,
        "left_out": {
            reason: {"rows": count, "first": [row.note for row in facts if row.fault == reason][:_SHOWN]}
            for reason, count in faults.most_common()
        },
    }


def _print_summary(report: dict[str, Any], folder: Path) -> None:
    looked = "" if report["looked_at"] == report["rows"] else f" ({report['looked_at']} of them looked at)"
    print(f"rows: {report['rows']}{looked}, {report['steps_per_epoch']} steps an epoch")
    print(f"samples: {report['samples']}")
    for shape, bucket in report["buckets"].items():
        print(f"frames×height×width {shape}: {bucket['samples']} samples of {bucket['tokens']} tokens")
    for reason, entry in report["left_out"].items():
        print(f"left out: {entry['rows']} × {reason}")
        for note in entry["first"]:
            print(f"    {note}")
    print(f"written: {folder.resolve() / 'report.json'}")
