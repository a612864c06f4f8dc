"""Linear layers in float8, emulated on the host: as torchao alone converts a model, sharded, saved and exported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.apart import TORCHAO
from tests.support.bf16_error import Errors, Row, draw_weights, our_rows, plain_rows
from tests.support.families import families
from tests.support.family_case import FamilyCase
from tests.support.workers import RankPool

BLOCKS = (".layers.", ".blocks.")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """1 and 2 workers of this file alone, which find torchao: the path goes to them with each function."""
    pools, before = {size: RankPool(size) for size in (1, 2)}, list(sys.path)
    sys.path.append(str(TORCHAO))
    yield pools
    sys.path[:] = before
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    return FamilyCase("qwen3", tmp_path_factory.mktemp("float8"), families()["qwen3"])


def converted(recipe: str, model: torch.nn.Module) -> None:
    """Convert the layers of a plain model's blocks by torchao alone."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, path: any(part in path for part in BLOCKS)
    )


def all_plain_rows(hf_dir: Path, inputs: list[dict[str, torch.Tensor]], recipe: str) -> list[list[Row]]:
    """Each row in fp32, in bf16, and in float8, by plain transformers."""
    float8 = functools.partial(converted, recipe)
    exact, bf16 = (plain_rows(hf_dir, inputs, None, dtype) for dtype in (torch.float32, torch.bfloat16))
    return [exact, bf16, plain_rows(hf_dir, inputs, None, torch.bfloat16, change=float8)]


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=pytest.mark.full if r != "tensorwise" else ()) for r in RECIPES]
)
def test_equals_torchaos_conversion_of_the_plain_model(
    recipe: str, case: FamilyCase, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Losses to 1e-6; gradients are as far from float32, and what bf16 rounds before float8 does is not alike."""
    draw_weights(case.hf_dir, 0)
    inputs, errors = case.inputs(), Errors()
    exact, bf16, plain = pools[1].run(all_plain_rows, case.hf_dir, inputs, recipe)[0]
    ours = our_rows(case, pools[1], tmp_path, len(inputs), float8_recipe=recipe, float8_emulate=True)
    for number, row in ours.items():
        errors.add(0, row, plain[number], exact[number])
        assert row.loss == pytest.approx(plain[number].loss, rel=1e-6)
        assert abs(row.loss / bf16[number].loss - 1) > 1e-5  # bf16 gives another one
    assert 0.9 < errors.ratio < 1.1


def run(case: FamilyCase, pool: RankPool, folder: Path, steps: int, keys: dict[str, Any], **flags: Any) -> list[float]:
    """Losses of a run of the entry script in float8."""
    folder.mkdir(parents=True, exist_ok=True)
    fsdp2 = {"sub_modules_to_wrap": list(case.family.wrap), "sharding_size": "auto", "param_dtype": "bf16", **keys}
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(fsdp2))
    return case.run(pool, folder / "run", steps, fsdp2_config_path=folder / "fsdp2.yaml", **flags)[0]


@pytest.mark.parametrize(
    ("gathers", "on_meta"),
    [(True, True), *(pytest.param(*case, marks=pytest.mark.full) for case in ((True, False), (False, True)))],
)
def test_resumes_and_exports(
    gathers: bool, on_meta: bool, case: FamilyCase, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Two ranks train as one does, go on from a checkpoint bit for bit, and write the source's names and dtypes."""
    keys = {"float8_recipe": "tensorwise", "float8_emulate": True, "float8_all_gather": gathers}
    flags = {"init_model_with_meta_device": on_meta, "no_save_optim": False}
    whole = run(case, pools[2], tmp_path / "whole", 2, keys, save_hf=True, **flags)
    run(case, pools[2], tmp_path / "parts", 1, keys, lr_decay_iters=2, **flags)
    resumed = run(case, pools[2], tmp_path / "parts", 2, keys, load=tmp_path / "parts/run", **flags)
    assert resumed == whole
    alone = run(case, pools[1], tmp_path / "alone", 2, {**keys, "float8_all_gather": False}, **flags)
    assert whole == pytest.approx(alone, rel=1e-2)
    assert whole != pytest.approx(alone, rel=1e-7) or not gathers  # scales are those of float32 weights then
    (file,) = (tmp_path / "whole/run").glob("**/hf*/*.safetensors")
    exported, source = load_file(file), load_file(case.hf_dir / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(exported[name].dtype == tensor.dtype for name, tensor in source.items())
    changed = [name for name, tensor in source.items() if not torch.equal(exported[name], tensor)]
    assert len(changed) > len(source) / 2
