"""The sizes of the parallelisms."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mindspeed_mm.utils.errors import ConfigError


@dataclass(frozen=True)
class Dims:
    """Sizes of the parallelisms, and the three views of the same ranks that follow from them.

    - data: [pp, dp, ring, ulysses, tp], neighbouring ranks differ in tp. `dp` ranks read different rows; `ring` and
      `ulysses` ranks split the tokens of the same rows; `tp` ranks split layers.
    - parameters: [pp, dp_replicate, dp_shard, tp]. All ranks that process different tokens hold or shard the same
      parameters, so `dp_replicate * dp_shard` is `dp * ring * ulysses`.
    - experts: [pp, expert_copies, ep_shard, ep], which covers the tensor-parallel ranks, too.

    Attributes:
        pp: number of pipeline-parallel stages.
        dp: number of data-parallel ranks.
        ring: number of context-parallel ranks that exchange keys and values in a ring.
        ulysses: number of context-parallel ranks that exchange attention heads for tokens.
        tp: number of tensor-parallel ranks.
        dp_shard: number of ranks that shard one replica of the parameters.
        ep: number of expert-parallel ranks, which split the experts of a layer.
        ep_shard: number of ranks that shard each of these parts further.
    """

    pp: int = 1
    dp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    dp_shard: int = 1
    ep: int = 1
    ep_shard: int = 1

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a size below 1.
        """
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; expected 1 or more")

    @property
    def cp(self) -> int:
        """Context-parallel size: number of ranks that split the tokens of the same rows."""
        return self.ring * self.ulysses

    @property
    def dp_replicate(self) -> int:
        """Number of parameter replicas (HSDP; without sharding, each rank has one)."""
        return self.dp * self.cp // self.dp_shard

    @property
    def expert_copies(self) -> int:
        """Number of replicas of the experts' parameters."""
        return self.world_size // (self.pp * self.ep_shard * self.ep)

    @property
    def splits_experts(self) -> bool:
        """Whether experts have a layout of their own, instead of being sharded like all other parameters."""
        return self.ep > 1

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
        ring: int = 1,
        ulysses: int = 1,
        tp: int = 1,
        ep: int = 1,
        ep_shard: int | None = None,
        sharding_size: int | str | None = None,
        where: str = "fsdp2.yaml",
        ep_name: str = "expert_parallel_size",
    ) -> Dims:
        """Return the sizes of a launch; the data-parallel size is `world_size` divided by the other sizes.

        Args:
            world_size: number of processes.
            pp, ring, ulysses, tp, ep: sizes, as in `Dims`.
            ep_shard: as in `Dims`; None: as many as there are, so that each part of the experts exists once.
            sharding_size: number of ranks that shard one copy of the parameters: a number, "auto" (all ranks that
                process different tokens) or None (1).
            where: file of sharding_size and ep_shard, for messages.
            ep_name: flag or key of ep, for messages.

        Raises:
            ConfigError: sizes don't divide the number of processes, or those of the parameters' or the experts' view
                the ranks that there are for them.
        """
        model = pp * ring * ulysses * tp
        if world_size % model:
            fitting = ", ".join(map(str, _divisors(world_size)))
            raise ConfigError(
                f"{world_size} process{'es' if world_size > 1 else ''} can't be split into groups of {model} "
                f"(pipeline {pp} × context {ring * ulysses} × tensor {tp}); start a multiple of {model} processes, or "
                f"choose sizes whose product is one of {fitting}"
            )
        experts = world_size // pp
        if ep > 1 and experts % ep:
            raise ConfigError(
                f"{ep_name} is {ep}, which does not divide the {experts} processes; "
                f"valid here: {', '.join(map(str, _divisors(experts)))}"
            )
        parts = 1 if ep == 1 else experts // ep if ep_shard is None else ep_shard
        if ep > 1 and (parts < 1 or experts // ep % parts):
            raise ConfigError(
                f"{where}: ep_fsdp_size is {parts}, which does not divide {experts // ep}, the number of processes "
                f"{experts} ÷ {ep_name} {ep}; valid here: {', '.join(map(str, _divisors(experts // ep)))}"
            )
        return cls(
            pp=pp,
            dp=world_size // model,
            ring=ring,
            ulysses=ulysses,
            tp=tp,
            ep=ep,
            ep_shard=parts,
        ).with_sharding(sharding_size, where)

    def with_sharding(self, sharding_size: int | str | None, where: str = "fsdp2.yaml") -> Dims:
        """Return these sizes with another sharding of the parameters; arguments as in `of`.

        Raises:
            ConfigError: sharding_size doesn't divide the number of ranks that process different tokens.
        """
        tokens = self.dp * self.cp
        shard = tokens if sharding_size == "auto" else 1 if sharding_size is None else int(sharding_size)
        if shard < 1 or tokens % shard:
            context = f" × context-parallel size {self.cp}" if self.cp > 1 else ""
            total = f" = {tokens}" if context else ""
            raise ConfigError(
                f"{where}: sharding_size is {shard}, which does not divide the data-parallel size {self.dp}{context}"
                f"{total}; valid here: auto, {', '.join(map(str, _divisors(tokens)))}"
            )
        return replace(self, dp_shard=shard)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
