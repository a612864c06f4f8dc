"""Data sets and loaders: `build_mm_dataset` and `build_mm_dataloader` build them from data.json.

Nothing that takes long to import is imported before one of them is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.data import Dataset

    from mindspeed_mm.configs.data_config import DataloaderParam, DatasetParam
    from mindspeed_mm.data.adapter import DataAdapter
    from mindspeed_mm.data.loading.dataset import RecordDataset
    from mindspeed_mm.data.loading.loader import MMDataLoader
    from mindspeed_mm.data.params import RawSection
    from mindspeed_mm.data.plan.batching import Batching

__all__ = ["build_mm_dataloader", "build_mm_dataset"]


def build_mm_dataset(
    dataset_param: DatasetParam | RawSection,
    *,
    max_length: int | None = None,
    adapter: DataAdapter | None = None,
    seed: int = 1234,
) -> RecordDataset | tuple[RecordDataset, RecordDataset]:
    """Build the data set that `dataset_param` of data.json describes.

    Args:
        dataset_param: ConfigReader, dict or typed `DatasetParam`.
        max_length: Longest sample in tokens (`--seq-length`); None takes `cutoff_len`, and without it there is none.
        adapter: What is special about the model family; None suits Qwen-VL-like and text models.
        seed: Decides which rows `val_rate` takes for validation.

    Returns:
        The data set; (training, validation) if data.json names a `val_dataset` or a `val_rate`.

    Raises:
        ConfigError: Unknown keys, wrong values, another dataset_type, no model directory.
        DataError: A file or one of its first rows can't be used.
    """
    from mindspeed_mm.data.loading.build import build_dataset
    from mindspeed_mm.data.params import dataset_param_of

    return build_dataset(dataset_param_of(dataset_param), max_length, adapter, seed)


def build_mm_dataloader(
    dataset: Dataset,
    dataloader_param: DataloaderParam | RawSection | None,
    process_group: ProcessGroup | None = None,
    consumed_samples: int = 0,
    dataset_param: object = None,
    *,
    micro_batch_size: int,
    global_batch_size: int,
    num_workers: int = 0,
    seed: int = 1234,
    dp_rank: int = 0,
    dp_size: int = 1,
    adapter: DataAdapter | None = None,
    train: bool = True,
    batching: Batching | None = None,
) -> MMDataLoader:
    """Build the loader of one data-parallel rank.

    Args:
        dataset: A data set of `build_mm_dataset`, or a map-style one of the user's own with samples of the same form;
            its `collate_fn`, if it has one, is used.
        dataloader_param: ConfigReader, dict or typed `DataloaderParam`; None takes the defaults.
        process_group: Data-parallel group; where it is given, `dp_rank` and `dp_size` are taken from it.
        consumed_samples: Position to begin at: optimizer steps × global batch size.
        dataset_param: Unused; published callers pass it.
        micro_batch_size: Rows of a micro-batch of one rank.
        global_batch_size: Rows of an optimizer step over all ranks.
        num_workers: Worker processes; 0 loads in this process.
        seed: Decides the order of rows.
        dp_rank: This data-parallel rank.
        dp_size: Number of data-parallel ranks.
        adapter: As in `build_mm_dataset`; None takes the data set's.
        train: False for evaluation: file order, every row once a pass, the last global batch filled up, and every
            `iter()` begins anew; never packed.
        batching: Balance and dynamic batching, as the flags set them; None: neither. Packing is set in data.json.

    Returns:
        An endless loader of micro-batches.

    Raises:
        ConfigError: Unknown keys or sampler names, batch sizes that don't divide, packs without a length limit, or a
            data set that can't measure its rows where sizes are needed.
        DataError: Fewer rows than one global batch, with drop_last.
    """
    from mindspeed_mm.data.adapter import DefaultAdapter
    from mindspeed_mm.data.loading.collate import Collator
    from mindspeed_mm.data.loading.loader import MMDataLoader
    from mindspeed_mm.data.loading.sampler import PlannedBatches
    from mindspeed_mm.data.params import dataloader_param_of
    from mindspeed_mm.data.plan.batching import Batching, build_planner, pack_capacity
    from mindspeed_mm.data.plan.plan import BatchLayout

    param = dataloader_param_of(dataloader_param)
    batching = batching or Batching()
    if process_group is not None:
        dp_rank, dp_size = process_group.rank(), process_group.size()
    capacity = pack_capacity(dataset, batching) if train else None
    layout = BatchLayout(micro_batch_size, global_batch_size, dp_size)
    planner = build_planner(
        dataset, layout, param, batching, train=train, seed=seed, num_workers=num_workers, capacity=capacity
    )
    planner.go_to({"position": consumed_samples})
    collate = getattr(dataset, "collate_fn", None)
    if not callable(collate):
        adapter = adapter or getattr(dataset, "adapter", None) or DefaultAdapter()
        collate = Collator(adapter, param.collate_param, dataset)
    sampler = PlannedBatches(planner, dp_rank)
    return MMDataLoader(dataset, sampler, collate, param, num_workers, not train, capacity, consumed_samples)
