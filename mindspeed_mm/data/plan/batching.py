"""Plan batches by data.json and the flags: packed, balanced, grouped or in plain order."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.utils.data import Dataset

from mindspeed_mm.configs.data_config import DataloaderParam, DatasetParam
from mindspeed_mm.data.plan.cost import CostModel
from mindspeed_mm.data.plan.fixed_plan import Balance, FixedPlanner
from mindspeed_mm.data.plan.grouping import Grouping
from mindspeed_mm.data.plan.measuring import Measurer
from mindspeed_mm.data.plan.order import FixedOrder, Order, StreamOrder
from mindspeed_mm.data.plan.pack_plan import PackPlanner
from mindspeed_mm.data.plan.plan import BatchLayout, Planner
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_BASIC = "dataset_param.basic_parameters"


@dataclass(frozen=True)
class Batching:
    """The settings of batches that come from flags.

    Attributes:
        balance: balance of costs within a global batch; packs are always balanced.
        dynamic_length: dynamic batching: the samples of a row of the batch have at most this many tokens together;
            None: rows are packed only if data.json asks for it, up to the data set's length limit.
        least_waiting: dynamic batching: least number of samples that are read in advance.
        costs: the measure of balance.
    """

    balance: Balance = field(default_factory=Balance)
    dynamic_length: int | None = None
    least_waiting: int = 0
    costs: CostModel = field(default_factory=CostModel)


def asks_for_packs(param: DatasetParam | None) -> str | None:
    """Return the key of data.json that asks for packs; None: none does."""
    if param is None:
        return None
    for name in ("packing", "neat_packing"):
        if getattr(param.basic_parameters, name):
            return f"{_BASIC}.{name}"
    return "dataset_param.attr.packing" if param.attr.packing else None


def pack_capacity(dataset: Dataset, batching: Batching) -> int | None:
    """Return the tokens of a pack; None: samples aren't packed.

    Raises:
        ConfigError: Packs without a limit, or of a data set that can't be packed.
    """
    key = asks_for_packs(getattr(dataset, "param", None))
    if batching.dynamic_length is not None:
        key = "--use-txt-dynamic-batching"
    if key is None:
        return None
    _require_sizes(dataset, key)
    if callable(getattr(dataset, "collate_fn", None)):
        raise ConfigError(
            f"{key}: samples are packed by our own collator, and the data set has a collate_fn of its own"
        )
    capacity = batching.dynamic_length or getattr(dataset, "max_length", None)
    if capacity is None:
        raise ConfigError(f"{key}: packs need a length limit; give --seq-length, the tokens of a pack")
    return capacity


def build_planner(
    dataset: Dataset,
    layout: BatchLayout,
    param: DataloaderParam,
    batching: Batching,
    *,
    train: bool,
    seed: int,
    num_workers: int = 0,
    capacity: int | None = None,
) -> Planner:
    """Build the plan of a run.

    Args:
        dataset: Map-style, with a length or `has_row(index)`; `measure(index)` where sizes are needed. If it has
            `shapes`, every global batch is of one of them; if it has `names_epochs`, samples are read by epoch.
        layout: Sizes of a batch.
        param: `dataloader_param`.
        batching: Settings from the flags.
        train: False for evaluation: file order, every row once a pass, the last global batch filled up.
        seed: Decides the order of rows.
        num_workers: Worker processes of the loader; half as many plan and measure, and without any this process does.
        capacity: The result of `pack_capacity`.

    Raises:
        ConfigError: The data set can't measure its rows, and something needs their sizes.
        DataError: No rows, or fewer than one global batch with drop_last.
    """
    order = _order(dataset, train and param.shuffles, seed)
    measurer = Measurer(dataset, (num_workers + 1) // 2, lambda: order.num_rows)
    names_epochs = getattr(dataset, "names_epochs", False)
    if (shapes := getattr(dataset, "shapes", None)) is not None:
        by_shape = Grouping("bucket", shapes=shapes) if len(shapes) > 1 else None
        drop_last = train and param.drop_last
        if by_shape and train and param.sampler_type == "SequentialSampler":
            notice("dataloader_param.sampler_type SequentialSampler: within a window, rows are put together by bucket")
        return FixedPlanner(order, layout, drop_last, measurer, by_shape, names_epochs=names_epochs)
    if not train:
        return FixedPlanner(order, layout, drop_last=False, names_epochs=names_epochs)
    grouping = _grouping(param)
    if capacity is not None:
        if grouping is not None:
            notice(f"dataloader_param.sampler_type {param.sampler_type} has no effect here: packs are of like size")
        return PackPlanner(order, layout, capacity, measurer, batching.costs, batching.least_waiting)
    if grouping is not None:
        _require_sizes(dataset, f"dataloader_param.sampler_type {param.sampler_type}")
    elif batching.balance:
        _require_sizes(dataset, "--use-data-balance" if batching.balance.ranks else "--use-image-mbs-data-balance")
    return FixedPlanner(
        order, layout, param.drop_last, measurer, grouping, batching.balance, batching.costs, names_epochs
    )


def _order(dataset: Dataset, shuffle: bool, seed: int) -> Order:
    try:
        return FixedOrder(len(dataset), shuffle, seed)
    except TypeError:
        if not callable(getattr(dataset, "has_row", None)):
            raise ConfigError(
                f"{type(dataset).__name__}: a data set without a length needs has_row(index), which says whether there "
                "is such a row"
            ) from None
    return StreamOrder(dataset.has_row, dataset.param.basic_parameters.buffer_size, shuffle, seed)


def _grouping(param: DataloaderParam) -> Grouping | None:
    if param.priority_mode is not None and param.sampler_type != "BucketBatchSampler":
        notice(f"dataloader_param.priority_mode has no effect here: sampler_type is {param.sampler_type}")
    if param.sampler_type == "LengthGroupedSampler":
        return Grouping("alike", "tokens")
    if param.sampler_type == "BucketBatchSampler":
        return Grouping("even" if param.priority_mode == "data_reordering_img" else "alike", "patches")
    return None


def _require_sizes(dataset: Dataset, what: str) -> None:
    if not callable(getattr(dataset, "measure", None)):
        raise ConfigError(
            f"{what}: needs to know how long samples are before they are made; give {type(dataset).__name__} a method "
            "measure(index) that returns a list with one mindspeed_mm.data.media.media.SampleSize, or turn it off"
        )
