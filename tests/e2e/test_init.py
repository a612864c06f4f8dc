"""Two commands from a model's directory and rows to a trained model: `mindspeed-mm init` and `mindspeed-mm train`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_mm.tools.cli import main
from mindspeed_mm.tools.train.target import find_target
from tests.support.first_rows import CAPTIONS, PICTURE_ROWS, ROWS
from tests.support.launch import metrics_of, run_entry
from tests.support.workers import RankPool

FULL = pytest.mark.full


def start_as_train_does(where: Path, words: list[str]) -> None:
    """Run what `mindspeed-mm train run` starts, in this process.

    Args:
        where: the folder in which it is started.
        words: section.key=value, behind the run folder.
    """
    os.chdir(where)
    _, module, *rest = find_target("run", words).words
    run_entry(rest, script=f"{module.rpartition('.')[2]}.py")


def trained(where: Path, pool: RankPool, *words: str) -> list[float]:
    """Train the run of a folder, and return the loss of each step."""
    written = (where / "run" / "run.yaml").read_text()
    pool.run(start_as_train_does, where, list(words), timeout=300)
    assert words or (where / "run" / "run.yaml").read_text() == written
    return metrics_of(where / "run")[0]


def init(*words: str) -> None:
    """Run `mindspeed-mm init` into the folder `run` of the current one."""
    assert main(["init", "--output", "run", *words]) == 0


@pytest.mark.parametrize("form", ["messages", *(pytest.param(form, marks=FULL) for form in ROWS if form != "messages")])
@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("megatron", marks=FULL)])
def test_a_text_model_learns_rows_of_each_form(
    form: str,
    backend: str,
    qwen3_dir: Path,
    ranks1: RankPool,
    megatron_pools: dict[int, RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    init("--model", str(qwen3_dir), "--data", ROWS[form](tmp_path).name, "--backend", backend)
    losses = trained(tmp_path, ranks1 if backend == "fsdp2" else megatron_pools[1])
    assert losses[-1] < 0.7 * losses[0]
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp2", marks=FULL)])
def test_a_model_that_reads_pictures_learns_llava_rows(
    backend: str,
    qwen2_5_vl_dir: Path,
    ranks1: RankPool,
    megatron_pools: dict[int, RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    init("--model", str(qwen2_5_vl_dir), "--data", PICTURE_ROWS["llava"](tmp_path).name, "--backend", backend)
    losses = trained(tmp_path, ranks1 if backend == "fsdp2" else megatron_pools[1])
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.full
def test_both_backends_have_the_same_losses(
    qwen2_5_vl_dir: Path,
    ranks1: RankPool,
    megatron_pools: dict[int, RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files that init writes for them train the same parts by the same schedule."""
    losses = {}
    for backend, pool in (("fsdp2", ranks1), ("megatron", megatron_pools[1])):
        folder = tmp_path / backend
        folder.mkdir()
        monkeypatch.chdir(folder)
        init("--model", str(qwen2_5_vl_dir), "--data", PICTURE_ROWS["llava"](folder).name, "--backend", backend)
        losses[backend] = trained(folder, pool)
    assert losses["fsdp2"] == pytest.approx(losses["megatron"], rel=1e-5)


@pytest.mark.full
def test_adapters_learn_rows(
    qwen3_dir: Path, ranks1: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init("--model", str(qwen3_dir), "--data", ROWS["messages"](tmp_path).name, "--lora")
    losses = trained(tmp_path, ranks1)
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "run" / "hf" / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name → directory of a small pipeline."""

    def saved(name: str) -> Path:
        from tests.support import tiny_image_pipelines

        path = tmp_path_factory.mktemp("pipeline") / name
        getattr(tiny_image_pipelines, name)().save_pretrained(path)
        return path

    return saved


@pytest.mark.parametrize(
    ("pipeline", "form", "words"),
    [
        ("sd3", "metadata", ["gpt_args.train_epochs=8"]),  # of the 40 that are written
        *(pytest.param("sd3", form, [], marks=FULL) for form in CAPTIONS),
        *(pytest.param(name, "metadata", [], marks=FULL) for name in ("flux", "qwenimage", "wan")),
    ],
)
def test_a_model_of_pictures_learns_captioned_pictures(
    pipeline: str,
    form: str,
    words: list[str],
    pipelines: Callable[[str], Path],
    ranks1: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    init("--model", str(pipelines(pipeline)), "--data", CAPTIONS[form](tmp_path).name)
    losses = trained(tmp_path, ranks1, *words)
    first, last = (sum(part) / len(part) for part in (losses[:7], losses[-7:]))
    assert last < (0.9 if words else 0.6) * first
    assert json.loads((tmp_path / "run" / "hf" / "model_index.json").read_text())["transformer"]
