"""Fixtures of the whole suite. Nothing here needs a network."""

from __future__ import annotations

import os

# Before torch or transformers are imported by any test module.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir
from tests.support.workers import RankPool, forget_globals

# Started by nohup, or by a shell in the background, these are ignored, and a run leaves what is ignored alone.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # outside of the main thread
            signal.signal(_number, _usual)


@pytest.fixture(scope="session")
def ranks1() -> Iterator[RankPool]:
    """One worker: `ranks1.run(fn, *args)`."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two workers with a gloo group: `ranks2.run(fn, *args)`."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four workers with a gloo group: `ranks4.run(fn, *args)`."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def megatron_pools() -> Iterator[dict[int, RankPool]]:
    """1, 2 and 4 workers of their own for the Megatron backend, which patches the processes it runs in."""
    pools = {size: RankPool(size, megatron=True) for size in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def qwen2_5_vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL directory with weights; read only, shared by the whole run."""
    return tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 directory with tied weights; read only, shared by the whole run."""
    return tiny_qwen3_dir(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def deep_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `qwen3_dir`, with four layers and 8 heads in 4 groups."""
    return tiny_qwen3_dir(tmp_path_factory.mktemp("deep_qwen3"), deep=True)


@pytest.fixture(autouse=True)
def _fresh_globals() -> Iterator[None]:
    """No test sees the arguments or the notices of the test before it."""
    forget_globals()
    yield
    forget_globals()
