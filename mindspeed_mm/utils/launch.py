"""This process's place in its launch: the only reader of RANK, LOCAL_RANK and WORLD_SIZE."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.text import shorten


@dataclass(frozen=True)
class Launch:
    """Place of a process in its launch.

    Attributes:
        rank: number of the process, from 0 to world_size - 1.
        local_rank: its number on its machine.
        world_size: number of processes.
        local_world_size: number of them on this machine.
        restarts: number of times that torchrun has restarted the processes after a failure.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restarts: int = 0


def this_launch() -> Launch:
    """Return the place of this process; without a launcher it is the only one.

    Raises:
        ConfigError: a variable isn't a whole number.
    """
    return Launch(
        rank=_number("RANK", 0),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
    )


def is_launched() -> bool:
    """Whether a launcher has started this process, with RANK and WORLD_SIZE in its environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def be_the_only_process(port: int) -> None:
    """Write into the environment that this is the only process of its launch, for torch's rendezvous to read.

    Args:
        port: a free port of this machine.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def is_first_rank() -> bool:
    """Whether this process is rank 0 of the launch, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def is_first_local_rank() -> bool:
    """Whether this process is the first one of the launch on its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def rank_word() -> str:
    """Return the rank for a message; "?" without a launcher."""
    return os.environ.get("RANK", "?")


def _number(name: str, default: int) -> int:
    word = os.environ.get(name)
    if word is None or word == "":
        return default
    try:
        return int(word)
    except ValueError:
        raise ConfigError(
            f"the environment's {name} is '{shorten(word)}'; expected a whole number, as torchrun sets it"
        ) from None
