"""Settings of the run for model builders, without global arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.flags.model import LossArguments
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config, load_fsdp2_config
from mindspeed_mm.parallel.recompute import BlockRecompute
from mindspeed_mm.parallel.sizes import ParallelSizes
from mindspeed_mm.parallel.world import World


@dataclass(frozen=True)
class BuildContext:
    """How a model is to be built.

    Attributes:
        load_weights: fill the model from init_from_hf_path (or with random values); False where a checkpoint will.
        in_run: whether it is a training run's, which must not begin with random values that nobody asks for.
        defer_weights: build the structure only, on meta; whoever builds fills each rank's part after sharding.
        seed: of random weights.
        trust_remote_code: whether modelling files of the checkpoint may run.
        loss: flags that choose the loss type (--calculate-per-token-loss and the like).
        seq_length: longest row in tokens; None: no limit.
        fsdp2_config_path: fsdp2.yaml of the run, which `fsdp2` is the content of.
        sizes, pipeline_rank: layout of the Megatron backend, and this process's place in it; None elsewhere.
        loss_group: data-parallel ranks.
        dims: sizes of the parallelisms of a run on the FSDP2 backend.
        world: its processes; None in a dry run, where there are sizes only.
        recompute: what the flags say of recompute under FSDP2.
        fsdp2: fsdp2.yaml of the run, with the compute dtype of its flags; None outside the FSDP2 backend.
    """

    load_weights: bool = True
    in_run: bool = False
    defer_weights: bool = False
    seed: int = 1234
    trust_remote_code: bool = False
    loss: LossArguments = field(default_factory=LossArguments)
    seq_length: int | None = None
    fsdp2_config_path: object = None
    sizes: ParallelSizes | None = None
    pipeline_rank: int = 0
    loss_group: Any = None
    dims: Dims | None = None
    world: World | None = None
    recompute: BlockRecompute = field(default_factory=BlockRecompute)
    fsdp2: Fsdp2Config | None = None


_current: ContextVar[BuildContext | None] = ContextVar("mindspeed_mm_build_context", default=None)


def current_build_context() -> BuildContext:
    """The context that the backend set; its defaults outside a run."""
    return _current.get() or BuildContext()


def fsdp2_config(path: str | None) -> Fsdp2Config:
    """fsdp2.yaml as the run has read it; another path than the run's, or one outside a run, is read here.

    Args:
        path: of the file; None: all defaults, or what the run has of them.

    Raises:
        ConfigError: the file is missing or no YAML, or holds unknown keys or wrong values.
    """
    context = _current.get()
    if context is not None and context.fsdp2 is not None and path == context.fsdp2_config_path:
        return context.fsdp2
    return load_fsdp2_config(path)


@contextmanager
def build_context(context: BuildContext) -> Iterator[None]:
    """Build models under `context`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
