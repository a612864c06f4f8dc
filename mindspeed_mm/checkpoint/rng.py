"""Random states of a rank: those of torch (host and device), Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mindspeed_mm import accelerator
from mindspeed_mm.parallel.world import World
from mindspeed_mm.utils.log import notice


def random_state() -> dict[str, torch.Tensor]:
    """Return this rank's random states as tensors, by name."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    del version, gauss, kind
    return {
        **{f"torch.{name}": value for name, value in accelerator.current().rng_state().items()},
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy.keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy.rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Context after which the random states of this rank are what they were before it."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), accelerator.current().rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        accelerator.current().set_rng_state(of_torch)


def restore_random_state(
    directory: Path, world: World, extra: Mapping[str, Any], layout: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Restore this rank's random states if the checkpoint was saved with the same number of ranks and the same layout.

    Args:
        extra: content of state.json.
        layout: model-parallel sizes of this run, as in the checkpoint's `layout`.

    Returns:
        all states in the rank's file; empty if none are restored.
    """
    path = directory / f"rng_{world.rank:05d}.safetensors"
    saved_by = _ranks(int(extra.get("world_size", world.size)), extra.get("layout"))
    own = _ranks(world.size, layout)
    if saved_by != own or not path.is_file():
        notice(f"random states are not restored: '{directory}' holds those of {saved_by}, this run has {own}")
        return {}
    saved = load_file(path)
    accelerator.current().set_rng_state(
        {k.removeprefix("torch."): v for k, v in saved.items() if k.startswith("torch.")}
    )
    random.setstate((3, tuple(saved["python"].tolist()), None))
    position, has_gauss, cached = saved["numpy.rest"].tolist()
    keys = saved["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    return saved


def _ranks(count: int, layout: Mapping[str, int] | None) -> str:
    sizes = ", ".join(f"{name} parallelism {size}" for name, size in sorted((layout or {}).items()) if size > 1)
    return f"{count} ranks ({sizes})" if sizes else f"{count} ranks"
