"""Expert parallelism through the entry script against plain transformers in one process, fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parity.test_families import case_of
from tests.support.gradients import reference_gradients, run_for_gradients, worst_difference
from tests.support.launch import launch_flags, metrics_of
from tests.support.reference import train_reference
from tests.support.workers import RankPool

STEPS = 2


def assert_equals_transformers(
    name: str, pool: RankPool, folder: Path, fsdp2: dict[str, Any], **flags: Any
) -> list[dict[str, tuple[int, ...]]]:
    """Losses 1e-6, norms 1e-5 of a plain loop; every gradient of the first step 1e-5.

    Returns:
        of each rank, parameter → shape of its part.
    """
    case = case_of(name)
    folder.mkdir(exist_ok=True)
    file = folder / "fsdp2.yaml"
    file.write_text(yaml.safe_dump({"sharding_size": "auto", "sub_modules_to_wrap": list(case.family.wrap), **fsdp2}))
    settings = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": STEPS, "save": folder / "run"}
    settings |= {"no_save_optim": True, "clip_grad": 0, "fsdp2_config_path": file, **case.family.flags, **flags}
    ranks = pool.run(run_for_gradients, launch_flags(case.files, **settings), timeout=120)
    outputs = case.family.outputs
    losses, norms, _ = train_reference(case.hf_dir, case.inputs(), STEPS, clip=1e9, outputs=outputs)
    found = metrics_of(folder / "run")
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)
    worst = worst_difference(ranks[0].steps[0], reference_gradients(case.hf_dir, case.inputs(), outputs))
    assert worst[0] < 1e-5, worst
    return [rank.parts for rank in ranks]


EXPERT = "model.layers.0.mlp.experts.gate_up_proj"


def test_experts_of_two_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    """Each rank has the half of the six experts, whole."""
    parts = assert_equals_transformers("qwen3_moe", ranks2, tmp_path, {"expert_parallel_size": 2})
    assert [rank[EXPERT] for rank in parts] == [(3, 48, 64)] * 2
