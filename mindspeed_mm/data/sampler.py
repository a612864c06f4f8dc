"""Which rows make which micro-batch: one global order, and a position in it that is a number of samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mindspeed_mm.utils.errors import ConfigError, DataError

FILLER = -1


class GlobalOrderBatchSampler:
    """Endless micro-batches of one data-parallel rank.

    Every epoch is a permutation of the rows, made from (seed, epoch) alone and cut into global batches; micro-batch m
    of rank r takes rows `m * micro_batch_size * dp_size + r * micro_batch_size` onwards of a global batch. So the
    sequence of global batches depends on nothing but the seed, and the position in it is `consumed_samples`: an
    optimizer step takes `global_batch_size` of them. A run can go on with other ranks and micro-batches.

    Args:
        num_rows: Rows of the data set.
        micro_batch_size: Rows of a micro-batch of one rank.
        global_batch_size: Rows of an optimizer step over all ranks.
        dp_rank: This data-parallel rank.
        dp_size: Number of data-parallel ranks.
        shuffle: A new order every epoch; else file order.
        seed: Decides the orders.
        drop_last: Leave out the rows at an epoch's end that don't fill a global batch; else the last global batch is
            filled up with index -1 (no row of the next epoch gets into it), and every rank has as many micro-batches
            as ever.
        consumed_samples: Position to begin at, fillers counted.

    Raises:
        ConfigError: The batch sizes don't divide.
        DataError: `drop_last` and fewer rows than one global batch.
    """

    def __init__(
        self,
        num_rows: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        shuffle: bool = True,
        seed: int = 1234,
        drop_last: bool = True,
        consumed_samples: int = 0,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ConfigError(f"data-parallel rank {dp_rank} of {dp_size} ranks: expected 0 to {dp_size - 1}")
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % (micro_batch_size * dp_size):
            raise ConfigError(
                f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} × "
                f"{dp_size} data-parallel rank(s)"
            )
        if num_rows < 1:
            raise DataError("the data set has no rows")
        if drop_last and num_rows < global_batch_size:
            raise DataError(
                f"the data set has {num_rows} row(s), fewer than one global batch of {global_batch_size}, and "
                "drop_last leaves out what doesn't fill one, so that no step could be made; use a --global-batch-size "
                f"of at most {num_rows}, or set dataloader_param.drop_last to false"
            )
        if consumed_samples < 0:
            raise DataError(f"consumed_samples {consumed_samples}: expected 0 or more")
        self.num_rows = num_rows
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.consumed_samples = consumed_samples

    @property
    def global_batches_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        whole, rest = divmod(self.num_rows, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch advances the position by, fillers counted."""
        return self.global_batches_per_epoch * self.global_batch_size

    @property
    def micro_batches_per_global_batch(self) -> int:
        """Micro-batches that each rank takes for an optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in order, [num_rows] int64, the same on every rank."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        # PCG64's raw stream is fixed by numpy's compatibility policy, Generator.permutation is not.
        keys = np.random.PCG64(np.random.SeedSequence((self.seed, epoch))).random_raw(self.num_rows)
        return np.argsort(keys, kind="stable")

    @property
    def first_global_batch(self) -> int:
        """Index of the global batch to begin with, counted over all epochs.

        A position inside a global batch comes from a run with another global batch size; the next whole one follows.
        """
        return -(-self.consumed_samples // self.global_batch_size)

    def global_batches(self) -> Iterator[np.ndarray]:
        """Yield global batches, [global_batch_size] int64, -1 for a filler, without end."""
        epoch, first = divmod(self.first_global_batch, self.global_batches_per_epoch)
        while True:
            order = np.full(self.samples_per_epoch, FILLER)
            used = min(self.num_rows, self.samples_per_epoch)
            order[:used] = self.order(epoch)[:used]
            yield from order.reshape(-1, self.global_batch_size)[first:]
            epoch, first = epoch + 1, 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the row indices of this rank's micro-batches, without end."""
        for batch in self.global_batches():
            table = batch.reshape(-1, self.dp_size, self.micro_batch_size)
            for rows in table[:, self.dp_rank]:
                yield rows.tolist()
