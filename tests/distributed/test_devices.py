"""Beside a device with a queue and memory of its own, played by the host: every line of it, and the same numbers.

Runs with a `FakeAccelerator` must equal those of the host bit for bit. They also tell which places of the package have
asked for the device, so that none of these is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedConfig

from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.monitor import watch
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.tasks.generation import pipeline
from mindspeed_mm.tasks.inference import loading
from mindspeed_mm.tools.doctor import examine
from mindspeed_mm.tools.init.machine import this_machine
from tests.distributed.test_saving import assert_same_checkpoint
from tests.support.fake_accelerator import Site, fake_accelerator, questions, stray_comparisons
from tests.support.launch import WRAP, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.tiny_steps import Micro, TinySteps, forward_step
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

#: a rate that changes with each step, figures that are read every other step, a save beside training
STEPS = {
    "log_format": "short",
    "train_iters": 3,
    "log_interval": 2,
    "lr_decay_style": "linear",
    "lr_decay_iters": 6,
    "save_interval": 2,
}
STEPS |= {"async_save": True, "micro_batch_size": 1}
#: of the language model
OFFLOADED = {"recompute_modules": WRAP[-1:], "activation_offload_modules": WRAP[-1:]}
OF_THE_MACHINE = ("_ms", "per_second", "data_wait_fraction", "memory_bytes", "tflops_per_device", "mfu")


def run_on_the_host(words: list[str], script: str) -> None:
    with mock.patch.object(watch, "FIRST_STEPS", 0):  # these would all be told about, and read at once
        run_entry(words, script)


def run_beside_a_device(words: list[str], script: str) -> tuple[set[Site], list[str]]:
    with fake_accelerator() as fake:
        run_on_the_host(words, script)
    return fake.asked, fake.log


@dataclass
class Pair:
    """A run on the host, the same one beside a device, where that was asked for, and what rank 0 did with it."""

    host: Path
    beside: Path
    asked: set[Site]
    log: list[str]


class Pairs:
    """What was run, by its name and its number of ranks; run when it is first asked for."""

    def __init__(self, folder: Path, qwen2_5_vl_dir: Path, request: pytest.FixtureRequest) -> None:
        self._folder, self._hf_dir, self._request = folder, qwen2_5_vl_dir, request
        self._made: dict[tuple[str, int], Pair] = {}

    def __call__(self, name: str, ranks: int) -> Pair:
        if (name, ranks) not in self._made:
            folder = self._folder / f"{name}-{ranks}"
            words, script = getattr(self, name)(folder)
            fixture = self._request.getfixturevalue("megatron_pools" if name == "megatron" else f"ranks{ranks}")
            pool: RankPool = fixture[ranks] if name == "megatron" else fixture
            host, beside = folder / "host", folder / "beside"
            pool.run(run_on_the_host, words(host), script, timeout=120)
            told = pool.run(run_beside_a_device, words(beside), script, timeout=120)
            self._made[name, ranks] = Pair(host, beside, set().union(*(asked for asked, _ in told)), told[0][1])
        return self._made[name, ranks]

    def language(self, folder: Path) -> tuple[Callable[[Path], list[str]], str]:
        """Rows with and without images, batches and inputs of layers in pinned memory, a memory profile."""
        data = write_mixed_dataset(folder / "data", rows=6, seed=1)
        pinned = {"dataloader_param.pin_memory": True}
        model = {"model_id": "qwen2_5_vl", "loss_cfg": {"loss_type": "per_token_loss"}}
        files = write_run_files(
            folder, self._hf_dir, data, model=model, data=pinned, fsdp2={**OFFLOADED, "sub_modules_to_wrap": WRAP}
        )
        profile = {"enable": True, "start_step": 0, "end_step": 1, "save_path": str(folder), "mem_info": True}
        files["tools.json"].write_text(json.dumps({"memory_profile": profile}))
        self._files = files
        return lambda save: launch_flags(files, **STEPS, global_batch_size=2, save=save), "pretrain_transformers.py"

    def megatron(self, folder: Path) -> tuple[Callable[[Path], list[str]], str]:
        """The same under Megatron-core's optimizer in parts, whose state streams through the device."""
        self.language(folder)
        settings = {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 256}
        settings |= {"use_distributed_optimizer": True, "swap_optimizer": True, "global_batch_size": 2, **STEPS}
        files = self._files
        return lambda save: launch_flags(files, **settings, save=save), "pretrain_vlm.py"

    def generation(self, folder: Path) -> tuple[Callable[[Path], list[str]], str]:
        """Clips, whose encoders leave the device between steps, and averaged weights."""
        write_encoders(folder / "encoders")
        data = data_json(write_clips(folder / "clips", rows=4, frames=5))
        data["dataloader_param"]["pin_memory"] = True
        contents = {
            "model.json": model_json(folder / "encoders", do_sample=True, use_ema=True, encoder_offload_interval=2),
            "data.json": data,
            "tools.json": {},
            "fsdp2.yaml": {"sharding_size": "auto", "sub_modules_to_wrap": ["predictor.blocks.{*}"]},
        }
        for name, content in contents.items():
            (folder / name).write_text(json.dumps(content))
        files = {name: folder / name for name in contents}
        return lambda save: launch_flags(files, **STEPS, global_batch_size=4, save=save), "pretrain_sora.py"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, qwen2_5_vl_dir: Path, request: pytest.FixtureRequest) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("devices"), qwen2_5_vl_dir, request)


def figures(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for what clocks and the system's memory say."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.endswith(OF_THE_MACHINE)} for record in records]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", ["language", "megatron", "generation"])
def test_losses_norms_and_checkpoints_are_those_of_the_host(pairs: Pairs, name: str, ranks: int) -> None:
    pair = pairs(name, ranks)
    assert figures(pair.host) == figures(pair.beside)
    assert [record["iteration"] for record in figures(pair.host)] == [2, 3]
    for iteration in (2, 3):
        one, other = (folder / f"iter_{iteration:07d}" for folder in (pair.host, pair.beside))
        assert_same_checkpoint(one, other, frozenset({"torch.fake"}))


def test_a_run_asks_the_device_for_its_memory(pairs: Pairs) -> None:
    """The profile is recorded and dumped; the save beside training copies through pinned memory."""
    log = pairs("language", 2).log
    assert [entry for entry in log if entry in ("history", "dump")] == ["history", "dump"]
    assert log.count("record") == log.count("wait") == 3 and log.count("pin") > 20


def steps(
    kind: str, beside: bool, file: str, offloads: bool, flags: dict[str, Any]
) -> tuple[Any, list[list[str]], set[Site]]:
    """Four steps, none of them logged, the second one skipped.

    Returns:
        the state after them, what building and each step did with the device, and the places that asked for it.
    """
    with fake_accelerator(offloads=offloads) if beside else mock.MagicMock() as fake:
        tiny = TinySteps(kind, fsdp2_config_path=file, lr_decay_style="linear", lr_decay_iters=8, **flags)
        world = tiny.backend.world
        assert (world.host is world.sums) is not beside
        logs = [list(fake.log) if beside else []]
        for factor in (1.0, float("nan"), 2.0, 1.0):
            before = len(fake.log) if beside else 0
            tiny.backend.forward_backward(forward_step, iter([Micro(factor=factor)] * 2), 2)
            pending = tiny.backend.step(BatchCounts(rows=2), False)
            logs.append(fake.log[before:] if beside else [])
        pending.result()
        return tiny.state(), logs, fake.asked if beside else set()


AT_ONCE, LATE = ["pin", "record", "wait"], ["wait", "pin", "record"]


@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [
        ("fsdp2", {}, [LATE[1:], LATE, LATE, LATE]),
        ("ptd", {}, [LATE[1:], LATE, LATE, LATE]),
        ("fsdp2", {"fp16": True}, [AT_ONCE] * 4),
    ],
    ids=["fp32", "fp32, Megatron", "fp16, whose next step needs to know the scale"],
)
def test_how_a_step_went_is_read_with_the_next_one(
    ranks2: RankPool,
    megatron_pools: dict[int, RankPool],
    tmp_path: Path,
    kind: str,
    flags: dict[str, Any],
    expected: list[list[str]],
) -> None:
    file = tmp_path / "fsdp2.yaml"
    file.write_text("sharding_size: auto\n")
    pool = megatron_pools[2] if kind == "ptd" else ranks2
    results = [pool.run(steps, kind, beside, str(file), False, flags)[0] for beside in (False, True)]
    (on_host, _, _), (beside, logs, _) = results
    assert beside == on_host
    assert logs[1:] == expected


@pytest.fixture(scope="module")
def offloaded(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> set[Site]:
    """What steps ask whose parameters are in pinned host memory, and so their optimizer; their state is the host's."""
    file = tmp_path_factory.mktemp("offload") / "fsdp2.yaml"
    file.write_text("sharding_size: auto\noffload_to_cpu: true\npin_memory: true\n")
    swaps = {"swap_optimizer": True}
    on_host, beside = (ranks2.run(steps, "fsdp2", beside, str(file), True, swaps)[0] for beside in (False, True))
    assert beside[0] == on_host[0]
    assert "pin" in beside[1][0]
    return beside[2]


def test_inference_and_the_doctor() -> None:
    assert asked_beside_training()


def asked_beside_training() -> set[Site]:
    """What sampling, `mindspeed-mm doctor` and `mindspeed-mm init` ask."""
    with fake_accelerator() as fake:
        assert pipeline._dtype(None) == torch.bfloat16
        assert loading._usual_dtype(PreTrainedConfig()) == torch.bfloat16
        sampler = mock.Mock()
        assert pipeline._placed(sampler, True) is sampler
        sampler.enable_model_cpu_offload.assert_called_once_with(device=torch.device("cpu"))
        assert examine(with_collectives=False).device["number"] is not None
        assert this_machine().has_devices
    return fake.asked


def test_no_line_for_a_device_is_left_out(pairs: Pairs, offloaded: set[Site]) -> None:
    """Every place that asks whether there is a device was asked, and told that there is one."""
    asked = set.union(*(pairs(name, 2).asked for name in ("language", "megatron", "generation")))
    assert questions() - asked - offloaded - asked_beside_training() == set()


def test_the_accelerator_alone_knows_kinds_of_devices() -> None:
    assert stray_comparisons() == set()
