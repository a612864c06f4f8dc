"""Generation runs that are killed, and resumed on another number of ranks: the same noise, the same losses."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from mindspeed_mm.checkpoint.run_folder import find_checkpoint
from tests.distributed.test_kills import Run, after, assert_equal
from tests.support.launch import launch_flags
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

STEPS = 12


class GenerationRun(Run):
    """Clips with captions that are now and then left out, latents that are drawn, weights that are averaged."""

    def __init__(self, folder: Path) -> None:
        encoders = write_encoders(folder / "encoders")
        model = model_json(encoders, do_sample=True, use_ema=True)
        model["predictor"]["train_from_scratch"] = True
        model["text_encoder"]["ucg_rate"] = 0.3
        # clips are longer than what is taken of them, from a place that is drawn anew in every epoch
        data = data_json(write_clips(folder / "clips", rows=8, frames=12))
        wrap = {"sharding_size": "auto", "sub_modules_to_wrap": ["predictor.blocks.{*}"]}
        contents = {"model.json": json.dumps(model), "data.json": json.dumps(data), "tools.json": "{}"}
        contents["fsdp2.yaml"] = yaml.safe_dump(wrap)
        for name, text in contents.items():
            (folder / name).write_text(text)
        self.folder, self._script, self._steps = folder / "run", "pretrain_sora.py", STEPS
        self._files = {name: folder / name for name in contents}

    def words(self, **flags: object) -> list[str]:
        settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": STEPS, "save_interval": 2}
        return launch_flags(self._files, **{**settings, "save": self.folder, "load": self.folder, **flags})


@pytest.mark.timeout(300)
def test_kills_leave_what_is_trained_as_it_is(ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    """Killed in a save and at a random moment; resumed on 2, 4 and 1 ranks, also with larger micro-batches."""
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
    whole = GenerationRun(tmp_path / "unbroken")
    whole.finish(ranks2)
    unbroken = {iteration: (loss, norm) for iteration, loss, norm in whole.records()}
    assert len(unbroken) == STEPS
    assert (
        len({round(loss, 6) for loss, _ in unbroken.values()}) == STEPS
    )  # two steps an epoch: noise is never repeated
    run = GenerationRun(tmp_path / "killed")
    run.kill(ranks2, lambda: run.is_saving(4))
    exact = len(run.records())
    run.kill(ranks4, after(run, random.Random(3).uniform(0.0, 0.3)), async_save=True)
    one = RankPool(1)
    try:
        run.finish(one, micro_batch_size=2)
    finally:
        one.close()
    assert find_checkpoint(run.folder).iteration == STEPS
    assert_equal(run, unbroken, exact, loss=1e-5, norm=2e-5)
