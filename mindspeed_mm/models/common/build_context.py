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
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.parallel.recompute import BlockRecompute
from mindspeed_mm.parallel.sizes import ParallelSizes
from mindspeed_mm.parallel.world import World


@dataclass(frozen=True)
class BuildContext:
    """How a model is to be built.

    Attributes:
        load_weights: whether the model is filled from init_from_hf_path (or with random values); False: a checkpoint
            is loaded later.
        in_run: whether the model is built for a training run, which starts from random values only if asked to.
        defer_weights: whether only the structure is built, on meta; the caller fills each rank's part after sharding.
        seed: seed of random weights.
        trust_remote_code: whether modelling files of the checkpoint may be executed.
        loss: flags that choose the loss type (--calculate-per-token-loss and the like).
        seq_length: longest row in tokens; None: no limit.
        fsdp2_config_path: path of the run's fsdp2.yaml; `fsdp2` is its content.
        sizes: layout of the Megatron backend; None under FSDP2.
        pipeline_rank: this process's pipeline stage under the Megatron backend.
        loss_group: group of the data-parallel ranks.
        dims: sizes of the parallelisms of a run on the FSDP2 backend.
        sequence_parallel: whether tensor-parallel ranks split rows between the layers that they split.
        world: the run's processes; None in a dry run, which has sizes only.
        recompute: the flags' recompute settings under FSDP2.
        swap_attention: whether activations of attention wait for backward in host memory, under FSDP2.
        chunk_mlp_tokens: --chunk-mlp-tokens, under FSDP2.
        lora: adapters that models get; None: none.
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
    sequence_parallel: bool = False
    world: World | None = None
    recompute: BlockRecompute = field(default_factory=BlockRecompute)
    swap_attention: bool = False
    chunk_mlp_tokens: int | None = None
    fsdp2: Fsdp2Config | None = None
    lora: LoraOptions | None = None


_current: ContextVar[BuildContext | None] = ContextVar("mindspeed_mm_build_context", default=None)


def current_build_context() -> BuildContext:
    """Return the context that the backend has set; outside a run, the defaults."""
    return _current.get() or BuildContext()


def fsdp2_config(path: str | None) -> Fsdp2Config:
    """Return the content of fsdp2.yaml: the run's own if `path` is the run's, else the file is read.

    Args:
        path: path of the file; None: the run's configuration if it has no file either, else all defaults.

    Raises:
        ConfigError: the file is missing or not YAML, or has unknown keys or wrong values.
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
