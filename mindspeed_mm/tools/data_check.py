"""`mindspeed-mm data check data.json`: check the data of a run before it is started, without a model's weights."""

from __future__ import annotations

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm.tools import clip_check
from mindspeed_mm.tools.row_workers import CHUNK, look_at
from mindspeed_mm.tools.shown_samples import show_samples
from mindspeed_mm.utils.errors import BadSample, ConfigError
from mindspeed_mm.utils.extras import has_extra
from mindspeed_mm.utils.files import refuse_unwritable, working_file, write_json

if TYPE_CHECKING:
    from mindspeed_mm.configs.data_config import DataConfig
    from mindspeed_mm.data.loading.dataset import RecordDataset
    from mindspeed_mm.data.media.media import SampleSize

_SHOWN = 3


@dataclass
class RowFacts:
    """The result of checking a row.

    Attributes:
        lengths: tokens of each of its samples; empty if it gives none.
        targets: trained tokens.
        media: kind → number.
        patches, squared_patches: sizes of its media.
        cut_from: tokens before it was cut to the limit; 0 if it wasn't.
        fault: the reason why it gives no sample.
        note: the message about it.
    """

    lengths: list[int] = field(default_factory=list)
    targets: int = 0
    media: dict[str, int] = field(default_factory=dict)
    patches: int = 0
    squared_patches: int = 0
    cut_from: int = 0
    fault: str | None = None
    note: str = ""


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("data_json", help="data.json of a run")
    parser.add_argument("--mm-model", help="of clips and pictures: model.json, which says what shapes it takes")
    parser.add_argument("--seq-length", type=int, help="longest row in tokens; absent = cutoff_len of data.json")
    parser.add_argument("--global-batch-size", type=int, default=1, help="rows (or packs) of an optimizer step")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="rows of a micro-batch of one rank")
    parser.add_argument("--rows", type=int, help="look at so many rows, spread evenly; absent = all")
    parser.add_argument("--decode", action="store_true", help="decode every medium, too: finds files that are damaged")
    parser.add_argument("--num-workers", type=int, default=os.cpu_count() or 1, help="processes that read rows")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N samples, with what is trained marked")
    parser.add_argument("--output", help="folder for report.json and lengths.png; absent = beside data.json")


def main(words: Sequence[str]) -> int:
    """Run the words after `mindspeed-mm data check`; return the exit status."""
    parser = argparse.ArgumentParser(prog="mindspeed-mm data check", description=(__doc__ or "").splitlines()[0])
    add_check_arguments(parser)
    return check_data(parser.parse_args(list(words)))


def check_data(options: argparse.Namespace) -> int:
    """Check the data of a data.json; print a summary, and write report.json and lengths.png.

    Returns:
        0; 1 if a run with this data.json would end at one of its rows, or no row gives a sample.

    Raises:
        ConfigError, DataError: data.json, the model directory or a data file can't be used at all.
    """
    folder = Path(options.output or Path(options.data_json).parent)
    with _announced(folder):
        return _check(options, folder)


def _check(options: argparse.Namespace, folder: Path) -> int:
    from mindspeed_mm.configs.data_config import DataConfig
    from mindspeed_mm.configs.files import read_json
    from mindspeed_mm.configs.generation_data import is_generation_data

    content = read_json(options.data_json)
    if is_generation_data(content):
        return clip_check.check_clips(options, content, folder)
    config = DataConfig.from_dict(content, file=options.data_json)
    if config.dataset_param.dataset_type == "corpus":
        raise ConfigError(
            f"{options.data_json}: 'dataset_param.dataset_type' is corpus: its documents are read whole when a run "
            "builds their index, which reports the first that can't be used (on_bad_sample: skip counts them); this "
            "command checks rows, expected huggingface or multimodal"
        )
    refuse_unwritable(folder, "--output")
    dataset, wanted = open_all_rows(config, options.seq_length, options.rows)
    if options.show > 0:
        spread = np.unique(np.linspace(0, len(wanted) - 1, options.show).astype(int))
        show_samples(dataset, [wanted[place] for place in spread])
    facts = facts_of_rows(dataset, wanted, decode=options.decode, workers=options.num_workers)
    report = summarise(facts, dataset, config, options)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    lengths = [length for row in facts for length in row.lengths]
    if lengths and has_extra("plots"):
        draw_lengths(lengths, dataset.max_length, folder / "lengths.png")
    elif lengths:
        print("lengths.png is left out: it needs matplotlib, which isn't installed; pip install 'mindspeed_mm[plots]'")
    _print_summary(report, folder)
    raises = config.dataset_param.basic_parameters.on_bad_sample == "raise"
    ends = any(reason != "longer than the length limit" for reason in report["left_out"])
    return 1 if not lengths or (raises and ends) else 0


@contextmanager
def _announced(folder: Path) -> Iterator[None]:
    """Print at the start where the command writes, and on an error that it wrote no report."""
    print(f"the report goes to {folder.resolve()}; nothing else is written, and no token cache is made", flush=True)
    try:
        yield
    except BaseException:
        print(f"no complete report was written to {folder.resolve()}", flush=True)
        raise


def open_all_rows(config: DataConfig, max_length: int | None, rows: int | None) -> tuple[RecordDataset, list[int]]:
    """Open every row of the files, including those that a run would leave out.

    Args:
        config: data.json.
        max_length: longest row in tokens; None: its cutoff_len, if it has one.
        rows: of how many the numbers are returned, spread evenly; None: of all.
    """
    from mindspeed_mm.data.adapter import check_model_path
    from mindspeed_mm.data.loading.build import open_rows_of
    from mindspeed_mm.data.loading.dataset import LazyEncoder, RecordDataset
    from mindspeed_mm.data.loading.model_match import read_model_config
    from mindspeed_mm.data.sources.registry import find_data_sets
    from mindspeed_mm.models.transformers.adapters import find_adapter

    param = config.dataset_param
    path = param.preprocess_parameters.model_name_or_path
    check_model_path(path)
    basic = param.basic_parameters.model_copy(update={"on_bad_sample": "skip", "streaming": False})
    param = param.model_copy(update={"basic_parameters": basic})
    source = open_rows_of(param, find_data_sets(basic.dataset, basic.dataset_dir, param.attr, basic.max_samples))
    limit = basic.cutoff_len if max_length is None else max_length
    adapter = find_adapter(SimpleNamespace(init_from_hf_path=path))
    dataset = RecordDataset(source, LazyEncoder(param, limit, adapter), np.arange(len(source)))
    dataset.check_model(read_model_config(path), f"{path}/config.json")
    if rows is None or rows >= len(source):
        return dataset, list(range(len(source)))
    if rows < 1:
        raise ConfigError(f"--rows {rows}: expected at least 1")
    return dataset, np.unique(np.linspace(0, len(source) - 1, rows).astype(int)).tolist()


def facts_of_rows(dataset: RecordDataset, wanted: Sequence[int], *, decode: bool, workers: int) -> list[RowFacts]:
    """Return the result of checking each of these rows.

    Args:
        dataset: from `open_all_rows`.
        wanted: numbers of rows.
        decode: decode every medium, too.
        workers: processes that read rows.
    """
    return list(look_at(_Facts(dataset, wanted, decode), workers))


class _Facts:
    """Facts of rows, a chunk at a time, computed in the loader's workers."""

    def __init__(self, dataset: RecordDataset, wanted: Sequence[int], decode: bool) -> None:
        self._dataset, self._wanted, self._decode = dataset, wanted, decode

    def __len__(self) -> int:
        return -(-len(self._wanted) // CHUNK)

    def __getitem__(self, chunk: int) -> list[RowFacts]:
        return [self._of(index) for index in self._wanted[chunk * CHUNK : (chunk + 1) * CHUNK]]

    def _of(self, index: int) -> RowFacts:
        found = self._dataset.prepare(index)
        if isinstance(found, BadSample):
            return RowFacts(fault=found.reason, note=str(found))
        first = found[0]
        if not any((piece.labels != -100).any() for piece in found):
            return RowFacts(fault="nothing to train on", note=f"{self._dataset.where(index)}: nothing to train on")
        facts = RowFacts(
            [len(piece) for piece in found],
            sum(int((piece.labels != -100).sum()) for piece in found),
            dict(Counter(medium.ref.kind for medium in first.media)),
            sum(medium.patches for medium in first.media),
            sum(medium.squared_patches for medium in first.media),
            first.whole_length if sum(map(len, found)) < first.whole_length else 0,
        )
        if self._decode and first.media:
            sample: dict[str, Any] = self._dataset.get(index)
            if "fault" in sample:
                facts = RowFacts(fault=sample["fault"], note=sample["note"])
        return facts


def summarise(
    facts: Sequence[RowFacts],
    dataset: RecordDataset,
    config: DataConfig,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Summarise the facts of rows.

    Returns:
        `rows`, `looked_at`, `lengths` (min, median, mean, p95, p99, max, limit), `tokens`, `targets`, `cut`, `left_out`
        (reason → count and first rows), `media` (kind → rows, media), `steps_per_epoch` and `padding` for rows padded
        to the longest of their micro-batch and for packs.
    """
    lengths = [length for row in facts for length in row.lengths]
    faults = Counter(row.fault for row in facts if row.fault)
    share = len(dataset.source) / max(1, len(facts))
    report: dict[str, Any] = {
        "rows": len(dataset.source),
        "looked_at": len(facts),
        "samples": len(lengths),
        "tokens": sum(lengths),
        "targets": sum(row.targets for row in facts),
        "lengths": _quantiles(lengths) | {"limit": dataset.max_length},
        "cut": sum(row.cut_from > 0 for row in facts),
        "left_out": {
            reason: {"rows": count, "first": [row.note for row in facts if row.fault == reason][:_SHOWN]}
            for reason, count in faults.most_common()
        },
        "media": {
            kind: {
                "rows": sum(kind in row.media for row in facts),
                "media": sum(row.media.get(kind, 0) for row in facts),
            }
            for kind in sorted({kind for row in facts for kind in row.media})
        },
    }
    if lengths:
        report["batches"] = _batches(facts, dataset, config, options, share)
    return report


def _sizes(facts: Sequence[RowFacts]) -> list[SampleSize]:
    """Sizes of all samples."""
    from mindspeed_mm.data.media.media import SampleSize

    return [SampleSize(length, row.patches, row.squared_patches) for row in facts for length in row.lengths]


def _quantiles(lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    p95, p99 = np.percentile(lengths, [95, 99])
    return {
        "min": min(lengths),
        "median": statistics.median(lengths),
        "mean": statistics.fmean(lengths),
        "p95": float(p95),
        "p99": float(p99),
        "max": max(lengths),
    }


def _batches(
    facts: Sequence[RowFacts], dataset: RecordDataset, config: DataConfig, options: argparse.Namespace, share: float
) -> dict[str, Any]:
    """Steps of an epoch and the share of padding, for rows as they come and for packs."""
    from mindspeed_mm.data.plan.cost import CostModel
    from mindspeed_mm.data.plan.packing import choose_packs

    sizes = _sizes(facts)
    lengths = [size.tokens for size in sizes]
    rows, micro = options.global_batch_size, options.micro_batch_size
    if rows % micro:
        raise ConfigError(f"--global-batch-size {rows} is not a multiple of --micro-batch-size {micro}")
    order = np.random.RandomState(0).permutation(len(lengths))
    shuffled = np.asarray(lengths)[order]
    groups = [shuffled[start : start + micro] for start in range(0, len(shuffled), micro)]
    positions = sum(len(group) * int(group.max()) for group in groups)
    basic = config.dataset_param.basic_parameters
    padded = {"steps_per_epoch": int(len(lengths) * share // rows), "padding": 1 - sum(lengths) / positions}
    result: dict[str, Any] = {"padded": padded, "is_packed": basic.packing or basic.neat_packing}
    if dataset.max_length is None:
        return result
    costs = CostModel.from_config(dataset.param.preprocess_parameters.model_name_or_path)
    waiting, packs = [sizes[item] for item in order], 0
    wanted = (rows + 16) * dataset.max_length
    while waiting:
        tokens = np.cumsum([size.tokens for size in waiting])
        ready = waiting[: int(np.searchsorted(tokens, wanted)) + 1]
        chosen = choose_packs(
            [size.tokens for size in ready], [costs.cost(size) for size in ready], dataset.max_length, rows
        )
        packs += len(chosen)
        gone = {item for pack in chosen for item in pack}
        waiting = [size for item, size in enumerate(waiting) if item not in gone]
    result["packed"] = {
        "steps_per_epoch": int(packs * share // rows),
        "padding": 1 - sum(lengths) / (packs * dataset.max_length),
        "samples_per_pack": len(lengths) / packs,
    }
    return result


def draw_lengths(lengths: Sequence[int], limit: int | None, path: Path) -> None:
    """Draw the histogram of sample lengths, with the limit, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.hist(lengths, bins=min(80, max(10, len(set(lengths)))), color="#3b6ea5")
    if limit is not None:
        axes.axvline(limit, color="#c0392b", linestyle="--", label=f"limit {limit}")
        axes.legend()
    axes.set(xlabel="tokens of a sample", ylabel="samples", title=f"{len(lengths)} samples, {sum(lengths)} tokens")
    working = working_file(path)
    figure.savefig(working, format="png")
    os.replace(working, path)


def _print_summary(report: dict[str, Any], folder: Path) -> None:
    print(f"rows: {report['rows']}" + _of_which(report))
    if report["samples"]:
        found = report["lengths"]
        print(
            f"samples: {report['samples']}, tokens: {report['tokens']} "
            f"({report['targets'] / report['tokens']:.1%} of them trained)"
        )
        print(
            f"length: min {found['min']}, median {found['median']:g}, mean {found['mean']:.1f}, "
            f"p95 {found['p95']:.0f}, p99 {found['p99']:.0f}, max {found['max']}, limit {found['limit'] or 'none'}; "
            f"{report['cut']} rows cut"
        )
    for kind, count in report["media"].items():
        print(f"{kind}: {count['media']} in {count['rows']} rows")
    for reason, entry in report["left_out"].items():
        print(f"left out: {entry['rows']} × {reason}")
        for note in entry["first"]:
            print(f"    {note}")
    for name in ("padded", "packed"):
        batches = report.get("batches", {}).get(name)
        if batches:
            packs = f", {batches['samples_per_pack']:.1f} samples a row" if name == "packed" else ""
            print(f"{name}: {batches['steps_per_epoch']} steps an epoch, {batches['padding']:.1%} padding{packs}")
    is_drawn = report["samples"] and has_extra("plots")
    drawn = f", {folder.resolve() / 'lengths.png'}" if is_drawn else ""
    print(f"written: {folder.resolve() / 'report.json'}{drawn}")


def _of_which(report: dict[str, Any]) -> str:
    return "" if report["looked_at"] == report["rows"] else f" ({report['looked_at']} of them looked at)"
