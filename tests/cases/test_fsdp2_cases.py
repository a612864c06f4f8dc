"""Cases of the kinds FSDP2 wrapping, Loss and Nodes and processes, on two gloo ranks beside one process.

The real entry script runs on flags and files. Steps that compare gradients use SGD: AdamW's first step hides a factor.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mindspeed_mm.models.common.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.models.common.module import MultiModalModule
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, words, write_mixed_dataset
from tests.support.workers import RankPool


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    """One worker."""
    pool = RankPool(1)
    yield pool
    pool.close()


def run(
    pool: RankPool,
    folder: Path,
    hf_dir: Path,
    data: Path,
    *,
    model: dict[str, Any] | None = None,
    fsdp2: dict[str, Any] | None = None,
    **flags: Any,
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a launch; its run folder is `folder`/run."""
    wrap = WRAP_TEXT if "vision_config" not in (hf_dir / "config.json").read_text() else WRAP
    files = write_run_files(folder, hf_dir, data, model=model, fsdp2={"sub_modules_to_wrap": wrap, **(fsdp2 or {})})
    settings = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 1, "save": folder / "run"}
    settings |= {"no_save_optim": True, **flags}
    pool.run(run_entry, launch_flags(files, **settings), timeout=60)
    return metrics_of(folder / "run")


SGD: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0}


def step(pool: RankPool, folder: Path, hf_dir: Path, data: Path, **flags: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Loss and norm of one step, and the weights after it: rate 1, so that they differ by the gradient."""
    return (
        run(pool, folder, hf_dir, data, **{**SGD, "save_hf": True, **flags}),
        load_file(folder / "run/hf/model.safetensors"),
    )


def number_of_targets(hf_dir: Path, data: Path) -> list[int]:
    return [int((row["labels"][0, 1:] != -100).sum()) for row in rows_as_inputs(hf_dir, data)]


def keep_rows(data: Path, name: str, keep: slice) -> Path:
    """A file with some of the rows, beside the whole one."""
    path = data.with_name(name)
    path.write_text(json.dumps(json.loads(data.read_text())[keep]))
    return path


# --- FSDP2 wrapping


@pytest.fixture(scope="module")
def one_image_one_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows: the first has an image, the second none."""
    folder = tmp_path_factory.mktemp("one_image_one_text")
    rows = json.loads(write_mixed_dataset(folder, rows=9, seed=2).read_text())
    image = next(row for row in rows if len(row["images"]) == 1)
    text = next(row for row in rows if not row["images"])
    path = folder / "data.json"
    path.write_text(json.dumps([image, text]))
    return path


FROZEN = {"freeze": True}
VISION = {"vision_encoder": FROZEN, "vision_projector": FROZEN}


TOWERS: dict[str, dict[str, Any]] = {
    "trainable": {},
    "frozen": {"image_encoder": VISION},
    "alone trainable": {"text_decoder": FROZEN},
}


@pytest.mark.parametrize("tower", TOWERS)
def test_f01_one_rank_has_no_image(
    ranks2: RankPool, alone: RankPool, qwen2_5_vl_dir: Path, one_image_one_text: Path, tmp_path: Path, tower: str
) -> None:
    """F01: both ranks go on; the text row's loss is what it is alone; the tower's gradient is the image row's."""
    hf_dir, data = qwen2_5_vl_dir, one_image_one_text
    model = TOWERS[tower]
    both = run(ranks2, tmp_path / "both", hf_dir, data, model=model, lr=0.0, train_iters=2)
    assert both[0][0] == both[0][1] and both[1][0] == both[1][1]  # rate 0: an epoch is a step
    image_targets, text_targets = number_of_targets(hf_dir, data)
    settings: dict[str, Any] = {"model": model, "lr": 0.0, "global_batch_size": 1}
    image = run(alone, tmp_path / "image", hf_dir, keep_rows(data, "image.json", slice(0, 1)), **settings)
    targets = image_targets + text_targets
    if tower == "alone trainable":  # the text row has no gradient at all: the norm is the tower's
        assert both[1][0] * targets == pytest.approx(image[1][0] * image_targets, rel=1e-5)
    else:
        text = run(alone, tmp_path / "text", hf_dir, keep_rows(data, "text.json", slice(1, 2)), **settings)
        rest = both[0][0] * targets - image[0][0] * image_targets
        assert rest == pytest.approx(text[0][0] * text_targets, rel=1e-6)


def tied_storage(hf_dir: str) -> dict[str, Any]:
    """Build a tied model on meta, shard, load: what is shared."""
    from mindspeed_mm.checkpoint.sources import open_weights
    from mindspeed_mm.checkpoint.weights import load_weights
    from mindspeed_mm.models.transformers_model import TransformersModel

    with torch.device("meta"):
        model = TransformersModel({"init_from_hf_path": hf_dir})
    model.weights_come_later = True
    model.fsdp2_overrides = {"sub_modules_to_wrap": WRAP, "sharding_size": "auto"}
    model.fully_shard()
    load_weights(model.model, open_weights(hf_dir))
    head, embedding = model.model.lm_head.weight, model.model.get_input_embeddings().weight
    return {
        "one parameter": head is embedding,
        "one storage": head.to_local().data_ptr() == embedding.to_local().data_ptr(),
        "names": [n for n, _ in model.model.named_parameters() if "lm_head" in n or "embed_tokens" in n],
        "value": embedding.full_tensor().detach(),
    }


def test_f04_tied_model_from_meta(ranks2: RankPool, tmp_path: Path) -> None:
    """F04: from HF weights, from a checkpoint and from scratch: one parameter with the gradients of both uses."""
    hf_dir = tiny_qwen2_5_vl_dir(tmp_path / "hf", seed=3, tie=True)
    source = load_file(hf_dir / "model.safetensors")
    name = next(n for n in source if n.endswith("embed_tokens.weight"))
    for found in ranks2.run(tied_storage, str(hf_dir)):
        assert found["one parameter"] and found["one storage"]
        assert len(found["names"]) == 1
        assert torch.equal(found["value"], source[name])

    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=5)
    go = functools.partial(run, ranks2, hf_dir=hf_dir, data=data)
    settings: dict[str, Any] = {"init_model_with_meta_device": True, "global_batch_size": 4, "train_iters": 3}
    settings["save_hf"] = True
    from_hf = go(tmp_path / "hf start", **settings)
    expected = train_reference(hf_dir, rows_as_inputs(hf_dir, data), 3)
    assert from_hf[0] == pytest.approx(expected[0], rel=1e-6)
    assert from_hf[1] == pytest.approx(expected[1], rel=1e-5)
    trained = load_file(tmp_path / "hf start/run/hf/model.safetensors")
    assert "lm_head.weight" not in trained
    by_hand = next(v for n, v in expected[2].items() if n.endswith("embed_tokens.weight"))
    assert torch.allclose(trained[name], by_hand, rtol=1e-4, atol=1e-6)

    scratch = {"train_from_scratch": True, "ignore_weights": True}
    meta = go(tmp_path / "scratch", model=scratch, **settings)
    plain = go(tmp_path / "plain scratch", model=scratch, **{**settings, "init_model_with_meta_device": None})
    assert meta == plain
    assert len(meta[0]) == 3 and meta[0][2] < meta[0][0]


def test_f04_checkpoint_into_a_model_from_meta(ranks2: RankPool, tmp_path: Path) -> None:
    """F04, F06: resumed on meta, a model goes on as the unbroken run, buffers that no checkpoint holds included."""
    hf_dir = tiny_qwen2_5_vl_dir(tmp_path / "hf", seed=3, tie=True)
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=5)
    settings: dict[str, Any] = {"init_model_with_meta_device": True, "global_batch_size": 4, "train_iters": 3}
    settings["no_save_optim"] = None
    settings["use_deter_comp"] = True  # storage without a value is then NaN, not what happened to lie there
    unbroken = run(ranks2, tmp_path / "unbroken", hf_dir, data, **settings)
    run(ranks2, tmp_path / "parts", hf_dir, data, **settings, exit_interval=1)
    resumed = run(ranks2, tmp_path / "parts", hf_dir, data, **settings, load=tmp_path / "parts/run")
    assert resumed == unbroken


def test_f08_norm_and_clipping_of_replicas(ranks2: RankPool, alone: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """F08: sharded over 2, copied on 2, one process: the same norm and the same weights; 0 measures only."""
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=5, images=False)
    before = load_file(qwen3_dir / "model.safetensors")
    layouts = {"shard": (ranks2, 2), "replicate": (ranks2, 1), "one": (alone, 1)}
    for clip in (0.0, 0.25, 1e6):
        norms, weights = {}, {}
        for name, (pool, size) in layouts.items():
            settings = {"fsdp2": {"sharding_size": size}, "global_batch_size": 4, "clip_grad": clip}
            (_, norms[name]), weights[name] = step(pool, tmp_path / f"{name} {clip}", qwen3_dir, data, **settings)
        for name in ("shard", "replicate"):
            assert norms[name] == pytest.approx(norms["one"], rel=1e-5)
            for key, value in weights["one"].items():
                assert torch.allclose(weights[name][key], value, rtol=1e-5, atol=1e-7), key
        moved = torch.stack([(weights["one"][k] - v).double().square().sum() for k, v in before.items()]).sum().sqrt()
        assert norms["one"][0] > 0.25
        assert float(moved) == pytest.approx(0.25 if clip == 0.25 else norms["one"][0], rel=1e-4)


class Tower(nn.Module):
    """An encoder with a projector that its parent calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.projector = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.encoder(x))


class CallsInside(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """Calls a child of its tower after the tower's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        torch.manual_seed(1)
        self.init_weights()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower.projector(self.tower(x))


def gradients_of_a_call_inside(overrides: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    model = CallsInside()
    plain = CallsInside()
    plain.load_state_dict(model.state_dict())
    model.fsdp2_overrides = {"sharding_size": "auto", **overrides}
    x = torch.arange(8.0).reshape(2, 4)
    plain(x).square().sum().backward()
    try:
        model.fully_shard()
        model(x).square().sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}", {}
    expected = {name: param.grad for name, param in plain.named_parameters()}
    return "", {n: (p.grad.full_tensor() / 2 - expected[n]).abs().max() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "units",
    [
        ["tower"],
        ["tower", "tower.projector"],
        [],
    ],
    ids=["tower", "tower and projector", "root"],
)
def test_f09_a_parent_calls_a_child_of_a_unit(ranks2: RankPool, units: list[str]) -> None:
    """F09: works, or is refused with a sentence that names the module and what to list."""
    for error, errors in ranks2.run(gradients_of_a_call_inside, {"sub_modules_to_wrap": units}):
        if error:
            assert error.startswith("ConfigError") and "tower.projector" in error and "sub_modules_to_wrap" in error
        else:
            assert len(errors) == 4 and max(errors.values()) < 1e-5


def test_r01_trainable_projector_over_a_frozen_tower(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    """R01: reentrant recompute of everything, the tower frozen below its projector: equal to recompute off."""
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=5)
    model = {"image_encoder": {"vision_encoder": FROZEN, "vision_projector": {"freeze": False}}, "text_decoder": FROZEN}
    settings: dict[str, Any] = {"model": model, "global_batch_size": 4, "train_iters": 2}
    off = run(ranks2, tmp_path / "off", qwen2_5_vl_dir, data, **settings)
    recompute = {"recompute_modules": ["model.visual.merger", *WRAP], "use_reentrant": True}
    on = run(ranks2, tmp_path / "on", qwen2_5_vl_dir, data, fsdp2=recompute, **settings)
    assert on[0] == pytest.approx(off[0], rel=1e-6)
    assert on[1] == pytest.approx(off[1], rel=1e-5)
    assert min(off[1]) > 1e-4  # the projector is all that is trained


# --- loss


def write_answers(folder: Path, lengths: list[int]) -> Path:
    """Text rows whose answers have these numbers of words."""
    rng = random.Random(4)
    rows = [
        {
            "messages": [
                {"role": "user", "content": words(rng, 5)},
                {"role": "assistant", "content": words(rng, length) if length else ""},
            ],
            "images": [],
        }
        for length in lengths
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "answers.json"
    path.write_text(json.dumps(rows))
    return path


def assert_same_step(a: tuple[Any, dict[str, torch.Tensor]], b: tuple[Any, dict[str, torch.Tensor]]) -> None:
    assert a[0][0] == pytest.approx(b[0][0], rel=1e-6)
    assert a[0][1] == pytest.approx(b[0][1], rel=1e-5)
    for name, value in b[1].items():
        assert torch.allclose(a[1][name], value, rtol=1e-5, atol=1e-6), name


def test_l01_accumulation_of_unequal_answers(alone: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """L01: answers of 1, 2, 30 and 60 words: one batch of 4 and four of 1 make the same step."""
    data = write_answers(tmp_path, [1, 2, 30, 60])
    counts = number_of_targets(qwen3_dir, data)
    assert counts == sorted(counts) and counts[3] > 10 * counts[0]
    whole = step(alone, tmp_path / "whole", qwen3_dir, data, global_batch_size=4, micro_batch_size=4)
    assert_same_step(step(alone, tmp_path / "four", qwen3_dir, data, global_batch_size=4, micro_batch_size=1), whole)
    (loss,), (norm,), _ = train_reference(qwen3_dir, rows_as_inputs(qwen3_dir, data), 1, lr=0.0)
    assert whole[0][0] == pytest.approx([loss], rel=1e-6)
    assert whole[0][1] == pytest.approx([norm], rel=1e-5)


def test_l02_ranks_with_unequal_answers(ranks2: RankPool, alone: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """L02: one target token on one rank, some sixty on the other: the step of one process with both rows."""
    data = write_answers(tmp_path, [0, 60])
    assert number_of_targets(qwen3_dir, data)[0] == 1
    one = step(alone, tmp_path / "one", qwen3_dir, data, micro_batch_size=2)
    assert_same_step(step(ranks2, tmp_path / "two", qwen3_dir, data), one)
    assert_same_step(step(ranks2, tmp_path / "copies", qwen3_dir, data, fsdp2={"sharding_size": 1}), one)


# --- ignored modules


def test_ignored_modules_of_a_bf16_run(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    """A frozen tower and a trained head that FSDP2 ignores: the loss, the step and the weights of a run without."""
    data = write_mixed_dataset(tmp_path / "data", rows=2, seed=5)
    model = {"image_encoder": {"vision_encoder": {"freeze": True}, "vision_projector": {"freeze": True}}}
    settings: dict[str, Any] = {"model": model, "bf16": True}
    ignored = {"ignored_modules": ["model.visual", "lm_head"]}
    plain = step(ranks2, tmp_path / "plain", qwen2_5_vl_dir, data, **settings)
    found = step(ranks2, tmp_path / "ignored", qwen2_5_vl_dir, data, fsdp2=ignored, **settings)
    assert_same_step(found, plain)
    source = load_file(qwen2_5_vl_dir / "model.safetensors")
    tower = {name for name in source if name.startswith("visual.") or ".visual." in name}
    assert tower and all(torch.equal(found[1][name], source[name]) for name in tower)


# --- nodes and processes


def test_n03_one_process_is_no_special_case(
    ranks2: RankPool, alone: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path
) -> None:
    """N03: the same fsdp2.yaml on one process and on two: the same dtypes, so the same bf16 losses (not fp32's)."""
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=5)
    bf16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    settings: dict[str, Any] = {"global_batch_size": 4, "train_iters": 2}
    one = run(alone, tmp_path / "one", qwen2_5_vl_dir, data, fsdp2=bf16, **settings)
    two = run(ranks2, tmp_path / "two", qwen2_5_vl_dir, data, fsdp2=bf16, **settings)
    assert one[0][0] == pytest.approx(two[0][0], rel=1e-6)  # a row is a micro-batch on either: the same sums
    assert one[1][0] == pytest.approx(two[1][0], rel=1e-4)
    assert one[0][1] == pytest.approx(two[0][1], rel=1e-4)
    full = run(alone, tmp_path / "full", qwen2_5_vl_dir, data, **settings)
    assert full[0][0] != pytest.approx(one[0][0], rel=3e-6)
    assert full[1][0] != pytest.approx(one[1][0], rel=3e-4)
