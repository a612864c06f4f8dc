"""Weights, checkpoints and exports of the Megatron backend: any layout goes on from what any other has written.

What a layout holds is put together by other means than the package's (`tests/support/megatron_state.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.megatron_state import LAYOUTS, RANKS, SEED, Layout, Run, Sharded, differences, write
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir
from tests.support.tiny_families import weights_in
from tests.support.workers import RankPool

# (model, layout)
EXPORTS = (
    ("tied", "TP2 PP2"),
    ("tied", "PP2 VPP2 DP2 distributed"),
    ("untied", "DP4 distributed bf16"),
    ("untied", "TP4 bf16"),
    ("vl", "TP2 PP2"),
    ("vl", "DP4 distributed bf16"),
)
DRAWN = {"tied": "TP2 PP2", "untied": "TP4 bf16", "vl": "PP2 VPP2 DP2 distributed"}


def every_layout_resumes_from_every_other(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """Save in one layout, load in the next, step, save …; then to FSDP2 and back. What differs, by transition."""
    found: dict[str, list[str]] = {}
    names = list(LAYOUTS)
    run = Run(hf_dir, LAYOUTS[names[0]])
    run.step(0)
    run.step(1)
    for number, name in enumerate(names[1:], start=2):
        before, directory = run.whole(), folder / f"chain{number}"
        run.save(directory)
        run = Run(hf_dir, LAYOUTS[name], seed=SEED + number)
        extra = run.load(directory)
        found[f"{names[number - 2]} → {name}"] = differences(run.whole(), before)
        masters = {k: v for k, v in before.items() if k.startswith("model.")}
        dtype = getattr(torch, LAYOUTS[name].dtype)
        found[f"parameters of {name}"] = differences(
            run.whole_parameters(), {k: v.to(dtype) for k, v in masters.items()}
        )
        found[f"state of {name}"] = [] if extra["iteration"] == 1 and extra["has_optimizer"] else [json.dumps(extra)]
        run.step(number)
    before = run.whole()
    run.save(folder / "to-fsdp2")
    sharded = Sharded(hf_dir)
    sharded.load(folder / "to-fsdp2")
    found[f"{names[-1]} → FSDP2"] = differences(sharded.whole(), before)
    sharded.save(folder / "from-fsdp2")
    run = Run(hf_dir, LAYOUTS["TP2 DP2 distributed"], seed=None)
    run.load(folder / "from-fsdp2")
    found["FSDP2 → TP2 DP2 distributed"] = differences(run.whole(), before)
    return found


def stages_to_tensor_parallel_ranks(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    run = Run(hf_dir, LAYOUTS["PP2 VPP2 DP2 distributed"])
    run.step(0)
    before = run.whole()
    run.save(folder / "stages")
    run = Run(hf_dir, LAYOUTS["TP4 bf16"], seed=None)
    run.load(folder / "stages")
    return {"all": differences(run.whole(), before)}


def steps_that_differ(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """Torch counts steps by parameter, Megatron by group."""
    from unittest import mock

    sharded = Sharded(hf_dir)
    sharded.whole()  # makes the optimizer's state
    for number, state in enumerate(sharded.optimizer.state.values()):
        state["step"].fill_(7 if number % 2 else 9)
    sharded.save(folder / "steps")
    run = Run(hf_dir, LAYOUTS["TP2 PP2"], seed=None)
    from mindspeed_mm.checkpoint.megatron import load as megatron_load

    with mock.patch.object(megatron_load, "notice") as notice:
        run.load(folder / "steps")
    steps = {group["step"] for group in run.optimizer.param_groups}
    return {"steps": steps, "said": notice.call_args.args[0]}


def frozen_parts_and_momentum(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """What is not trained is saved without optimizer state, also where a stage trains nothing; SGD's state is saved."""
    found = {}
    first_half = ("embed_tokens", "layers.0.", "layers.1.")
    pairs = {
        "frozen, to a stage that trains nothing": (
            Layout(distributed=True, dtype="bfloat16", frozen=first_half),
            Layout(tensor=2, pipeline=2, frozen=first_half),
        ),
        "frozen, back": (
            Layout(pipeline=2, virtual=2, distributed=True, frozen=first_half),
            Layout(tensor=2, distributed=True, frozen=first_half),
        ),
        "SGD": (Layout(tensor=2, pipeline=2, optimizer="sgd"), Layout(optimizer="sgd", dtype="bfloat16")),
    }
    for name, (one, other) in pairs.items():
        run = Run(hf_dir, one)
        run.step(0)
        run.save(folder / name)
        before = run.whole()
        run = Run(hf_dir, other, seed=SEED + 1)
        run.load(folder / name)
        found[name] = differences(run.whole(), before)
        trained = [k for k in before if k.startswith("optimizer.") and any(part in k for part in first_half)]
        assert bool(trained) == (name == "SGD")
    return found


def detached_snapshots_keep_their_moment(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """Steps taken before a detached snapshot is written don't reach it, the second time neither."""
    moments = {}
    for name in ("TP2 DP2 distributed", "PP2 DP2 fp16"):
        run = Run(hf_dir, LAYOUTS[name])
        snapshots = run.stored.snapshots(save_optimizer=True, save_rng=False)
        for number in (0, 2):
            run.step(number)
            moments[f"{name} {number}"] = before = run.whole()
            snapshot = snapshots.take({"iteration": number}, detached=True)
            run.step(number + 1)
            assert differences(run.whole(), before)
            write(snapshot, folder / f"{name} {number}")
    other = Run(hf_dir, LAYOUTS["DP4"], seed=None)
    found = {}
    for name, moment in moments.items():
        other.load(folder / name)
        found[name] = differences(other.whole(), moment)
    return found


def misfits(folder: Path, hf_dir: Path, smaller: Path) -> dict[str, str]:
    """What is said of checkpoints that don't fit, by case; whatever is refused changes nothing."""
    from mindspeed_mm.utils.errors import CheckpointError

    run = Run(hf_dir, LAYOUTS["TP2 DP2 distributed"])
    run.step(0)
    run.save(folder / "whole")
    snapshots = run.stored.snapshots(save_optimizer=False, save_rng=False)
    write(snapshots.take({"iteration": 1}, detached=False), folder / "no optimizer")
    saved = run.whole()
    said = {}
    shallow = Run(smaller, LAYOUTS["TP2 PP2"])
    narrow = Run(hf_dir, Layout(tensor=2, pipeline=2, frozen=("layers.0.",)), seed=SEED + 1)
    cases: dict[str, tuple[Run, str]] = {
        "another model": (shallow, "whole"),
        "frozen": (narrow, "whole"),
        "no optimizer": (narrow, "no optimizer"),
    }
    for name, (run, directory) in cases.items():
        before = {n: p.detach().clone() for c in run.chunks for n, p in c.named_parameters()}
        with pytest.raises(CheckpointError) as error:
            run.load(folder / directory)
        said[name] = str(error.value)
        for chunk in run.chunks:
            assert all(torch.equal(before[n], p) for n, p in chunk.named_parameters()), name
    narrow.load(folder / "whole", strict=False)
    found = narrow.whole()
    said["not strict"] = " ".join(k for k, v in found.items() if not torch.equal(v, saved[k]))
    narrow.load(folder / "no optimizer", optimizer=False, rng=False)
    kept = narrow.whole()
    said["without optimizer"] = " ".join(k for k in found if not torch.equal(kept[k], found[k]))
    return said


def weights_go_in_and_out(target: Path, hf_dir: Path, layout: str) -> None:
    """Load a directory and export it."""
    Run(hf_dir, LAYOUTS[layout], weights=hf_dir).stored.export_hf(target, str(hf_dir), None)


def weights_of_a_checkpoint(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """A torch_dcp folder as weights, into what the optimizer steps in higher precision too; rounded if asked for."""
    found = {}
    run = Run(hf_dir, LAYOUTS["TP2 PP2"])
    run.save(folder / "weights")
    before = {k: v for k, v in run.whole().items() if k.startswith("model.")}
    run = Run(hf_dir, LAYOUTS["DP4 distributed bf16"], weights=folder / "weights")
    found["torch_dcp"] = differences(run.whole(), before)
    run.stored.load_weights(folder / "weights", strict=True, downcast=True, allow_pickle=False)
    found["rounded"] = differences(run.whole(), {k: v.bfloat16().float() for k, v in before.items()})
    return found


def drawn_weights(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """Random weights are those that one model, built whole with the same seed, draws."""
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.transformers_model import TransformersModel

    with build_context(BuildContext(seed=SEED)):
        whole = TransformersModel({"init_from_hf_path": str(hf_dir), "train_from_scratch": True}).model
    expected = {f"model.{n}": p.detach() for n, p in whole.named_parameters()}
    layout = DRAWN[hf_dir.name]
    return {layout: differences(Run(hf_dir, LAYOUTS[layout]).whole(), expected)}


def random_states(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """Megatron-core's states come back where the layout is the same; else it is said that they don't."""
    from unittest import mock

    from mindspeed_mm.checkpoint import rng

    def draws() -> list[float]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return [*torch.rand(3).tolist(), *torch.rand(2).tolist()]

    run = Run(hf_dir, LAYOUTS["TP2 PP2"])
    draws()
    run.save(folder / "random")
    expected = draws()
    run = Run(hf_dir, LAYOUTS["TP2 PP2"])
    draws()
    draws()  # one more than before the save: only what is loaded makes them equal
    assert draws() != expected
    run.load(folder / "random")
    same = draws() == expected
    run = Run(hf_dir, LAYOUTS["DP4"])
    with mock.patch.object(rng, "notice") as notice:
        run.load(folder / "random")
    return {"same": same, "said": notice.call_args.args[0]}


def weights_that_are_missing(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """A file without a part of a fused tensor: refused, or else what is missing keeps the values drawn before."""
    from mindspeed_mm.utils.errors import CheckpointError

    source = weights_in(hf_dir)
    missing = "model.layers.1.self_attn.k_proj.weight"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v for k, v in source.items() if k != missing}, folder / "model.safetensors")
    dist.barrier()
    drawn = Run(hf_dir, LAYOUTS["DP4 distributed bf16"]).whole()
    run = Run(hf_dir, LAYOUTS["DP4 distributed bf16"], weights=folder, strict=False)
    expected = {f"model.{k}": v for k, v in source.items()} | {f"model.{missing}": drawn[f"model.{missing}"]}
    with pytest.raises(CheckpointError) as error:
        run.stored.load_weights(folder, strict=True, downcast=False, allow_pickle=False)
    return {"different": differences(run.whole(), expected), "said": str(error.value)}


def models_without_transformers(folder: Path, hf_dir: Path) -> dict[str, Any]:
    """A chunk without `param_mapping` is resumed under its own names, where as many tensor-parallel ranks split it."""
    from mindspeed_mm.utils.errors import CheckpointError

    run = Run(hf_dir, LAYOUTS["TP2 DP2 distributed"], plain=True)
    for number, param in enumerate(run.chunks[0].parameters()):
        torch.manual_seed(number * 10 + run.tensor_rank * getattr(param, "tensor_model_parallel", 0))
        param.data.normal_()
        param.main_grad.normal_()
    run.optimizer.prepare_grads()
    run.optimizer.step_with_ready_grads()
    run.save(folder / "plain")
    again = Run(hf_dir, Layout(tensor=2, dtype="bfloat16"), plain=True)
    again.load(folder / "plain")
    expected = {n: p.detach().bfloat16() for n, p in run.chunks[0].named_parameters()}
    different = differences(dict(again.chunks[0].named_parameters()), expected)
    with pytest.raises(CheckpointError) as error:
        Run(hf_dir, LAYOUTS["DP4"], plain=True).load(folder / "plain")
    return {"different": different, "said": str(error.value)}


def who_writes(folder: Path, hf_dir: Path) -> dict[str, list[int]]:
    """Bytes of the tensors that each rank wrote, by layout."""
    sizes = {}
    for name in ("DP4", "TP2 DP2 distributed", "TP2 PP2"):
        directory = folder / f"sizes {name}"
        Run(hf_dir, LAYOUTS[name]).save(directory)
        sizes[name] = [sum(p.stat().st_size for p in directory.glob(f"__{r}_*.distcp")) for r in range(RANKS)]
    return sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    tiny_qwen3_dir(folder / "tied", tie=True, deep=True)
    tiny_qwen3_dir(folder / "untied", tie=False, deep=True)
    tiny_qwen3_dir(folder / "smaller", tie=False, deep=False)
    tiny_qwen2_5_vl_dir(folder / "vl", deep=True)
    return folder


@pytest.fixture
def ranks(megatron_pools: dict[int, RankPool]) -> RankPool:
    return megatron_pools[RANKS]


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (every_layout_resumes_from_every_other, ("tied",)),
        (stages_to_tensor_parallel_ranks, ("untied", "vl")),
        (frozen_parts_and_momentum, ("tied",)),
        (detached_snapshots_keep_their_moment, ("tied",)),
        (weights_of_a_checkpoint, ("untied",)),
        (drawn_weights, ("tied", "untied", "vl")),
    ],
    ids=lambda value: getattr(value, "__name__", ", ".join(value) if isinstance(value, tuple) else ""),
)
def test_every_tensor_arrives_bit_equal(
    case: Any, kinds: tuple[str, ...], ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    for kind in kinds:
        for found in ranks.run(case, tmp_path / kind, folder / kind, timeout=120):
            assert found
            for what, different in found.items():
                assert not different, what


def test_exports_hold_what_was_loaded(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    import transformers

    for kind, layout in EXPORTS:
        target = tmp_path / f"{kind}, {layout}"
        ranks.run(weights_go_in_and_out, target, folder / kind, layout)
        source, exported = weights_in(folder / kind), weights_in(target)
        assert exported.keys() == source.keys(), target.name
        same = [v.dtype == source[k].dtype and torch.equal(v, source[k]) for k, v in exported.items()]
        assert all(same), target.name
    for kind, name in (("tied", "tied, TP2 PP2"), ("untied", "untied, TP4 bf16")):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == (kind == "tied")


def test_what_does_not_fit_is_refused_and_changes_nothing(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    said, *others = ranks.run(misfits, tmp_path, folder / "untied", folder / "smaller")
    assert all(other == said for other in others)
    assert "does not fit this model: model.model.layers.0.self_attn.o_proj.weight has" in said["another model"]
    assert "is it another model, or another config.json?" in said["another model"]
    assert "optimizer.model.layers.0." in said["frozen"] and "add --no-load-optim" in said["frozen"]
    assert "saved with --no-save-optim" in said["no optimizer"]
    assert not said["not strict"] and not said["without optimizer"]


def test_random_states_come_back_in_the_same_layout(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for found in ranks.run(random_states, tmp_path, folder / "tied"):
        assert found["same"]
        assert "4 ranks (pipeline parallelism 2, tensor parallelism 2), this run has 4 ranks" in found["said"]


def test_steps_of_a_group_that_differ_are_told(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for found in ranks.run(steps_that_differ, tmp_path, folder / "untied"):
        assert found["steps"] == {9}
        assert "took 7 to 9 steps" in found["said"]


def test_what_files_lack_keeps_its_values(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for found in ranks.run(weights_that_are_missing, tmp_path, folder / "untied"):
        assert not found["different"]
        assert "lacks 1 of Qwen3ForCausalLM's tensors: model.layers.1.self_attn.k_proj.weight" in found["said"]


def test_models_without_transformers_are_resumed_in_the_same_split(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    for found in ranks.run(models_without_transformers, tmp_path, folder / "untied"):
        assert not found["different"]
        assert "saved with --tensor-model-parallel-size 2, this run has 1" in found["said"]


def test_ranks_share_the_writing(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for name, sizes in ranks.run(who_writes, tmp_path, folder / "untied")[0].items():
        assert max(sizes) < 1.35 * sum(sizes) / RANKS, (name, sizes)
