"""Check at the start that the ranks' own loaders read the rows that they should, by comparing them once."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader

from mindspeed_mm.data.loading.foreign import IndexedLoader, StreamLoader
from mindspeed_mm.data.plan.user_order import LoaderOrder
from mindspeed_mm.parallel.gather import GatherObjects
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_HOW = (
    "give it sampler=DistributedSampler(dataset, get_args().data_parallel_size, get_args().data_parallel_rank), or let "
    "train_valid_test_datasets_provider return the data set itself, which is then divided among the ranks"
)


@dataclass(frozen=True)
class RankRecord:
    """Facts about the loader of one rank.

    Attributes:
        rank: data-parallel rank.
        rows, micro_batches: their numbers in an epoch; None: unknown.
        indices: digest of the first micro-batch's indices; of a stream None.
        chosen: digest of the rows from which the sampler chooses.
        content: digest of the first micro-batch; None: it differs between reads, or can't be compared.
    """

    rank: int
    rows: int | None
    micro_batches: int | None
    indices: str | None = None
    chosen: str | None = None
    content: str | None = None


def check_sampler(loader: IndexedLoader, what: str) -> None:
    """Check that a sampler which knows ranks takes this data-parallel rank's part.

    Raises:
        ConfigError: It takes another one.
    """
    order = loader.order
    if not isinstance(order, LoaderOrder) or order.ranks is None:
        return
    rank, size = order.ranks
    if (rank, size) != (loader.rank, loader.layout.dp_size):
        raise ConfigError(
            f"the sampler of the {what} DataLoader takes the part of rank {rank} of {size}, and this is data-parallel "
            f"rank {loader.rank} of {loader.layout.dp_size}; give it num_replicas=get_args().data_parallel_size and "
            "rank=get_args().data_parallel_rank"
        )


def settle_parts(loader: IndexedLoader, what: str, gather: GatherObjects, training: bool) -> None:
    """Agree with all ranks on the rows of a map-style data set that each reads.

    Samplers of torch that know nothing of ranks give every rank the same order, which the ranks then share. They do so
    even where a data set was divided among the ranks before: each rank then reads its own.

    Args:
        loader: The loader of this rank.
        what: "training" or "validation".
        gather: Gathers a value from every rank.
        training: Whether the data are for training.

    Raises:
        ConfigError: All ranks would read the same rows, or ranks that must read the same don't.
    """
    order, kind = loader.order, loader.order.kind
    record = RankRecord(loader.rank, order.num_rows, order.micro_batches)
    if isinstance(order, LoaderOrder) and kind != "ranks":
        first, again = [digest(batch) for batch in loader.probe()] or [None, None]
        content = first if first == again else None
        indices, chosen = digest(loader.first_indices()), digest(order.chosen)
        record = replace(record, indices=indices, chosen=chosen, content=content)
    records: list[RankRecord] = gather(record)
    by_rank = _one_each(records, what)
    if len(by_rank) == 1:
        return
    lengths = {(each.rows, each.micro_batches) for each in by_rank}
    if kind == "ours":
        if len(lengths) > 1:
            raise ConfigError(
                f"train_valid_test_datasets_provider returned {what} data sets of different lengths on different ranks "
                f"({', '.join(str(each.rows) for each in by_rank)} rows); return the whole one on every rank: it is "
                "divided among them afterwards"
            )
        return
    same = len(lengths) == len({each.indices for each in by_rank}) == len({each.content for each in by_rank}) == 1
    if isinstance(order, LoaderOrder) and kind == "custom" and same:
        raise ConfigError(
            f"the {what} DataLoader reads the same rows on all {len(by_rank)} data-parallel ranks: its sampler "
            f"({order.name}) doesn't divide them; {_HOW}"
        )
    if kind == "plain" and same:
        return
    alike = len(lengths) == len({each.chosen for each in by_rank}) == 1
    if kind == "plain" and alike and len({each.indices for each in by_rank}) > 1:
        raise ConfigError(
            f"the {what} DataLoader draws another order on every data-parallel rank, so that some rows would come "
            "several times and others never; give its generator the same seed on all ranks: they share one order"
        )
    if kind == "plain":
        notice(f"the {what} DataLoader holds other rows on every data-parallel rank: each reads all of its own")
    counts = [each.micro_batches for each in by_rank]
    rows = [each.rows for each in by_rank]
    loader.share(False, _smallest(counts, what, training), None if None in rows else sum(map(int, rows)))  # type: ignore[arg-type]


def settle_length(loader: StreamLoader, what: str, gather: GatherObjects, training: bool) -> None:
    """Agree with all ranks on the number of steps of an epoch."""
    records = gather(RankRecord(loader.rank, None, loader.micro_batches))
    loader.share(_smallest([each.micro_batches for each in records], what, training))


def check_stream(loader: StreamLoader, what: str, gather: GatherObjects) -> None:
    """Check that ranks don't all read the same stream, by its first micro-batch.

    Raises:
        ConfigError: They do, or ranks that must read the same don't.
    """
    first, second = (digest(batch) for batch in loader.peek(2))
    content = None if first == second else first  # equal batches are constant test data, and prove nothing
    by_rank = _one_each(gather(RankRecord(loader.rank, None, loader.micro_batches, content=content)), what)
    contents = {each.content for each in by_rank}
    if len(by_rank) > 1 and len(contents) == 1 and None not in contents:
        raise ConfigError(
            f"the {what} data are the same on all {len(by_rank)} data-parallel ranks: an iterable has to divide its "
            "rows itself; on each rank yield those of get_args().data_parallel_rank out of "
            "get_args().data_parallel_size, for example itertools.islice(rows, rank, None, size); a map-style Dataset "
            "that train_valid_test_datasets_provider returns is divided for you"
        )


def _one_each(records: Sequence[RankRecord], what: str) -> list[RankRecord]:
    """A record of each data-parallel rank; those of its tensor- and pipeline-parallel ranks have to be equal."""
    found: dict[int, RankRecord] = {}
    for record in records:
        other = found.setdefault(record.rank, record)
        if record != other and None not in (record.content, other.content):
            raise ConfigError(
                f"the {what} data differ between tensor- or pipeline-parallel ranks of data-parallel rank "
                f"{record.rank}, which have to read the same; divide them by get_args().data_parallel_rank, not by the "
                "process's rank"
            )
    return [found[rank] for rank in sorted(found)]


def _smallest(counts: Iterable[int | None], what: str, training: bool) -> int | None:
    """The micro-batches that each rank reads an epoch: in training no more than every rank has."""
    known = [count for count in counts if count is not None]
    found = list(counts)
    if not known or len(known) < len(found):
        return None
    if min(known) != max(known) and training:
        notice(
            f"the {what} loaders yield between {min(known)} and {max(known)} micro-batches an epoch on different "
            "ranks: those beyond the smallest number are left out"
        )
    return min(known) if training else max(known)


def digest(value: object) -> str | None:
    """Return a digest of a value's tensors, numbers and texts; None: it contains something else."""
    if value is None:
        return None
    found = hashlib.sha256()
    try:
        _feed(value, found.update)
    except (_Unknown, RuntimeError, NotImplementedError):  # torch: a tensor without bytes in a row, a sparse one
        return None
    return found.hexdigest()


class _Unknown(Exception):
    """A value that can't be compared."""


def _feed(value: object, update: Callable[[bytes], None]) -> None:
    """Hand a value to the `update` of a hash, part by part."""
    update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        update(str((value.dtype, tuple(value.shape))).encode())
        if value.numel():
            update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _feed(key, update)
            _feed(item, update)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(item, update)
    else:
        try:
            update(pickle.dumps(value))
        except Exception:
            raise _Unknown from None


def require_micro_batch_size(loader: DataLoader, micro_batch_size: int, what: str) -> None:
    """Check that a DataLoader has the micro-batch size of the run.

    Raises:
        ConfigError: It has another one.
    """
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    if size not in (None, micro_batch_size):
        raise ConfigError(
            f"the {what} DataLoader has batch_size={size}, and --micro-batch-size is {micro_batch_size}; "
            "give it batch_size=get_args().micro_batch_size (a data set that hands out whole micro-batches takes "
            "batch_size=None)"
        )
