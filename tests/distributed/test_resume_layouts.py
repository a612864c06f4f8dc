"""A checkpoint of any layout under FSDP2 goes on in any other one, and on the Megatron backend, AdamW's state included.

The unbroken run of one process says what each step must be.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint.run_folder import find_checkpoint
from tests.distributed.test_kills import Run, after, assert_equal, unbroken_run
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.parallel_case import ParallelCase
from tests.support.parallel_models import LAYOUTS, MODELS, qwen3_moe_dir
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankPool

STEPS, SAVED = 4, 2
Figures = tuple[list[float], list[float]]


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="resume-layouts-"))


@pytest.fixture(scope="module")
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool) -> dict[int, RankPool]:
    return {1: ranks1, 2: ranks2, 4: ranks4}


class Experts:
    """Qwen3-MoE with its load-balancing loss and AdamW, in any layout."""

    def __init__(self, pools: dict[int, RankPool]) -> None:
        self._pools, self._case = pools, ParallelCase("qwen3_moe", MODELS["qwen3_moe"], workspace() / "experts", pools)

    def train(self, layout: str, run: Path, **flags: Any) -> Figures:
        """Losses and norms of a run's steps."""
        adam = {"optimizer": "adam", "lr": "1e-3", "weight_decay": 0.1, "no_save_optim": None, "eval_interval": None}
        settings = {**adam, "train_iters": STEPS, "log_row_ids": None, "save": run, **flags}
        words = self._case.words(LAYOUTS[layout], "padded", run.with_name(f"{run.name}-files"), **settings)
        self._pools[LAYOUTS[layout].world].run(run_entry, words, timeout=170)
        return metrics_of(run)

    @functools.cached_property
    def unbroken(self) -> Figures:
        """The run of one process, saved after SAVED steps too."""
        return self.train("1 process", workspace() / "unbroken", save_interval=SAVED)

    @functools.cache  # noqa: B019 (lives as long as the tests)
    def saved(self, layout: str) -> Path:
        """A run that has stopped after SAVED steps."""
        if layout == "1 process":
            assert self.unbroken
            return workspace() / "unbroken"
        run = workspace() / f"saved {layout}"
        losses, norms = self.train(layout, run, exit_interval=SAVED)
        assert losses == pytest.approx(self.unbroken[0][:SAVED], rel=1e-6)
        assert norms == pytest.approx(self.unbroken[1][:SAVED], rel=1e-5)
        return run


@pytest.fixture(scope="module")
def experts(pools: dict[int, RankPool]) -> Experts:
    return Experts(pools)


OTHERS = ("1 process", "FSDP2", "EP4", "EP2, 2 copies", "CP2 ring", "CP2 Ulysses", "TP2", "CP2 Ulysses, TP2, EP2")
WAYS = [("EP2 x FSDP2", other) for other in OTHERS]
WAYS += [(other, "EP2 x FSDP2") for other in ("1 process", "CP2 ring", "TP2", "CP2 Ulysses, TP2, EP2")]
WAYS += [("TP2", other) for other in ("EP2", "CP2 ring", "CP2 Ulysses")]
IN_SUITE = {("EP2 x FSDP2", "1 process"), ("TP2", "EP2")}


@pytest.mark.parametrize(
    ("first", "then"), [pytest.param(*way, marks=[] if way in IN_SUITE else [pytest.mark.full]) for way in WAYS]
)
def test_experts_go_on_in_any_layout(first: str, then: str, experts: Experts, tmp_path: Path) -> None:
    saved = experts.saved(first)
    losses, norms = experts.train(then, tmp_path / "run", load=saved, ckpt_step=SAVED)
    assert losses == pytest.approx(experts.unbroken[0][SAVED:], rel=1e-6)
    assert norms == pytest.approx(experts.unbroken[1][SAVED:], rel=1e-5)


TRAINED = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
#: Megatron-core's layouts: ranks and flags
MEGATRON: dict[str, tuple[int, dict[str, Any]]] = {
    "Megatron TP2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "Megatron PP2": (2, {"pipeline_model_parallel_size": 2}),
}


@functools.cache
def files_of(kind: str) -> dict[str, Path]:
    """Of a run on both backends."""
    folder, is_text = workspace() / kind, kind == "qwen3"
    make = tiny_qwen3_dir if is_text else tiny_qwen2_5_vl_dir
    hf_dir = make(folder / "hf", seed=4, tie=is_text, deep=True)
    data = write_mixed_dataset(folder / "data", rows=12, seed=2, images=not is_text)
    wrap = {"sub_modules_to_wrap": WRAP_TEXT if is_text else WRAP}
    return write_run_files(folder / "files", hf_dir, data, model={} if is_text else TRAINED, fsdp2=wrap)


class Backends:
    """Runs of `pretrain_vlm.py` on both backends."""

    def __init__(self, fsdp2: dict[int, RankPool], megatron: dict[int, RankPool]) -> None:
        self._fsdp2, self._megatron = fsdp2, megatron

    def train(self, kind: str, layout: str, run: Path, **flags: Any) -> Figures:
        """Losses and norms of a run's steps."""
        settings = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": STEPS, "save": run, "eval_iters": 0}
        if layout in MEGATRON:
            world, chosen = MEGATRON[layout]
            chosen = {
                "use_torch_fsdp2": None,
                "fsdp2_config_path": None,
                "ckpt_format": None,
                "seq_length": 256,
                **chosen,
            }
            pool = self._megatron[world]
        else:
            pool, chosen = self._fsdp2[LAYOUTS[layout].world], dict(LAYOUTS[layout].flags)
        words = launch_flags(files_of(kind), **{**settings, **chosen, **flags})
        pool.run(run_entry, words, "pretrain_vlm.py", timeout=170)
        return metrics_of(run)

    @functools.cache  # noqa: B019 (lives as long as the tests)
    def unbroken(self, kind: str) -> Figures:
        """The run of one process."""
        return self.train(kind, "1 process", workspace() / f"unbroken {kind}")


@pytest.fixture(scope="module")
def backends(pools: dict[int, RankPool], megatron_pools: dict[int, RankPool]) -> Backends:
    return Backends(pools, megatron_pools)


BETWEEN = [
    ("CP2 Ulysses", "Megatron TP2"),
    ("TP2", "Megatron PP2"),
    ("Megatron TP2", "CP2 ring"),
    ("Megatron PP2", "TP2"),
]


@pytest.mark.full
@pytest.mark.parametrize(("first", "then"), BETWEEN)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_5_vl"])
def test_a_run_changes_the_backend(kind: str, first: str, then: str, backends: Backends, tmp_path: Path) -> None:
    losses, norms = backends.unbroken(kind)
    saved = backends.train(kind, first, tmp_path / "saved", exit_interval=SAVED)
    found = backends.train(kind, then, tmp_path / "run", load=tmp_path / "saved")
    assert saved[0] + found[0] == pytest.approx(losses, rel=1e-6)
    assert saved[1] + found[1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.full
def test_killed_runs_go_on_in_another_layout(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """SIGKILL to all ranks while a checkpoint is written in the background, under CP, EP and TP in turn."""
    hf_dir = qwen3_moe_dir(tmp_path / "hf", experts=2)
    unbroken = unbroken_run(pools[2], tmp_path / "unbroken", hf_dir)
    run = Run(tmp_path / "killed", hf_dir)
    pool = RankPool(2)
    try:
        run.kill(pool, lambda: run.is_saving(4), async_save=True, **LAYOUTS["CP2 ring"].flags)
        assert find_checkpoint(run.folder).iteration == 2
        run.kill(pool, lambda: run.is_saving(8), async_save=True, **LAYOUTS["EP2"].flags)
        assert find_checkpoint(run.folder).iteration in (4, 6, 8)
        run.kill(pool, after(run, 0.2), async_save=True, **LAYOUTS["TP2"].flags)
    finally:
        pool.close()
    run.finish(pools[1])
    assert len(run.records()) > len(unbroken)
    assert_equal(run, unbroken, exact=0, loss=1e-5, norm=1e-4)
