"""Encode every row of a data set once, and write the features."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.data.generation.build import build_generation_datasets
from mindspeed_mm.data.generation.dataset import ShapedDataset
from mindspeed_mm.data.generation.feature_files import FeatureWriter, not_finite
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.data.workers import WorkerFailure, forked, next_batch, start_loader, start_worker, warm_up
from mindspeed_mm.models.generation.sample_encoder import SampleEncoder
from mindspeed_mm.tools.feature_extraction.progress import ExtractionProgress
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import ConfigError, DataError, MMError
from mindspeed_mm.utils.log import logger, notice

_MEGABYTE = 1 << 20


def open_clips(config: GenerationDataConfig, rule: GenerationRule, validation: bool) -> ShapedDataset:
    """Open the rows of data.json to encode; rows that can't be used are left out and counted.

    Args:
        config: typed data.json.
        rule: the samples that the model takes.
        validation: take the rows of `val_data_path`, as in an evaluation.

    Raises:
        ConfigError: data.json is of features already, or names no validation data.
        DataError: a file can't be used.
    """
    param = config.dataset_param
    if param.dataset_type == "feature":
        raise ConfigError(
            f"{config.file}: 'dataset_param.dataset_type' is feature; features are made of clips: give the data.json "
            "of these (t2v, i2v or t2i)"
        )
    if validation and not param.basic_parameters.val_data_path:
        raise ConfigError(f"{config.file}: --validation, but 'basic_parameters.val_data_path' names no data")
    # validation rows are set apart, and captions left out, when features are trained on
    basic = param.basic_parameters.model_copy(update={"val_rate": None})
    whole = config.model_copy(update={"dataset_param": param.model_copy(update={"basic_parameters": basic})})
    train, valid = build_generation_datasets(whole, replace(rule, text_dropout=0.0))
    dataset = valid if validation else train
    assert dataset is not None
    return dataset


class Extraction:
    """Computes the features of this rank's share of the rows: rank r takes the rows r, r + ranks, …

    Args:
        dataset: clips.
        encoder: computes latents, text states and conditions.
        output: folder of the features.
        made_from: the settings that decide them; see `FeatureWriter`.
        rank, world_size: rank of this process, and number of processes that share the rows.
        needs_text: whether captions are encoded.
        dtype: as_encoded, bf16 or fp32: dtype of floating-point tensors except masks.
        batch_size: samples that are encoded together.
        num_workers: processes that read clips.
        shard_bytes: size after which features are written durably.

    Raises:
        ConfigError: the folder has features of other settings.
    """

    def __init__(
        self,
        dataset: ShapedDataset,
        encoder: SampleEncoder,
        output: str,
        made_from: Mapping[str, Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        needs_text: bool = True,
        dtype: str = "as_encoded",
        batch_size: int = 1,
        num_workers: int = 0,
        shard_bytes: int = 256 * _MEGABYTE,
    ) -> None:
        self._dataset, self._encoder, self._needs_text = dataset, encoder, needs_text
        self._rank, self._world_size = rank, world_size
        self._dtype = None if dtype == "as_encoded" else to_torch_dtype(dtype)
        self._batch_size, self._num_workers = batch_size, num_workers
        self._output = output
        self._writer = FeatureWriter(output, rank, world_size, made_from, shard_bytes)
        self._faults: Counter[str] = Counter()
        self._bytes = self._made = 0

    def run(self) -> None:
        """Compute the missing features.

        Raises:
            DataError: a row can't be used, and `on_bad_sample` is raise; or reading one failed.
        """
        rows = self._writer.rows(len(self._dataset))
        share = len(range(self._rank, len(self._dataset), self._world_size))
        started = time.perf_counter()
        waiting: dict[int, list[dict[str, Any]]] = {}
        with self._writer as writer, ExtractionProgress("features", len(rows), shown=self._rank == 0) as progress:
            if self._needs_text and self._rank == 0:
                # in batches of the same size as other captions: kernels may round differently for one than for several
                states = self._encoder.encode_captions([""] * self._batch_size)
                empty = {f"text.{name}": self._kept(name, value[0]) for name, value in states.items()}
                if problem := not_finite(empty):
                    raise DataError(
                        f"the empty caption: the encoders' {problem}; give text_encoder.dtype another value"
                    )
                writer.write_empty(empty)
            for sample in self._samples(rows):
                progress.advance()
                if "fault" in sample:
                    self._leave_out(sample)
                    continue
                group = waiting.setdefault(sample["bucket"], [])
                group.append(sample)
                if len(group) == self._batch_size:
                    self._write(waiting.pop(sample["bucket"]))
            for group in waiting.values():
                self._write(group)
        self._report(len(rows), share, time.perf_counter() - started)

    def _samples(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        from torch.utils.data import DataLoader

        workers = min(self._num_workers, len(rows))
        if workers:
            warm_up(self._dataset)
        options = {"worker_init_fn": start_worker, "prefetch_factor": 2, **forked(workers)} if workers else {}
        loader: Any = DataLoader(_Rows(self._dataset, rows), batch_size=None, num_workers=workers, **options)
        running = start_loader(loader)
        for _ in rows:
            yield next_batch(running, workers)

    def _write(self, samples: Sequence[dict[str, Any]]) -> None:
        batch = self._dataset.collate_fn(list(samples))
        encoded = self._encoder.encode_clips(batch)
        tensors = {name: encoded[name] for name in ("latents", "latents_std") if encoded[name] is not None}
        tensors |= {f"cond.{name}": value for name, value in encoded["conditions"].items()}
        if self._needs_text:
            states = self._encoder.encode_captions(batch["captions"])
            tensors |= {f"text.{name}": value for name, value in states.items()}
        on_host = {name: self._kept(name, value) for name, value in tensors.items()}
        for place, sample in enumerate(samples):
            own = {name: value[place] for name, value in on_host.items()}
            if problem := not_finite(own):
                self._judge(f"{self._dataset.where(sample['row'])}: the encoders' {problem}")
                continue
            shape = self._dataset.shapes[sample["bucket"]]
            self._writer.add(sample["row"], own, shape, sample["caption"])
            self._bytes += sum(value.nbytes for value in own.values())
            self._made += 1

    def _judge(self, note: str) -> None:
        """Leave out a row with features that aren't finite, or raise, as data.json asks for rows that can't be used."""
        note += "; encoders of another dtype (ae.dtype, text_encoder.dtype in model.json) may give numbers"
        if self._dataset.dataset_param.basic_parameters.on_bad_sample == "raise":
            raise DataError(note)
        self._leave_out({"fault": "features aren't finite", "note": note})

    def _kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host, in the dtype of the features."""
        converts = self._dtype is not None and value.is_floating_point() and not name.endswith("mask")
        return value.detach().to("cpu", self._dtype if converts else None)

    def _leave_out(self, sample: Mapping[str, Any]) -> None:
        self._faults[sample["fault"]] += 1
        if self._faults[sample["fault"]] == 1:
            logger.warning(f"left out: {sample['note']}")

    def _report(self, rows: int, share: int, seconds: float) -> None:
        of = f"rank {self._rank} of {self._world_size}: " if self._world_size > 1 else ""
        before = f", {share - rows} were there before" if share > rows else ""
        rate = self._made / max(seconds, 1e-9)
        logger.info(
            f"{of}{self._made} features made in {seconds:.1f} s ({rate:.2f} rows/s), {self._bytes / _MEGABYTE:.1f} MB "
            f"in {Path(self._output).absolute()}{before}"
        )
        if self._faults:
            reasons = ", ".join(f"{count} × {reason}" for reason, count in self._faults.most_common())
            logger.warning(f"{of}{self._faults.total()} rows left out: {reasons}")
        if not self._needs_text:
            notice("captions aren't encoded: train with load_text_features false and the text encoder in model.json")


class _Rows(Dataset):
    """Rows with their buckets, for workers; errors are values, as exceptions of workers lose their type."""

    def __init__(self, dataset: ShapedDataset, rows: Sequence[int]) -> None:
        self._dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any] | WorkerFailure:
        index = self._rows[place]
        try:
            bucket = self._dataset.bucket_of(index) or 0
            return {**self._dataset.get(index, bucket), "row": index, "bucket": bucket}
        except MMError as error:
            return WorkerFailure(str(error))
