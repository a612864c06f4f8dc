"""Sizes and rates that `mindspeed-mm init` chooses, and that runs on other machines take the files that it writes."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.run import Run
from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM
from mindspeed_mm.tools.cli import main
from mindspeed_mm.tools.init import command
from mindspeed_mm.tools.init.choices import choose_batches, choose_pack, choose_rate, choose_tuning, tokens_at_once
from mindspeed_mm.tools.init.machine import Machine
from tests.support.first_rows import PICTURE_ROWS, ROWS

HOST = Machine(False, "CPU", 1, 24 << 30)
NODE = Machine(True, "GPU of 80 GiB", 8, 80 << 30)
ALONE = Machine(True, "GPU of 80 GiB", 1, 80 << 30)


@pytest.mark.parametrize(
    ("parameters", "machine", "is_lora", "said"),
    [
        (
            7.6e9,
            NODE,
            False,
            "all weights are trained: 113 GiB for weights, gradients and optimizer of 7.6B parameters",
        ),
        (7.6e9, ALONE, True, "and this machine has 80 GiB; frozen, the weights take 14 GiB"),
        (70e9, ALONE, True, "even the frozen weights may not fit: see lora_quantize"),
        (0.6e9, HOST, False, "8.9 GiB for weights"),
        (2e9, HOST, True, "frozen, the weights take 7.5 GiB"),
    ],
)
def test_adapters_where_all_weights_do_not_fit(parameters: float, machine: Machine, is_lora: bool, said: str) -> None:
    tuning = choose_tuning(int(parameters), machine, asked=False)
    assert tuning.is_lora is is_lora and said in tuning.why
    assert choose_tuning(int(parameters), machine, asked=True).is_lora


def test_frozen_encoders_take_memory_of_each_device() -> None:
    assert not choose_tuning(3_000_000_000, ALONE, asked=False).is_lora
    assert choose_tuning(3_000_000_000, ALONE, asked=False, beside=30 << 30).is_lora


def test_rates_fall_with_the_size() -> None:
    sizes = [int(10**power) for power in range(5, 12)]
    for is_lora in (False, True):
        rates = [choose_rate(size, is_lora=is_lora) for size in sizes]
        assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]
    assert all(choose_rate(size, is_lora=True) > choose_rate(size, is_lora=False) for size in sizes)


def test_batches_fit_together() -> None:
    """Whatever the rows are: micro-batches divide what a device takes, and an epoch has a step."""
    rows, lengths, devices = (1, 3, 30, 199, 200, 5_000, 10**6), (5, 300, 3_000, 9_000, 10**5), (1, 2, 3, 6, 8, 64)
    for number, length, count in itertools.product(rows, lengths, devices):
        machine = Machine(True, "", count, 80 << 30)
        sizes = choose_batches(number, length, machine, most=16_384)
        assert sizes.whole % (sizes.micro * count) == 0
        assert sizes.micro == 1 or sizes.micro * length <= 16_384
        assert sizes.steps_per_epoch >= 1 and sizes.whole <= max(64, count)
        assert sizes.validation == 0 if number < 200 else sizes.validation >= 10


def test_thirty_rows_have_steps_to_learn_in() -> None:
    sizes = choose_batches(30, 60, HOST, most=2_048)
    assert (sizes.whole, sizes.steps_per_epoch, sizes.epochs, sizes.save_interval) == (4, 7, 10, None)
    many = choose_batches(20_000, 60, HOST, most=2_048)
    assert (many.whole, many.validation, many.epochs) == (64, 500, 3)
    assert many.save_interval == many.steps // 5


def test_short_rows_are_packed_where_they_are_many() -> None:
    assert choose_pack(999, 100, 20, HOST) is None
    assert choose_pack(5_000, 100, 20, HOST) == 1_024
    assert choose_pack(5_000, 1_500, 200, NODE) == 4_096
    assert choose_pack(5_000, 9_000, 200, NODE) == 16_384
    assert choose_pack(5_000, 1_000, 900, HOST) is None
    packs = choose_batches(5_000, 1_024, HOST, most=2_048, rows_a_pack=10)
    assert packs.whole * 10 <= 64 and packs.steps_per_epoch > 100 and packs.validation_steps == 250 // 10 // packs.whole


def test_less_memory_takes_fewer_tokens() -> None:
    large = [
        tokens_at_once(7_600_000_000, 3_584, 28, Machine(True, "", 8, gib << 30), is_lora=False) for gib in (24, 80)
    ]
    assert 256 <= large[0] < large[1] <= 16_384


def described(folder: Path, *, megatron: bool) -> Run:
    return describe([str(folder / "run.yaml")], VLM if megatron else TRANSFORMERS)


@pytest.mark.parametrize("megatron", [False, True], ids=["fsdp2", "megatron"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a_node_of_devices_takes_its_file(
    megatron: bool, lora: bool, qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(qwen3_dir, "model")
    large = command.read_model_directory("model")
    monkeypatch.setattr(command, "read_model_directory", lambda *args, **kwargs: _with_parameters(large, 7_600_000_000))
    words = ["--model", "model", "--data", str(ROWS["messages"](Path())), "--output", "run"]
    words += ["--devices", "8", "--memory", "80", *(["--lora"] if lora else [])]
    assert main(["init", *words, "--backend", "megatron" if megatron else "fsdp2"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = described(Path("run"), megatron=megatron)
    assert run.batch.global_batch_size == 8 and run.batch.data_parallel_size == 8
    assert run.precision.bf16 and run.parallel.recompute_granularity == "full"
    assert (run.lora is not None) is lora
    assert run.parallel.backend == ("ptd" if megatron else "fsdp2")


def _with_parameters(model: command.ModelDirectory, parameters: int) -> command.ModelDirectory:
    return replace(model, parameters=parameters)


@pytest.mark.parametrize("more", [[], ["--from-scratch"]], ids=["tuned", "from_scratch"])
def test_both_backends_train_the_same_parts(
    more: list[str],
    qwen2_5_vl_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where model.json says nothing of the projector, one freezes it with the encoder around it."""
    monkeypatch.chdir(tmp_path)
    data = str(PICTURE_ROWS["llava"](Path()))
    for backend in ("fsdp2", "megatron"):
        words = ["--model", str(qwen2_5_vl_dir), "--data", data, "--backend", backend, "--output", backend]
        assert main(["init", *words, *more]) == 0
        model = yaml.safe_load(Path(backend, "run.yaml").read_text())["model"]
        encoder = model["image_encoder"]
        assert encoder == {"vision_encoder": {"freeze": not more}, "vision_projector": {"freeze": False}}


def test_many_rows_are_packed_and_some_validate(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ROWS["messages"](Path()).read_text()
    Path("rows.json").write_text("[" + ",".join([rows[1:-1]] * 40) + "]")
    assert main(["init", "--model", str(qwen3_dir), "--data", "rows.json", "--output", "run"]) == 0
    assert "1200 rows (256 of them looked at)" in capsys.readouterr().out
    written = yaml.safe_load(Path("run", "run.yaml").read_text())
    basic = written["data"]["dataset_param"]["basic_parameters"]
    assert (basic["cutoff_len"], basic["packing"], basic["val_size"]) == (1_024, True, 60)
    run = described(Path("run"), megatron=False)
    assert run.batch.packs and run.logging.eval_interval == written["gpt_args"]["eval_interval"]


def test_rows_longer_than_the_model_are_cut(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(qwen3_dir, "model")
    config = json.loads(Path("model", "config.json").read_text())
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    long = [{"role": "user", "content": "1" * 100}, {"role": "assistant", "content": "2"}]
    Path("rows.json").write_text(json.dumps([{"messages": row} for row in (turns, turns * 2, long)]))
    words = ["init", "--model", "model", "--data", "rows.json", "--output", "run"]
    Path("model", "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    assert main(words) == 0
    written = Path("run", "run.yaml").read_text()
    assert "cutoff_len: 64" in written
    said = " ".join(written.replace("#", "").split())
    assert "of the 3 rows that were looked at, 1 lose their last turns, and 1 are left out" in said
    shutil.rmtree("run")
    Path("model", "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    assert main(words) == 1
    assert "of no row does the first answer fit into the 16 positions of the model" in capsys.readouterr().err
