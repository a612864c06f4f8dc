"""Expert parallelism through the entry script against plain transformers in one process, fp32."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.parity.test_families import case_of, load_all
from tests.support.gradients import Gradients, reference_gradients, run_for_gradients, worst_difference
from tests.support.launch import launch_flags, metrics_of
from tests.support.reference import train_reference
from tests.support.roundtrip import load_and_export
from tests.support.workers import RankPool

STEPS = 2
EP2: dict[str, Any] = {"expert_parallel_size": 2}
#: of four ranks: keys of fsdp2.yaml, ranks that split the experts, ranks that shard dim 1
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "EP 2, sharded over 2": (EP2, 2, 2),
    "EP 2, 2 copies": ({**EP2, "reshard_local_experts": False}, 2, 1),
    "EP 4": ({"expert_parallel_size": 4, "sharding_size": 2}, 4, 1),
}
MODELS = (
    "qwen3_moe",
    "gpt_oss",
    "qwen3_vl_moe",
    "glm4v_moe",
    "deepseek_v3",
    "qwen3_omni_moe",
    "qwen3_5_moe",
    "kimi_k25",
    "ernie4_5_vl_moe",
    "gemma4_moe",
)


@dataclass(frozen=True)
class Reference:
    """What plain transformers finds: of two steps, and the gradient of the first one."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def never(name: str) -> bool:
    return False


@functools.cache
def reference(name: str, hf_dir: Path, frozen: Callable[[str], bool] = never) -> Reference:
    inputs, outputs = case_of(name).inputs(), case_of(name).family.outputs
    steps = train_reference(hf_dir, inputs, STEPS, clip=1e9, frozen=frozen, outputs=outputs)
    return Reference(*steps, reference_gradients(hf_dir, inputs, outputs, frozen))


def run(
    name: str, pool: RankPool, folder: Path, fsdp2: Mapping[str, Any], hf_dir: Path | None = None, **flags: Any
) -> list[Gradients]:
    """Two steps of a family through the entry script; what each rank found."""
    case = case_of(name)
    folder.mkdir(exist_ok=True)
    keys = {"sharding_size": "auto", "sub_modules_to_wrap": list(case.family.wrap), **fsdp2}
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(keys))
    model = json.loads(case.files["model.json"].read_text()) | flags.pop("model", {})
    (folder / "model.json").write_text(json.dumps(model | ({"init_from_hf_path": str(hf_dir)} if hf_dir else {})))
    settings = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": STEPS, "save": folder / "run"}
    settings |= {"fsdp2_config_path": folder / "fsdp2.yaml", "mm_model": folder / "model.json"}
    settings |= {"clip_grad": 0, "no_save_optim": True, **case.family.flags, **flags}
    return pool.run(run_for_gradients, launch_flags(case.files, **settings), timeout=120)


def assert_same(found: list[Gradients], folder: Path, expected: Reference) -> None:
    """Losses 1e-6; norms, every gradient of the first step and every weight after the last one 1e-5."""
    losses, norms = metrics_of(folder / "run")
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    assert norms == pytest.approx(expected.norms, rel=1e-5)
    worst = worst_difference(found[0].steps[0], expected.gradients)
    assert worst[0] < 1e-5, worst


def assert_split(found: list[Gradients], experts: int, shards: int, expected: Reference) -> None:
    """Each rank has its share of each expert's parameter, and of nothing else."""
    checked = 0
    for name, whole in expected.weights.items():
        if "experts." in name and "shared" not in name:
            part = (whole.shape[0] // experts, whole.shape[1] // shards, *whole.shape[2:])
            assert [rank.parts[name] for rank in found] == [part] * len(found), name
            assert all("experts" in rank.meshes[name] for rank in found), name
            checked += 1
        else:
            assert not any("experts" in rank.meshes[name] for rank in found if name in rank.meshes), name
    assert checked


@pytest.mark.full
def test_experts_of_two_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    """Each rank has three of six experts, whole; a micro-batch of padded rows."""
    expected = reference("qwen3_moe", case_of("qwen3_moe").hf_dir)
    found = run("qwen3_moe", ranks2, tmp_path, EP2, micro_batch_size=2)
    assert_same(found, tmp_path, expected)
    assert_split(found, 2, 1, expected)


BY_NAME = [(name, layout) for name in MODELS for layout in LAYOUTS if (name, layout) != ("qwen3_moe", "EP 4")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*pair, marks=[] if pair == ("gpt_oss", "EP 2, sharded over 2") else [pytest.mark.full])
        for pair in BY_NAME
    ],
)
def test_experts_of_four_ranks(name: str, layout: str, ranks4: RankPool, tmp_path: Path) -> None:
    fsdp2, experts, shards = LAYOUTS[layout]
    expected = reference(name, case_of(name).hf_dir)
    found = run(name, ranks4, tmp_path, fsdp2)
    assert_same(found, tmp_path, expected)
    assert_split(found, experts, shards, expected)


WRAP = ["model.layers.{*}"]
TOGETHER = {
    **EP2,
    "sharding_size": 2,
    "recompute_modules": WRAP,
    "use_reentrant": False,
    "num_to_forward_prefetch": 2,
    "defer_gradient_sync": True,
    "reshard_after_forward": False,
}
FEATURES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "HSDP, ZeRO-2, recompute, prefetch, deferred sync": (4, TOGETHER, {"ema_decay": 0.9}),
    "HSDP, copies": (4, {**EP2, "sharding_size": 2, "reshard_local_experts": False}, {}),
    "HSDP, deferred sync": (4, {**EP2, "sharding_size": 2, "defer_gradient_sync": True}, {}),
    "ZeRO-2": (2, {**EP2, "reshard_after_forward": False}, {}),
    "reshard over 2 of 4": (4, {**EP2, "reshard_after_forward": 2}, {}),
    "reentrant recompute": (2, {**EP2, "recompute_modules": WRAP, "use_reentrant": True}, {}),
    "recompute of the experts alone": (2, {**EP2, "recompute_modules": ["model.layers.{0,2}.mlp.experts"]}, {}),
    "flag for recompute": (2, EP2, {"recompute_granularity": "full", "recompute_method": "uniform"}),
    "offload": (2, {**EP2, "offload_to_cpu": True}, {}),
    "meta init": (2, EP2, {"init_model_with_meta_device": True}),
    "one unit": (2, {**EP2, "sub_modules_to_wrap": []}, {}),
    "experts named as units": (2, {**EP2, "sub_modules_to_wrap": [*WRAP, "model.layers.{0,2}.mlp.experts"]}, {}),
    "experts of one layer": (2, {**EP2, "moe_modules": ["model.layers.{2}.mlp.experts"]}, {}),
    "replicated, by the flag": (2, {"sharding_size": 1}, {"expert_model_parallel_size": 2}),
    "padded rows in one micro-batch": (2, EP2, {"micro_batch_size": 4}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) for n in FEATURES])
def test_with_other_features(name: str, ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    ranks, fsdp2, flags = FEATURES[name]
    found = run("qwen3_moe", ranks2 if ranks == 2 else ranks4, tmp_path, fsdp2, **flags)
    assert_same(found, tmp_path, reference("qwen3_moe", case_of("qwen3_moe").hf_dir))


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_implementations_of_experts(name: str, implementation: str, ranks2: RankPool, tmp_path: Path) -> None:
    """config.json's `experts_implementation` chooses how the experts of a rank are computed."""
    hf_dir = shutil.copytree(case_of(name).hf_dir, tmp_path / "hf")
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps({**config, "experts_implementation": implementation}))
    found = run(name, ranks2, tmp_path, EP2, hf_dir)
    assert_same(found, tmp_path, reference(name, case_of(name).hf_dir))


def biased(hf_dir: Path, folder: Path) -> Path:
    """A copy whose routers send every token to the first two of four experts."""
    shutil.copytree(hf_dir, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("router.bias"):
            tensor[2:] -= 1e3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("ranks", "fsdp2"),
    [
        (2, {**EP2, "recompute_modules": WRAP, "use_reentrant": False}),
        pytest.param(4, {"expert_parallel_size": 4}, marks=pytest.mark.full),
    ],
)
def test_all_tokens_go_to_one_rank(
    ranks: int, fsdp2: dict[str, Any], ranks2: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    """E01: experts without tokens have zero gradients, not none, and the step is that of one process."""
    hf_dir = biased(case_of("gpt_oss").hf_dir, tmp_path / "hf")
    found = run("gpt_oss", ranks2 if ranks == 2 else ranks4, tmp_path, fsdp2, hf_dir)
    assert_same(found, tmp_path, reference("gpt_oss", hf_dir))
    grad = found[0].steps[0]["model.layers.0.mlp.experts.gate_up_proj"]
    assert grad[2:].eq(0).all() and grad[:2].ne(0).any()


def is_decoder(name: str) -> bool:
    return not name.startswith("model.visual")


def test_frozen_experts_stay_frozen(ranks2: RankPool, tmp_path: Path) -> None:
    """E03: the decoder with its experts is frozen, the tower in front of it is trained through the experts."""
    hf_dir = case_of("qwen3_vl_moe").hf_dir
    expected = reference("qwen3_vl_moe", hf_dir, is_decoder)
    found = run("qwen3_vl_moe", ranks2, tmp_path, EP2, model={"text_decoder": {"freeze": True}})
    assert found[0].trained == found[1].trained == {name for name in found[0].parts if not is_decoder(name)}
    assert_same(found, tmp_path, expected)
    assert_split(found, 2, 1, expected)


@pytest.mark.full
def test_experts_after_plain_steps(ranks2: RankPool, tmp_path: Path) -> None:
    """E05: the weights after two steps of SGD are those of one process."""
    sgd = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5, "weight_decay": 0.0}
    weights = [run("qwen3_moe", ranks2, tmp_path / kind, keys, **sgd)[0].weights for kind, keys in
               (("split", EP2), ("whole", {}))]  # fmt: skip
    worst = worst_difference(*weights)
    assert worst[0] < 1e-5, worst
    start = load_all(case_of("qwen3_moe").hf_dir)["model.layers.0.mlp.experts.0.down_proj.weight"]
    assert (weights[0]["model.layers.0.mlp.experts.down_proj"][0] - start).norm() > 1e-3 * start.norm()


def is_expert(key: str) -> bool:
    """Whether a stored tensor is of the decoder's experts; parts of an Omni model only copied have some, too."""
    return ".experts." in key and not key.startswith(("talker.", "code2wav."))


def load_export_and_count(model: dict[str, Any], wrap: list[str], folder: Path, sizes: dict[str, int]) -> int:
    """`load_and_export`; how many elements of experts this rank read."""
    from mindspeed_mm.checkpoint.sources import SafetensorsWeights

    read, count = SafetensorsWeights._read, 0

    def counted(self: Any, name: str, region: Any) -> torch.Tensor:
        nonlocal count
        tensor = read(self, name, region)
        count += tensor.numel() if is_expert(name) else 0
        return tensor

    with mock.patch.object(SafetensorsWeights, "_read", counted):
        load_and_export(model, wrap, folder, sizes)
    return count


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            *pair, marks=[] if pair[0].startswith("qwen3_moe") and pair[1].endswith("over 2") else [pytest.mark.full]
        )
        for pair in BY_NAME
    ],
)
def test_weights_come_out_as_they_went_in(name: str, layout: str, ranks4: RankPool, tmp_path: Path) -> None:
    """Each rank reads its own part of the experts only: stored one by one, or all of a layer in one tensor."""
    case, (_, experts, shards) = case_of(name), LAYOUTS[layout]
    model = {**case.family.model, "init_from_hf_path": str(case.hf_dir)}
    sizes = {"dp": 4, "ep": experts, "ep_shard": shards}
    read = ranks4.run(load_export_and_count, model, list(case.family.wrap), tmp_path / "hf", sizes, timeout=120)
    exported, source = load_all(tmp_path / "hf"), load_all(case.hf_dir)
    assert exported.keys() == source.keys()
    for key, tensor in source.items():
        assert exported[key].dtype == tensor.dtype and torch.equal(exported[key], tensor), key
    total = sum(tensor.numel() for key, tensor in source.items() if is_expert(key))
    assert read == [total // (experts * shards)] * 4


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "EP 2, sharded over 2": (4, EP2),
    "EP 4": (4, {"expert_parallel_size": 4}),
    "EP 2": (2, EP2),
    "no EP, 2 ranks": (2, {}),
    "one process": (1, {}),
}
MOVES = [("EP 2, sharded over 2", place) for place in PLACES if place != "EP 2, sharded over 2"]
MOVES += [("one process", "EP 2, sharded over 2"), ("EP 4", "EP 2")]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*m, marks=pytest.mark.full) for m in MOVES],
)
def test_a_run_goes_on_with_another_number_of_expert_ranks(
    request: pytest.FixtureRequest, before: str, after: str, tmp_path: Path
) -> None:
    """Weights and optimizer: two steps, saved, and two more in another layout equal four of a plain loop."""
    case = case_of("gpt_oss")

    def launch(place: str, **flags: Any) -> None:
        ranks, fsdp2 = PLACES[place]
        run("gpt_oss", request.getfixturevalue(f"ranks{ranks}"), tmp_path, fsdp2, **flags)

    launch(before, no_save_optim=None)
    launch(after, no_save_optim=None, load=tmp_path / "run", train_iters=4)
    losses, norms, _ = train_reference(case.hf_dir, case.inputs(), 4, clip=1e9)
    found = metrics_of(tmp_path / "run")
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)


def exported_from_scratch(pool: RankPool, folder: Path, fsdp2: dict[str, Any]) -> dict[str, torch.Tensor]:
    flags = {
        "model": {"train_from_scratch": True, "ignore_weights": True},
        "lr": 0.0,
        "weight_decay": 0.0,
        "train_iters": 1,
    }
    return run("gpt_oss", pool, folder, fsdp2, **flags)[0].weights


@pytest.mark.full
def test_random_weights_do_not_depend_on_the_number_of_expert_ranks(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    two, four = exported_from_scratch(ranks2, tmp_path / "two", {}), exported_from_scratch(ranks4, tmp_path / "4", EP2)
    assert two.keys() == four.keys()
    assert all(torch.equal(four[name], value) for name, value in two.items())
