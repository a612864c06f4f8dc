"""The sizes of the parallelisms."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mindspeed_mm.utils.errors import ConfigError


@dataclass(frozen=True)
class Dims:
    """Sizes of the parallelisms.

    The product of all but `ep` is the number of processes; expert parallelism reuses the ranks of the others.

    Attributes:
        pp: number of pipeline-parallel stages.
        dp_replicate: number of parameter replicas among the data-parallel ranks (HSDP; without sharding, the
            data-parallel size).
        dp_shard: number of data-parallel ranks that shard one replica.
        cp: number of context-parallel ranks, which split the tokens of a row.
        tp: number of tensor-parallel ranks, which split layers.
        ep: number of expert-parallel ranks, which split the experts of a layer.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a size below 1.
        """
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; expected 1 or more")

    @property
    def dp(self) -> int:
        """Data-parallel size: number of ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.cp * self.tp

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        pp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        sharding_size: int | str | None = None,
        where: str = "fsdp2.yaml",
    ) -> Dims:
        """Return the sizes of a launch; the data-parallel size is `world_size` divided by the other sizes.

        Args:
            world_size: number of processes.
            pp, cp, tp, ep: sizes, as in `Dims`.
            sharding_size: number of data-parallel ranks that shard one replica of the parameters: a number, "auto" (all
                of them) or None (1).
            where: file of sharding_size, for messages.

        Raises:
            ConfigError: sizes don't divide the number of processes, or sharding_size the data-parallel size.
        """
        model = pp * cp * tp
        if world_size % model:
            fitting = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ConfigError(
                f"{world_size} process{'es' if world_size > 1 else ''} can't be split into groups of {model} "
                f"(pipeline {pp} × context {cp} × tensor {tp}); start a multiple of {model} processes, or choose sizes "
                f"whose product is one of {fitting}"
            )
        data = world_size // model
        shard = data if sharding_size == "auto" else 1 if sharding_size is None else int(sharding_size)
        if shard < 1 or data % shard:
            valid = [n for n in range(1, data + 1) if data % n == 0]
            raise ConfigError(
                f"{where}: sharding_size is {shard}, which does not divide the data-parallel size {data}; "
                f"valid here: auto, {', '.join(map(str, valid))}"
            )
        return cls(pp=pp, dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep)
