"""From what a user's datasets provider returns to iterators that the loop can use and resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.batching import Batching, pack_capacity
from mindspeed_mm.data.cost import CostModel
from mindspeed_mm.data.counting import CountingIterator
from mindspeed_mm.data.fixed_plan import Balance
from mindspeed_mm.data.foreign import IndexedLoader, StreamLoader, UserLoader
from mindspeed_mm.data.loader import MMDataLoader
from mindspeed_mm.data.model_match import read_model_config
from mindspeed_mm.data.plan import Layout
from mindspeed_mm.data.rank_check import (
    Gather,
    check_sampler,
    check_stream,
    require_micro_batch_size,
    settle_length,
    settle_parts,
)
from mindspeed_mm.data.usable import refuse_unusable, require_media_packages
from mindspeed_mm.data.user_order import DataSetOrder, LoaderOrder
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.log import info_rank0, notice


@dataclass
class ValidData:
    """Validation data: the same batches at every evaluation.

    Attributes:
        loader: yields micro-batches of this rank.
        global_batches: in one pass; None: unknown.
    """

    loader: Any
    global_batches: int | None

    def __post_init__(self) -> None:
        self._empty: set[int] = set()

    def fresh_iterator(self) -> Iterator[Any]:
        """Micro-batches from the start, pass after pass."""
        self._empty.clear()
        for number, batch in enumerate(_endless(self.loader)):
            is_ours = isinstance(self.loader, MMDataLoader) and isinstance(batch, Mapping)
            if is_ours and not int(batch.get("num_rows", 1)):
                self._empty.add(number)
            yield batch

    def is_filler(self, number: int) -> bool:
        """Whether the micro-batch of this number, read from the last fresh iterator, only fills up a global batch."""
        return number in self._empty or (isinstance(self.loader, UserLoader) and self.loader.is_filler(number))

    def limit_batches(self, wanted: int) -> int:
        """`wanted` global batches, at most one pass."""
        return wanted if self.global_batches is None else max(1, min(wanted, self.global_batches))


@dataclass
class RunData:
    """The data of a run.

    Attributes:
        train: endless, counts what passes.
        valid: None: no evaluation.
        train_rows, global_batches_per_epoch: None for data without a length; packs have a fraction.
        why_no_length: a clause that says why there is none.
        state_dict: the position after the batches handed out.
        check_streams: ends the run with a ConfigError where all ranks read the same rows of iterables; reads the first
            micro-batches of these. Other data have been checked.
        where: names the file and row of a number in `row_ids`; None: unknown.
        faults: why rows were left out on this rank so far, counted.
    """

    train: CountingIterator
    valid: ValidData | None
    train_rows: int | None
    global_batches_per_epoch: float | None
    close: Callable[[], None]
    why_no_length: str = "this one is streamed"
    state_dict: Callable[[], dict[str, Any]] | None = None
    check_streams: Callable[[], None] = lambda: None
    where: Callable[[int], str] | None = None
    faults: Callable[[], Mapping[str, int]] = dict


def data_json_provider(args: Any, adapter: DataAdapter | None = None) -> tuple[Any, Any, None]:
    """Build the training and validation loaders that data.json (`args.mm.data`) and the flags describe.

    Args:
        args: the run's Namespace, with `data_parallel_rank` and `data_parallel_size`.
        adapter: what is special about the model family; None suits Qwen-VL-like and text models.

    Returns:
        (training loader, validation loader or None, None).

    Raises:
        ConfigError, DataError: what can't be used, and what to write instead.
    """
    from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset

    data = DataConfig.from_dict(args.mm.data)
    batching = _batching(args)
    limits = [length for length in (args.seq_length, batching.dynamic_length) if length is not None]
    max_length = min(limits, default=None)
    datasets = build_mm_dataset(data.dataset_param, max_length=max_length, adapter=adapter, seed=args.seed)
    train, valid = datasets if isinstance(datasets, tuple) else (datasets, None)
    require_media_packages(train.source)
    train.check_model(*_model_config(args))
    if batching.balance or pack_capacity(train, batching) is not None:
        batching = replace(batching, costs=_costs(args))

    def loader(dataset: Any, *, training: bool) -> Any:
        return build_mm_dataloader(
            dataset,
            data.dataloader_param,
            consumed_samples=args.consumed_train_samples if training else 0,
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            num_workers=args.num_workers,
            seed=args.seed,
            dp_rank=args.data_parallel_rank,
            dp_size=args.data_parallel_size,
            train=training,
            batching=batching,
        )

    return loader(train, training=True), loader(valid, training=False) if valid is not None else None, None


def _model_config(args: Any) -> tuple[Any, str]:
    """transformers' configuration of the model that is trained (None: it isn't known), and what it was read from."""
    model = getattr(args.mm, "model", None)
    folder = getattr(model, "init_from_hf_path", None)
    if model is not None and not args.use_torch_fsdp2 and not folder:
        return VLMModelConfig.from_dict(model).hf_config(), "model.json"
    return read_model_config(folder), f"{folder}/config.json"


def _batching(args: Any) -> Batching:
    balance = Balance(args.use_data_balance or args.encoder_dp_balance, args.use_image_mbs_data_balance)
    if not args.use_txt_dynamic_batching:
        return Batching(balance)
    return Batching(balance, args.max_seq_len, args.dynamic_batch_buffer_size)


def _costs(args: Any) -> CostModel:
    """The cost model of the model that is trained; a frozen part costs less."""
    model = getattr(args.mm, "model", None)
    folder = getattr(model, "init_from_hf_path", None)
    if not folder:
        return CostModel()
    typed = TransformersModelConfig if args.use_torch_fsdp2 else VLMModelConfig
    config = typed.from_dict(model)
    return CostModel.from_config(
        folder, tower_trained=not config.freeze_vision_encoder, text_trained=not config.freeze_text_decoder
    )


def build_run_data(
    provider: Callable[..., Any],
    args: Any,
    data_parallel_rank: int,
    data_parallel_size: int,
    gather: Gather | None = None,
) -> RunData:
    """Call the provider and bring its answer into form.

    Args:
        provider: () or (numbers of samples) → (train, valid, test); each a data set, a DataLoader or None. A tuple of
            fewer, or the training data alone, will do.
        args: micro_batch_size, global_batch_size, num_microbatches, num_workers, seed, consumed_train_samples,
            train_iters, eval_iters, eval_interval; data_state, if there is one: what `RunData.state_dict` returned in
            the run that this one goes on from.
        gather: what every rank of the run gave, by rank; None: there is one.

    Raises:
        ConfigError: a loader of the user's own whose batches or ranks don't fit the run's.
        DataError: no training data, or too few rows.
    """
    answer = provider(_wanted_samples(args)) if inspect.signature(provider).parameters else provider()
    train, valid, *_ = (*answer, None, None) if isinstance(answer, (tuple, list)) else (answer, None, None)
    if train is None:
        raise DataError("train_valid_test_datasets_provider returned no training data (None)")
    train_loader = _as_loader(train, args, data_parallel_rank, data_parallel_size, gather, training=True)
    valid_data = None
    if valid is not None and args.eval_iters and args.eval_interval:
        loader = _as_loader(valid, args, data_parallel_rank, data_parallel_size, gather, training=False)
        valid_data = ValidData(loader, loader.global_batches_per_epoch)
    _go_to_checkpoint(train_loader, args)
    adapter = getattr(getattr(train_loader, "dataset", None), "adapter", None)
    rows = train_loader.num_rows
    info_rank0(f"training data: {rows if rows is not None else 'unknown number of'} rows")
    if isinstance(train_loader, MMDataLoader):
        refuse_unusable(train_loader.dataset, rows)
    loaders = {"training": train_loader, **({"validation": valid_data.loader} if valid_data else {})}

    def close() -> None:
        for loader in loaders.values():
            loader.close()

    def check_streams() -> None:
        for what, loader in loaders.items():
            is_kept = what == "training" or not getattr(loader, "is_used_up", False)
            if gather is not None and isinstance(loader, StreamLoader) and is_kept:
                check_stream(loader, what, gather)

    return RunData(
        CountingIterator(_endless(train_loader), args.micro_batch_size, adapter),
        valid_data,
        rows,
        train_loader.global_batches_per_epoch,
        close,
        _why_no_length(train_loader),
        train_loader.state_dict,
        check_streams,
        getattr(train_loader.dataset, "where", None) if isinstance(train_loader, MMDataLoader) else None,
        (lambda: train_loader.faults) if isinstance(train_loader, MMDataLoader) else dict,
    )


def _go_to_checkpoint(loader: Any, args: Any) -> None:
    """Take the position that a checkpoint holds; one from before positions were kept has consumed samples only.

    The state of a user's own loader is not asked for: that of a worker is no position.
    """
    state = getattr(args, "data_state", None)
    consumed = {"consumed_samples": args.consumed_train_samples}
    if isinstance(loader, UserLoader):
        loader.go_to(consumed if state is None else state)
    elif state is not None:
        loader.load_state_dict(state)
    elif args.consumed_train_samples and loader.capacity is not None:
        loader.load_state_dict(consumed)


def _why_no_length(loader: Any) -> str:
    if isinstance(loader, MMDataLoader) and loader.capacity is not None:
        return (
            "samples are packed, so that the steps of an epoch aren't known before its rows have been read (a token "
            "cache, preprocess_on_fly: false, knows them)"
        )
    return "this one is streamed"


def _wanted_samples(args: Any) -> list[int]:
    iters = args.train_iters or 0
    evaluations = iters // args.eval_interval + 1 if args.eval_interval else 0
    each = (args.eval_iters or 0) * args.global_batch_size
    return [iters * args.global_batch_size, evaluations * each, each]


def _as_loader(
    data: Any, args: Any, rank: int, size: int, gather: Gather | None, *, training: bool
) -> MMDataLoader | UserLoader:
    if isinstance(data, MMDataLoader):
        return data
    what, per_batch = "training" if training else "validation", args.micro_batch_size
    common = (Layout(per_batch, args.global_batch_size, size), rank, args.seed, training)
    whole_only = getattr(args, "pipeline_model_parallel_size", 1) > 1  # stages exchange tensors of one size
    loader: UserLoader
    if isinstance(data, DataLoader):
        require_micro_batch_size(data, per_batch, what)
        if isinstance(data.dataset, IterableDataset) or type(data).__iter__ is not DataLoader.__iter__:
            loader = StreamLoader(data, *common)
        else:
            loader = IndexedLoader(data, LoaderOrder(data, per_batch, args.seed, whole_only), *common)
            check_sampler(loader, what)
    elif isinstance(data, Dataset) and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        order = DataSetOrder(len(data), per_batch, training, args.seed, drop_last=training or whole_only)
        own = DataLoader(data, batch_size=per_batch, num_workers=args.num_workers)
        loader = IndexedLoader(own, order, *common)
    elif hasattr(data, "__iter__"):
        loader = StreamLoader(data, *common)
    else:
        raise ConfigError(
            f"train_valid_test_datasets_provider returned a {type(data).__name__}; expected a torch Dataset with a "
            "length, a DataLoader, another iterable of batches, or None"
        )
    if gather is not None:
        settle = settle_parts if isinstance(loader, IndexedLoader) else settle_length
        settle(loader, what, gather, training)  # type: ignore[operator]
    loader.check_length()
    if whole_only and not training and loader.num_rows is not None and loader.num_rows % per_batch:
        notice(
            f"the last {loader.num_rows % per_batch} row(s) of the validation data are left out: pipeline stages "
            f"exchange whole micro-batches of {per_batch}"
        )
    return loader


def _endless(loader: Any) -> Iterator[Any]:
    """Micro-batches without end, from the loader's position, or of validation data from the start.

    Workers start with the first batch that is asked for, after the model has been built: they then share, instead of
    importing it once more, what the model's modules and the processor's have in common.
    """
    yield from loader.batches() if isinstance(loader, UserLoader) else loader
