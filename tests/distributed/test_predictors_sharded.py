"""Every predictor family on two ranks: sharded and recomputed, losses and gradients are those of one process.

In bf16 the embedding of timesteps shows whether anything has rounded them: above 512 a bf16 number is a multiple of 4.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.predictors import cases
from tests.support.workers import RankPool

#: a case of each family, with a picture where it takes one
CASES = {name: case for key, (name, case) in cases().items() if key.endswith(("-t2v", "-t2i", "-i2v"))}
NOTHING = torch.zeros(())
#: first layer behind the sine waves of a timestep
TIMESTEP = re.compile(r"(?!context_embedder).*(timestep_embedder|time_embedder|time_embedding)\.linear_1\.weight")
YAML = "sharding_size: auto\nrecompute_modules: ['predictor.{part}.{*}']\nparam_dtype: {dtype}\nreduce_dtype: fp32\n"
#: whose own pipelines round timesteps to the dtype of the transformer
ROUNDED = ("flux", "qwenimage", "hunyuanvideo15")


def losses_and_gradients(name: str, config: Path | None, dtype: str = "fp32") -> dict[str, torch.Tensor]:
    """What three samples give: all of them in one process, or 2 and 1 on two ranks (with a filler)."""
    from torch.distributed.tensor import DTensor

    from mindspeed_mm.models.generation.sora_model import SoRAModel, block_paths
    from mindspeed_mm.optimizer.clip import sum_plain_gradients

    case = CASES[name]
    model = SoRAModel(case.model_json(name))
    rows, weights = [0, 1, 2], [1.0, 1.0, 1.0]
    if config is not None:
        part = block_paths(model.predictor)[0].removesuffix(".{*}")
        config = config.with_stem(f"{config.stem}-{dist.get_rank()}")  # none is read that another rank is just writing
        assert config.write_text(YAML.replace("{part}", part).replace("{dtype}", dtype))
        model.fully_shard(fsdp2_config_path=str(config))
        rows, weights = ([0, 1], [1.0, 1.0]) if dist.get_rank() == 0 else ([2, 2], [1.0, 0.0])
    batch = {**case.batch(rows), "sample_weights": torch.tensor(weights)}
    loss = model(**model.prepare(batch))["loss"]
    loss.backward()
    if config is not None:
        sum_plain_gradients(model.predictor.parameters(), None)  # what stays whole, in float32: a step does it
    found = {"loss": loss.detach()}
    for key, parameter in model.predictor.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[key.replace("_checkpoint_wrapped_module.", "")] = whole
    if config is not None:
        dist.all_reduce(found["loss"])
    return found


def compare(folder: str) -> dict[str, dict[str, Any]]:
    """By case: what differs between one process and two ranks, and by how much the timestep's gradients do in bf16."""
    found: dict[str, dict[str, Any]] = {}
    for name in CASES:
        alone = losses_and_gradients(name, None)
        config = Path(folder) / f"{name}-{dist.get_rank()}.yaml"
        sharded = losses_and_gradients(name, config)
        assert len(alone) > 10, name
        # what a loss doesn't need (the text behind a last block) has no gradient alone, and zeros in a unit
        differing = [
            key
            for key in alone | sharded
            if not torch.allclose(sharded.get(key, NOTHING), alone.get(key, NOTHING), rtol=1e-4, atol=1e-5)
        ]
        halved = losses_and_gradients(name, config, "bf16")
        (key,) = [k for k in alone if TIMESTEP.fullmatch(k)]
        error = float((halved[key] - alone[key]).norm() / alone[key].norm())
        tables = [k for k in alone if k.endswith("scale_shift_table") and name == "wan"]  # in float32, whole
        found[name] = {"differing": differing, "error": error, "loss": float(halved["loss"] / alone["loss"])}
        found[name]["whole"] = [float((halved[k] - alone[k]).norm() / alone[k].norm()) for k in tables]
    return found


@pytest.fixture(scope="module")
def found(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ranks2.run(compare, str(tmp_path_factory.mktemp("sharded")), timeout=180)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_what_one_process_does(found: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert [rank[name]["differing"] for rank in found] == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_bf16_rounds_no_timesteps(found: list[dict[str, dict[str, Any]]], name: str) -> None:
    for rank in found:
        assert rank[name]["loss"] == pytest.approx(1, abs=0.01)
        assert rank[name]["error"] < (0.4 if name in ROUNDED else 0.03)


def test_parameters_kept_in_float32_get_the_gradients_of_all_ranks(found: list[dict[str, dict[str, Any]]]) -> None:
    for rank in found:
        assert len(rank["wan"]["whole"]) > 1 and max(rank["wan"]["whole"]) < 0.03
