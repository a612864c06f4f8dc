"""From what a user's datasets provider returns to iterators that the loop can use and resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.batching import Batching, pack_capacity
from mindspeed_mm.data.cost import CostModel
from mindspeed_mm.data.counting import CountingIterator
from mindspeed_mm.data.fixed_plan import Balance
from mindspeed_mm.data.foreign import ForeignLoader, loader_generator
from mindspeed_mm.data.loader import MMDataLoader
from mindspeed_mm.data.model_match import read_model_config
from mindspeed_mm.data.sampler import GlobalOrderBatchSampler
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.log import info_rank0


@dataclass
class ValidData:
    """Validation data: the same batches at every evaluation.

    Attributes:
        loader: yields micro-batches of this rank.
        global_batches: in one pass; None: unknown.
    """

    loader: Any
    global_batches: int | None

    def fresh_iterator(self) -> Iterator[Any]:
        """Micro-batches from the start, pass after pass."""
        return _from_start(self.loader)

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
        state_dict: the position after the batches handed out; None for data that keep no position of their own.
    """

    train: CountingIterator
    valid: ValidData | None
    train_rows: int | None
    global_batches_per_epoch: float | None
    close: Callable[[], None]
    why_no_length: str = "this one is streamed"
    state_dict: Callable[[], dict[str, Any]] | None = None


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

    data = args.mm.data
    batching = _batching(args)
    limits = [length for length in (args.seq_length, batching.dynamic_length) if length is not None]
    max_length = min(limits, default=None)
    datasets = build_mm_dataset(data.dataset_param, max_length=max_length, adapter=adapter, seed=args.seed)
    train, valid = datasets if isinstance(datasets, tuple) else (datasets, None)
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
    provider: Callable[..., Any], args: Any, data_parallel_rank: int, data_parallel_size: int
) -> RunData:
    """Call the provider and bring its answer into form.

    Args:
        provider: () or (numbers of samples) → (train, valid, test); each a data set, a DataLoader or None. A tuple of
            fewer, or the training data alone, will do.
        args: micro_batch_size, global_batch_size, num_microbatches, num_workers, seed, consumed_train_samples,
            train_iters, eval_iters, eval_interval; data_state, if there is one: what `RunData.state_dict` returned in
            the run that this one goes on from.

    Raises:
        DataError: no training data.
    """
    answer = provider(_wanted_samples(args)) if inspect.signature(provider).parameters else provider()
    train, valid, *_ = (*answer, None, None) if isinstance(answer, (tuple, list)) else (answer, None, None)
    if train is None:
        raise DataError("train_valid_test_datasets_provider returned no training data (None)")
    train_loader = _as_loader(train, args, data_parallel_rank, data_parallel_size, training=True)
    valid_data = None
    if valid is not None and args.eval_iters and args.eval_interval:
        loader = _as_loader(valid, args, data_parallel_rank, data_parallel_size, training=False)
        valid_data = ValidData(loader, loader.global_batches_per_epoch)
    _go_to_checkpoint(train_loader, args)
    iterator = _resumed(train_loader, args, data_parallel_size)
    adapter = getattr(getattr(train_loader, "dataset", None), "adapter", None)
    rows = _rows(train_loader, args, data_parallel_size)
    info_rank0(f"training data: {rows if rows is not None else 'unknown number of'} rows")

    def close() -> None:
        for loader in (train_loader, valid_data.loader if valid_data else None):
            if isinstance(loader, MMDataLoader):
                loader.close()

    return RunData(
        CountingIterator(iterator, args.micro_batch_size, adapter),
        valid_data,
        rows,
        train_loader.global_batches_per_epoch,
        close,
        _why_no_length(train_loader),
        train_loader.state_dict if isinstance(train_loader, MMDataLoader) else None,
    )


def _go_to_checkpoint(loader: Any, args: Any) -> None:
    """Take the position that a checkpoint holds; one from before positions were kept has consumed samples only.

    A loader of the user's own is resumed by skipping, even where it has a state: that of a worker is no position.
    """
    if not isinstance(loader, MMDataLoader):
        return
    state = getattr(args, "data_state", None)
    if state is not None:
        loader.load_state_dict(state)
    elif args.consumed_train_samples and loader.capacity is not None:
        loader.load_state_dict({"consumed_samples": args.consumed_train_samples})


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


def _as_loader(data: Any, args: Any, rank: int, size: int, *, training: bool) -> Any:
    if isinstance(data, MMDataLoader):
        return data
    if isinstance(data, DataLoader):
        return ForeignLoader(data, args.num_microbatches, args.seed)
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        sampler = GlobalOrderBatchSampler(
            len(data),  # type: ignore[arg-type]
            args.micro_batch_size,
            args.global_batch_size,
            rank,
            size,
            shuffle=training,
            seed=args.seed,
            drop_last=True,
            consumed_samples=args.consumed_train_samples if training else 0,
        )
        # without a generator of its own the loader draws from the global random state, after a resume has restored it
        loader = DataLoader(
            data, batch_sampler=sampler, num_workers=args.num_workers, generator=loader_generator(args.seed)
        )
        return PositionedLoader(loader, sampler)
    if hasattr(data, "__iter__"):
        return ForeignLoader(data, args.num_microbatches, args.seed)
    raise ConfigError(
        f"train_valid_test_datasets_provider returned a {type(data).__name__}; expected a torch Dataset with a length, "
        "a DataLoader, another iterable of batches, or None"
    )


class PositionedLoader:
    """A DataLoader over one of our samplers: endless, and at its position."""

    def __init__(self, loader: DataLoader, sampler: GlobalOrderBatchSampler) -> None:
        self._loader = loader
        self.num_rows = sampler.num_rows
        self.global_batches_per_epoch = sampler.global_batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _resumed(loader: Any, args: Any, size: int) -> Iterator[Any]:
    """An endless iterator that continues after the consumed samples.

    Workers start with the first batch that is asked for, after the model has been built: they then share, instead of
    importing it once more, what the model's modules and the processor's have in common.
    """
    if isinstance(loader, ForeignLoader):
        return loader.batches(args.consumed_train_samples // (args.micro_batch_size * size))
    return _from_start(loader)


def _from_start(loader: Any) -> Iterator[Any]:
    yield from loader.batches() if isinstance(loader, ForeignLoader) else loader


def _rows(loader: Any, args: Any, size: int) -> int | None:
    if not isinstance(loader, ForeignLoader):
        return loader.num_rows
    try:
        return len(loader.loader) * args.micro_batch_size * size
    except TypeError:
        return None
