"""What a model builder must know of the run, without global arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.configs.model_config import LossType


@dataclass(frozen=True)
class BuildContext:
    """How a model is to be built.

    Attributes:
        load_weights: fill the model from init_from_hf_path (or with random values); False where a checkpoint will.
        seed: of random weights.
        trust_remote_code: whether modelling files of the checkpoint may run.
        loss_type: asked for by a flag (--calculate-per-token-loss and the like); None: as model.json says.
    """

    load_weights: bool = True
    seed: int = 1234
    trust_remote_code: bool = False
    loss_type: LossType | None = None


_current: ContextVar[BuildContext | None] = ContextVar("mindspeed_mm_build_context", default=None)


def current_build_context() -> BuildContext:
    """The context that the backend set; its defaults outside a run."""
    return _current.get() or BuildContext()


@contextmanager
def build_context(context: BuildContext) -> Iterator[None]:
    """Build models under `context`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def loss_type_from_flags(args: Any) -> LossType | None:
    """The loss type that --calculate-…-loss asks for, if one does."""
    flags: dict[str, LossType] = {
        "calculate_per_token_loss": "per_token_loss",
        "calculate_per_sample_loss": "per_sample_loss",
        "calculate_square_loss": "square_loss",
        "calculate_token_loss": "token_loss",
    }
    return next((loss_type for flag, loss_type in flags.items() if getattr(args, flag, False)), None)
