"""What FSDP2 can do beside sharding, under context, expert and tensor parallelism: each with the same figures.

The harness and the limits are those of the table of layouts. The suite runs `IN_SUITE`, and `-m full` all of it.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.parallel_case import NOTHING, ParallelCase, differences
from tests.support.parallel_models import LAYOUTS, MODELS
from tests.support.tiny_families import weights_in
from tests.support.workers import RankPool

#: parallelism → (model, layout)
KINDS = {
    "context": ("qwen2_5_vl", "CP2 Ulysses"),
    "experts": ("qwen3_vl_moe", "EP2"),
    "tensor": ("qwen3_vl", "TP2 x FSDP2"),
}
FROZEN_TOWER = {"image_encoder": {"vision_encoder": {"freeze": True}, "vision_projector": {"freeze": True}}}
#: stands for the modules that fsdp2.yaml wraps
WRAPPED = "wrapped modules"


@dataclass(frozen=True)
class Feature:
    """What differs in a launch.

    Attributes:
        fsdp2, model, flags: keys of the files and flags.
        world: number of processes; None: the layout's.
        frozen: a pattern of the names of what is not trained.
    """

    fsdp2: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    world: int | None = None
    frozen: str = NOTHING


FEATURES: dict[str, Feature] = {
    "recompute": Feature({"recompute_modules": WRAPPED, "use_reentrant": False}),
    "reentrant recompute": Feature({"recompute_modules": WRAPPED, "use_reentrant": True}),
    "recompute by flag": Feature(flags={"recompute_granularity": "full", "recompute_method": "uniform"}),
    "deferred gradient sync": Feature({"defer_gradient_sync": True}),
    "HSDP": Feature({"sharding_size": 2}, world=4),
    "replicated": Feature({"sharding_size": 1}, world=4),
    "ZeRO-2": Feature({"reshard_after_forward": False}),
    "offload": Feature({"offload_to_cpu": True}),
    "prefetch": Feature({"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2}),
    "meta init": Feature(flags={"init_model_with_meta_device": True}),
    "chunked loss": Feature(model={"loss_cfg": {"compute_mode": "chunk", "chunk_size": 3}}),
    "frozen tower": Feature(model=FROZEN_TOWER, frozen=r"^model\.visual"),
}
CASES = [*itertools.product(KINDS, FEATURES)]
IN_SUITE = {("context", "reentrant recompute"), ("tensor", "deferred gradient sync")}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="parallel-features-"))


@pytest.fixture(scope="session")
def cases(pools: dict[int, Any]) -> Any:
    """Model → its case."""
    return functools.cache(lambda name: ParallelCase(name, MODELS[name], workspace() / name, pools))


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*case, marks=[] if case in IN_SUITE else [pytest.mark.full]) for case in CASES]
)
def test_feature(kind: str, name: str, cases: Any, tmp_path: Path) -> None:
    model, layout = KINDS[kind]
    case, feature = cases(model), FEATURES[name]
    wrap = list(case.model.family.wrap)
    fsdp2 = {key: wrap if value is WRAPPED else value for key, value in feature.fsdp2.items()}
    spread = replace(LAYOUTS[layout], world=feature.world or LAYOUTS[layout].world)
    found = case.run(spread, "padded", tmp_path / "case", fsdp2=fsdp2, model=dict(feature.model), **feature.flags)
    assert differences(found, case.plain("padded", feature.frozen)).problems() == []
    assert found.rows == case.alone("padded").rows


#: what is not trained of Qwen3-MoE → a pattern of its names
FROZEN = {"experts": r"\.experts\.", "all but routers": r"^(?!.*\.mlp\.gate\.)"}
FROZEN_UNDER = ("CP2 ring", "EP2", "TP2", "TP2 SP", "EP2 x FSDP2", "CP2 Ulysses, TP2, EP2")
FROZEN_IN_SUITE = {("experts", "EP2"), ("all but routers", "TP2")}


@pytest.mark.parametrize(
    ("parts", "layout"),
    [
        pytest.param(*case, marks=[] if case in FROZEN_IN_SUITE else [pytest.mark.full])
        for case in itertools.product(FROZEN, FROZEN_UNDER)
    ],
)
def test_frozen_parts(parts: str, layout: str, cases: Any, tmp_path: Path) -> None:
    case, pattern = cases("qwen3_moe"), FROZEN[parts]
    model = {"plugin": ["tests.support.partly_frozen"], "model_id": "partly_frozen", "frozen_parameters": pattern}
    found = case.run(LAYOUTS[layout], "padded", tmp_path / "case", model=model)
    expected = case.plain("padded", pattern)
    assert 0 < len(found.gradients) < len(found.weights) and found.gradients.keys() == expected.gradients.keys()
    assert differences(found, expected).problems() == []


@pytest.mark.full
def test_copies_of_sharded_parts(pools: dict[int, Any], tmp_path: Path) -> None:
    """HSDP under TP: two tensor-parallel ranks, each part over two ranks, in two copies."""
    pool = RankPool(8)
    try:
        case = ParallelCase("qwen3", MODELS["qwen3"], tmp_path / "model", {**pools, 8: pool})
        layout = replace(LAYOUTS["TP2"], world=8, fsdp2={"sharding_size": 2})
        found = case.run(layout, "padded", tmp_path / "case", micro_batch_size=1)
    finally:
        pool.close()
    assert differences(found, case.plain("padded")).problems() == []


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_the_same(kind: str, cases: Any, tmp_path: Path) -> None:
    """From scratch, from the meta device: every layout draws the values that one process draws."""
    model, layout = KINDS[kind]
    case = cases(model)
    empty = shutil.copytree(case.family.hf_dir, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    files = {"train_from_scratch": True, "init_from_hf_path": str(empty)}
    scratch = {"model": files, "init_model_with_meta_device": True}
    alone = case.run(LAYOUTS["1 process"], "padded", tmp_path / "alone", **scratch)
    found = case.run(LAYOUTS[layout], "padded", tmp_path / "case", **scratch)
    assert differences(found, alone).problems() == []


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_averages_of_the_weights_are_the_same(kind: str, cases: Any, tmp_path: Path) -> None:
    """--ema-decay: what is exported beside the weights equals that of one process."""
    model, layout = KINDS[kind]
    case, exported = cases(model), {}
    for place, spread in (("alone", LAYOUTS["1 process"]), ("case", LAYOUTS[layout])):
        case.run(spread, "padded", tmp_path / place, ema_decay=0.9, save_hf=True)
        exported[place] = weights_in(tmp_path / place / "run/hf_ema")
        plain = weights_in(tmp_path / place / "run/hf")
        assert any((plain[name] - tensor).norm() > 1e-4 * tensor.norm() for name, tensor in exported[place].items())
    assert exported["case"].keys() == exported["alone"].keys()
    for name, tensor in exported["alone"].items():
        assert (exported["case"][name] - tensor).norm() <= 1e-5 * tensor.norm(), name
