"""A diffusers transformer on the FSDP2 backend: weights in, averages, checkpoints and exports, on any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.dcp_reader import DcpReader
from tests.support.trained_wan import TrainedWan, write_wan_dir
from tests.support.workers import RankPool

LAYOUTS: dict[str, tuple[str, int | str]] = {"1": ("ranks1", "auto"), "2": ("ranks2", "auto"), "HSDP": ("ranks4", 2)}
# four ranks on two cores: in the whole tables only; test_generation_layouts.py has a run of them in the suite
HSDP = pytest.param("HSDP", marks=pytest.mark.full)
#: added to the root of AdamW's second moment: without it the first step is as long for a gradient of rounding alone
EPSILON = {"adam_eps": 1e-4}
BEFORE, AFTER = 4, 3  # steps before and after the checkpoint; the second one is skipped


def first_run(root: str, source: str, sharding_size: int | str) -> dict[str, Any]:
    """Load, train, save twice, train on; what went in and what came out."""
    run = TrainedWan(root, sharding_size=sharding_size, model={"source": source, "ema_decay": 0.5}, **EPSILON)
    loaded = run.whole()
    losses = [run.step(spoilt=i == 1) for i in range(BEFORE)]
    run.save(in_background=True)
    run.backend.export_hf(Path(root) / "hf_iter_0000004", is_final=False)
    losses += [run.step() for _ in range(AFTER)]
    run.save(in_background=False)
    return {"loaded": loaded, "losses": losses, "end": run.whole(), "ema": run.backend.ema.state_dict()}


def second_run(root: str, checkpoint: str, sharding_size: int | str) -> dict[str, Any]:
    """Go on after the first run's first checkpoint."""
    run = TrainedWan(root, sharding_size=sharding_size, resumes=True, ema_decay=0.5, **EPSILON)
    run.load(checkpoint)
    losses = [run.step() for _ in range(AFTER)]
    return {"losses": losses, "end": run.whole(), "ema": run.backend.ema.state_dict()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan_dir(tmp_path_factory.mktemp("wan"), max_shard_size="20KB")


ON_ANOTHER = [
    ("1", "2"),
    ("2", "1"),
    pytest.param("1", "HSDP", marks=pytest.mark.full),
    pytest.param("HSDP", "2", marks=pytest.mark.full),
]


class FirstRuns(dict[str, dict[str, Any]]):
    """What the first run gave on each layout (rank 0), and its folder; run when it is first asked for."""

    def __init__(self, folders: pytest.TempPathFactory, source: Path, request: pytest.FixtureRequest) -> None:
        super().__init__()
        self._folders, self._source, self._request = folders, source, request

    def __missing__(self, layout: str) -> dict[str, Any]:
        pool, size = LAYOUTS[layout]
        root = self._folders.mktemp(f"run-{layout}")
        ranks = self._request.getfixturevalue(pool).run(first_run, str(root), str(self._source), size, timeout=120)
        self[layout] = {**ranks[0], "root": root}
        return self[layout]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, source: Path, request: pytest.FixtureRequest) -> FirstRuns:
    return FirstRuns(tmp_path_factory, source, request)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("layout", ["1", "2", HSDP])
def test_weights_come_from_a_diffusers_directory_exactly(first: FirstRuns, source: Path, layout: str) -> None:
    expected = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    loaded = first[layout]["loaded"]
    assert len(list(source.glob("*.safetensors"))) > 2
    assert {n for n in loaded if n.startswith("model.")} == {f"model.{n}" for n in expected}
    for name, tensor in expected.items():
        assert torch.equal(loaded[f"model.{name}"], tensor), name
        assert torch.equal(loaded[f"ema.{name}"], tensor), name


@pytest.mark.parametrize("layout", ["2", HSDP])
def test_losses_and_averages_do_not_depend_on_the_layout(first: FirstRuns, layout: str) -> None:
    one, other = first["1"], first[layout]
    finite = [loss for i, loss in enumerate(one["losses"]) if i != 1]
    assert finite == pytest.approx([loss for i, loss in enumerate(other["losses"]) if i != 1], rel=1e-6)
    assert_close(one["end"], other["end"])
    assert one["ema"] == other["ema"] == {"steps": BEFORE + AFTER - 1, "max_decay": 0.5}


def test_averages_lag_behind_the_weights(first: FirstRuns) -> None:
    end, start = first["1"]["end"], first["1"]["loaded"]
    name = "blocks.0.attn1.to_q.weight"
    moved, averaged = (end[f"{kind}.{name}"] - start[f"model.{name}"] for kind in ("model", "ema"))
    assert 0.2 < float(averaged.norm() / moved.norm()) < 0.99


@pytest.mark.parametrize(("layout", "of"), ON_ANOTHER)
def test_a_run_goes_on_on_another_layout(
    first: FirstRuns, request: pytest.FixtureRequest, tmp_path: Path, layout: str, of: str
) -> None:
    pool, size = LAYOUTS[layout]
    checkpoint = first[of]["root"] / f"iter_{BEFORE:07d}"
    found = request.getfixturevalue(pool).run(second_run, str(tmp_path), str(checkpoint), size, timeout=120)[0]
    assert found["losses"] == pytest.approx(first["1"]["losses"][BEFORE:], rel=1e-6)
    assert_close(found["end"], first["1"]["end"])
    assert found["ema"] == first["1"]["ema"]


@pytest.mark.parametrize("layout", ["1", "2", HSDP])
def test_a_checkpoint_holds_the_averages_once(first: FirstRuns, layout: str) -> None:
    for iteration, taken in ((BEFORE, BEFORE - 1), (BEFORE + AFTER, BEFORE + AFTER - 1)):
        folder = first[layout]["root"] / f"iter_{iteration:07d}"
        names = DcpReader(folder).tensors
        assert {n for n in names if n.startswith("ema.")} == {n for n in first["1"]["end"] if n.startswith("ema.")}
        assert json.loads((folder / "state.json").read_text())["ema"] == {"steps": taken, "max_decay": 0.5}


@pytest.mark.parametrize("layout", ["1", "2", HSDP])
def test_exports_hold_weights_and_averages(first: FirstRuns, layout: str) -> None:
    from diffusers import WanTransformer3DModel

    root = first[layout]["root"]
    reader = first[layout]
    models = {
        kind: WanTransformer3DModel.from_pretrained(root / f"{name}_iter_0000004")
        for kind, name in (("model", "hf"), ("ema", "hf_ema"))
    }
    trained, averaged = (models[kind].state_dict() for kind in ("model", "ema"))
    assert trained.keys() == averaged.keys() == {n.removeprefix("model.") for n in reader["end"] if "model." in n}
    differing = [n for n in trained if not torch.equal(trained[n], averaged[n])]
    assert len(differing) > len(trained) // 2
    one = WanTransformer3DModel.from_pretrained(first["1"]["root"] / "hf_ema_iter_0000004").state_dict()
    assert_close(one, averaged)


def start_and_stop_averaging(root: str, source: str) -> dict[str, Any]:
    """A checkpoint without averages that is gone on with, and one with them that is gone on without."""
    import logging

    from mindspeed_mm.utils import log

    said: list[str] = []
    keeper = logging.Handler()
    keeper.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.forget_notices()
    log.logger.addHandler(keeper)
    try:
        plain = TrainedWan(root, model={"source": source})
        plain.step()
        plain.save(in_background=False)
        averaged = TrainedWan(root, resumes=True, ema_decay=0.9, no_save_optim=True)
        averaged.load(f"{root}/iter_0000001")
        begun = averaged.whole()
        averaged.step()
        averaged.save(in_background=True)
        again = TrainedWan(root, resumes=True, ema_decay=0.0, model={"ema_decay": 0.9})
        again.backend.load(Path(f"{root}/iter_0000002"), optimizer=False, rng=False, schedule=True)
        weights = TrainedWan(root, model={"ema_decay": 0.9})
        weights.backend.load_weights(Path(f"{root}/iter_0000001"))
        return {
            "said": said,
            "begun": begun,
            "steps": averaged.backend.ema.state_dict()["steps"],
            "is_averaged": again.backend.ema is not None,
            "from weights": weights.whole(),
        }
    finally:
        log.logger.removeHandler(keeper)


def test_averaging_may_begin_and_end_with_a_resume(ranks2: RankPool, source: Path, tmp_path: Path) -> None:
    found = ranks2.run(start_and_stop_averaging, str(tmp_path), str(source), timeout=120)[0]
    for tensors in (found["begun"], found["from weights"]):
        averages = {n.removeprefix("ema."): t for n, t in tensors.items() if n.startswith("ema.")}
        assert len(averages) > 20
        assert all(torch.equal(t, tensors[f"model.{n}"]) for n, t in averages.items())
    assert found["steps"] == 1
    assert not found["is_averaged"]
    assert [s for s in found["said"] if "holds no averaged weights" in s]
    assert [s for s in found["said"] if "holds averaged weights (--ema-decay)" in s]
