"""How a model would be sharded, and what of it saves memory, by paths of modules."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm.configs.dims import Dims


@dataclass(frozen=True)
class ShardingOutline:
    """How a model would be sharded.

    Attributes:
        dims: sizes of the kinds of parallelism.
        units: paths of the modules that become units of fully_shard beside the model itself.
        recomputed: paths of the modules that are recomputed in backward.
        ignored: paths of the modules that are not sharded, as fsdp2.yaml states.
        experts: paths of the modules whose experts are split over ranks.
        columns, rows: paths of the linear layers whose outputs, or inputs, are split over tensor-parallel ranks.
        towers: paths of the towers whose media are split over context-parallel ranks.
        offloaded: paths of the modules whose activations wait for backward in host memory.
        chunked: paths of the modules that run on chunks of a micro-batch.
        kept: operations of recomputed modules whose outputs are kept.
        chunked_mlps: paths of the MLPs that run on parts of the tokens.
        compiled: paths of the modules whose computation is compiled.
    """

    dims: Dims
    units: tuple[str, ...]
    recomputed: tuple[str, ...]
    ignored: tuple[str, ...]
    experts: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    chunked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    chunked_mlps: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
