"""Turn the result of a user's datasets provider into iterators that the training loop can use and resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from mindspeed_mm.configs.config import ConfigReader
from mindspeed_mm.configs.data_config import DataConfig, DataloaderParam
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.recipe import DataProvider, Preparation, SampleDrawer, SampleScorer
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.run_sections import Batch
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.loading.counting import CountingIterator
from mindspeed_mm.data.loading.foreign import IndexedLoader, StreamLoader, UserLoader
from mindspeed_mm.data.loading.loader import MMDataLoader
from mindspeed_mm.data.loading.model_match import read_model_config
from mindspeed_mm.data.loading.rank_check import (
    check_sampler,
    check_stream,
    require_micro_batch_size,
    settle_length,
    settle_parts,
)
from mindspeed_mm.data.loading.usable import refuse_unusable, require_media_packages
from mindspeed_mm.data.plan.batching import Batching, pack_capacity
from mindspeed_mm.data.plan.cost import CostModel
from mindspeed_mm.data.plan.fixed_plan import Balance
from mindspeed_mm.data.plan.plan import BatchLayout
from mindspeed_mm.data.plan.user_order import DataSetOrder, LoaderOrder
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.parallel.gather import GatherObjects
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.log import info_rank0, notice

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from mindspeed_mm.configs.run import ModelConfig


@dataclass
class ValidData:
    """Validation data: the same batches at every evaluation.

    Attributes:
        loader: yields micro-batches of this rank.
        global_batches: in one pass; None: unknown.
        scorer: scores what the model generates for the rows at each evaluation; None: it generates nothing.
    """

    loader: MMDataLoader | UserLoader
    global_batches: float | None
    scorer: SampleScorer | None = None

    def __post_init__(self) -> None:
        self._empty: set[int] = set()

    def fresh_iterator(self) -> Iterator[Any]:
        """Return an iterator over micro-batches from the start, pass after pass."""
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
        """Return `wanted` global batches, at most one pass."""
        return wanted if self.global_batches is None else max(1, min(wanted, int(self.global_batches)))


@dataclass
class RunData:
    """The data of a run.

    Attributes:
        train: endless iterator of micro-batches that counts them; nothing is read before its `start`, or the first one.
        valid: validation data; None: no evaluation.
        train_rows, global_batches_per_epoch: None for data without a length; packs have a fraction.
        why_no_length: a clause with the reason for a missing length.
        state_dict: returns the position after the batches that were yielded.
        check_streams: ends the run with a ConfigError where all ranks read the same rows of iterables; reads the first
            micro-batches of these. Other data have been checked.
        where: names the file and row of a number in `row_ids`; None: unknown.
        faults: why rows were left out on this rank so far, counted.
        loader: yields the training micro-batches that `train` counts; None: unknown.
        drawer: draws samples of prompts while the model is trained; None: it draws none.
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
    loader: MMDataLoader | UserLoader | None = None
    drawer: SampleDrawer | None = None


def data_json_provider(
    run: Run, start: DataStart, adapter: DataAdapter | None = None
) -> tuple[MMDataLoader, MMDataLoader | None, None]:
    """Build the training and validation loaders that data.json and the flags describe.

    Args:
        run: the run, with `data` of language models.
        start: this rank's part of the data, and where the training data begin.
        adapter: adapter of the model family; None suits Qwen-VL-like and text models.

    Returns:
        (training loader, validation loader or None, None).

    Raises:
        ConfigError, DataError: what can't be used, and what to write instead.
    """
    from mindspeed_mm.data import build_mm_dataset

    described = run.data if isinstance(run.data, DataConfig) else DataConfig.from_dict(run.files.data)
    batching = _batching(run.batch)
    if described.dataset_param.dataset_type == "corpus":
        from mindspeed_mm.data.loading.corpus import corpus_rows

        train_rows, valid_rows = corpus_rows(run, described.dataset_param, adapter)
        # the rows are in their order already, and no step is left out, whatever their number
        param = described.dataloader_param.model_copy(update={"shuffle": False, "drop_last": False})
        return loaders_of_run(run, start, param, train_rows, valid_rows, batching=batching)
    limits = [length for length in (run.batch.seq_length, batching.dynamic_length) if length is not None]
    max_length = min(limits, default=None)
    datasets = build_mm_dataset(described.dataset_param, max_length=max_length, adapter=adapter, seed=run.process.seed)
    train, valid = datasets if isinstance(datasets, tuple) else (datasets, None)
    require_media_packages(train.source)
    train.check_model(*_model_config(run.model or getattr(run.files, "model", None)))
    if batching.balance or pack_capacity(train, batching) is not None:
        batching = replace(batching, costs=_costs(run.model))
    return loaders_of_run(run, start, described.dataloader_param, train, valid, batching=batching)


def loaders_of_run(
    run: Run,
    start: DataStart,
    param: DataloaderParam,
    train: Dataset,
    valid: Dataset | None,
    *,
    batching: Batching | None = None,
) -> tuple[MMDataLoader, MMDataLoader | None, None]:
    """Return the loaders of a run's training and validation data sets.

    Args:
        param: data.json's dataloader_param.
        train, valid: data sets; `valid` may be None.
    """
    from mindspeed_mm.data import build_mm_dataloader

    def loader(dataset: Dataset, *, training: bool) -> MMDataLoader:
        return build_mm_dataloader(
            dataset,
            param,
            consumed_samples=start.consumed_samples if training else 0,
            micro_batch_size=run.batch.micro_batch_size,
            global_batch_size=run.batch.global_batch_size,
            num_workers=run.batch.num_workers,
            seed=run.process.seed,
            dp_rank=start.rank,
            dp_size=start.size,
            train=training,
            batching=batching,
        )

    return loader(train, training=True), loader(valid, training=False) if valid is not None else None, None


def _model_config(described: ModelConfig | ConfigReader | None) -> tuple[PreTrainedConfig | None, str]:
    """transformers' configuration of the model that is trained (None: unknown), and where it was read from."""
    folder = getattr(described, "init_from_hf_path", None)
    if isinstance(described, VLMModelConfig) and not folder:
        return described.hf_config(), "model.json"
    return read_model_config(folder), f"{folder}/config.json"


def _batching(batch: Batch) -> Batching:
    balance = Balance(batch.use_data_balance or batch.encoder_dp_balance, batch.use_image_mbs_data_balance)
    if not batch.use_txt_dynamic_batching:
        return Batching(balance)
    return Batching(balance, batch.max_seq_len, batch.dynamic_batch_buffer_size)


def _costs(model: ModelConfig | None) -> CostModel:
    """The cost model of the model that is trained; a frozen part costs less."""
    if not isinstance(model, (TransformersModelConfig, VLMModelConfig)) or not model.init_from_hf_path:
        return CostModel()
    return CostModel.from_config(
        model.init_from_hf_path,
        tower_trained=not model.freeze_vision_encoder,
        text_trained=not model.freeze_text_decoder,
    )


def build_run_data(
    provider: DataProvider,
    run: Run,
    start: DataStart,
    gather: GatherObjects | None = None,
    preparation: Preparation | None = None,
) -> RunData:
    """Call the provider and build the data of a run from its result.

    Args:
        provider: see `Recipe.data`; returns (train, valid, test), each a data set, a DataLoader or None. A tuple of
            fewer, or the training data alone, will do.
        run: the description of the run.
        start: this rank's part of the data, and where the training data begin.
        gather: gathers a value from every rank of the run; None: there is one rank.
        preparation: what the workers of this package's loaders do with each micro-batch; None: nothing.

    Raises:
        ConfigError: a loader of the user's own whose batches or ranks don't fit the run's.
        DataError: no training data, or too few rows.
    """
    answer = _call_provider(provider, run, start)
    train, valid, *_ = (*answer, None, None) if isinstance(answer, (tuple, list)) else (answer, None, None)
    if train is None:
        raise DataError("train_valid_test_datasets_provider returned no training data (None)")
    train_loader = _as_loader(train, run, start, gather, training=True)
    valid_data = None
    if valid is not None and run.logging.eval_iters and run.logging.eval_interval:
        loader = _as_loader(valid, run, start, gather, training=False)
        valid_data = ValidData(loader, loader.global_batches_per_epoch)
    _go_to_checkpoint(train_loader, start)
    adapter = getattr(getattr(train_loader, "dataset", None), "adapter", None)
    rows = train_loader.num_rows
    info_rank0(f"training data: {rows if rows is not None else 'unknown number of'} rows")
    if isinstance(train_loader, MMDataLoader):
        refuse_unusable(train_loader.dataset, rows)
    loaders = {"training": train_loader, **({"validation": valid_data.loader} if valid_data else {})}
    for loader in loaders.values():
        if preparation is not None and isinstance(loader, MMDataLoader):
            loader.prepare_with(preparation)

    def close() -> None:
        for loader in loaders.values():
            loader.close()

    def check_streams() -> None:
        for what, loader in loaders.items():
            is_kept = what == "training" or not getattr(loader, "is_used_up", False)
            if gather is not None and isinstance(loader, StreamLoader) and is_kept:
                check_stream(loader, what, gather)

    return RunData(
        CountingIterator(_endless(train_loader), run.batch.micro_batch_size, adapter),
        valid_data,
        rows,
        train_loader.global_batches_per_epoch,
        close,
        _why_no_length(train_loader),
        train_loader.state_dict,
        check_streams,
        getattr(train_loader.dataset, "where", None) if isinstance(train_loader, MMDataLoader) else None,
        (lambda: train_loader.faults) if isinstance(train_loader, MMDataLoader) else dict,
        train_loader,
    )


def _call_provider(provider: DataProvider, run: Run, start: DataStart) -> Any:
    taken = inspect.signature(provider).parameters
    offered = {name: value for name, value in (("run", run), ("start", start)) if name in taken}
    return provider(**offered) if offered or not taken else provider(_wanted_samples(run))


def _go_to_checkpoint(loader: MMDataLoader | UserLoader, start: DataStart) -> None:
    """Go to the position of a checkpoint; one from before positions were stored has consumed samples only.

    The state of a user's own loader isn't used: a worker's state is no position.
    """
    state, consumed = start.state, {"consumed_samples": start.consumed_samples}
    if isinstance(loader, UserLoader):
        loader.go_to(consumed if state is None else state)
    elif state is not None:
        loader.load_state_dict(state)
    elif start.consumed_samples and loader.capacity is not None:
        loader.load_state_dict(consumed)


def _why_no_length(loader: MMDataLoader | UserLoader) -> str:
    if isinstance(loader, MMDataLoader) and loader.capacity is not None:
        return (
            "samples are packed, so that the steps of an epoch aren't known before its rows have been read (a token "
            "cache, preprocess_on_fly: false, knows them)"
        )
    return "this one is streamed"


def _wanted_samples(run: Run) -> list[int]:
    """Numbers of training, validation and test samples, as Megatron's providers are given them."""
    iters, rows = run.length.train_iters or 0, run.batch.global_batch_size
    evaluations = iters // run.logging.eval_interval + 1 if run.logging.eval_interval else 0
    each = run.logging.eval_iters * rows
    return [iters * rows, evaluations * each, each]


def _as_loader(
    data: object, run: Run, start: DataStart, gather: GatherObjects | None, *, training: bool
) -> MMDataLoader | UserLoader:
    if isinstance(data, MMDataLoader):
        return data
    what, per_batch, seed = "training" if training else "validation", run.batch.micro_batch_size, run.process.seed
    common = (BatchLayout(per_batch, run.batch.global_batch_size, start.size), start.rank, seed, training)
    whole_only = run.parallel.pipeline_model_parallel_size > 1  # stages exchange tensors of one size
    loader: UserLoader
    if isinstance(data, DataLoader):
        require_micro_batch_size(data, per_batch, what)
        if isinstance(data.dataset, IterableDataset) or type(data).__iter__ is not DataLoader.__iter__:
            loader = StreamLoader(data, *common)
        else:
            loader = IndexedLoader(data, LoaderOrder(data, per_batch, seed, whole_only), *common)
            check_sampler(loader, what)
    elif isinstance(data, Dataset) and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        order = DataSetOrder(len(data), per_batch, training, seed, drop_last=training or whole_only)
        own = DataLoader(data, batch_size=per_batch, num_workers=run.batch.num_workers)
        loader = IndexedLoader(own, order, *common)
    elif isinstance(data, Iterable):
        loader = StreamLoader(data, *common)
    else:
        raise ConfigError(
            f"train_valid_test_datasets_provider returned a {type(data).__name__}; expected a torch Dataset with a "
            "length, a DataLoader, another iterable of batches, or None"
        )
    if gather is not None:
        if isinstance(loader, IndexedLoader):
            settle_parts(loader, what, gather, training)
        elif isinstance(loader, StreamLoader):
            settle_length(loader, what, gather, training)
    loader.check_length()
    if whole_only and not training and loader.num_rows is not None and loader.num_rows % per_batch:
        notice(
            f"the last {loader.num_rows % per_batch} row(s) of the validation data are left out: pipeline stages "
            f"exchange whole micro-batches of {per_batch}"
        )
    return loader


def _endless(loader: MMDataLoader | UserLoader) -> Iterable[Any]:
    """Return endless micro-batches, from the loader's position, or of validation data from the start.

    With `iter` the workers of our loader start. Those of a user's data start with the first batch: their rows may need
    what the model's provider makes, and nothing is known that this process could load for all of them before.
    """
    return loader.batches() if isinstance(loader, UserLoader) else loader
