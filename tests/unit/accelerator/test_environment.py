"""The list of variables that slow a run down: each only where it does, and a run says it at its start."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator import environment
from mindspeed_mm.accelerator.environment import harmful_settings
from mindspeed_mm.initialize import prepare_process
from mindspeed_mm.utils import log
from tests.support.fake_accelerator import fake_accelerator
from tests.support.runs import run_of

ROOT = Path(__file__).resolve().parents[3]


def sourced(**variables: str) -> dict[str, str]:
    """The environment after examples/env_config.sh, of a shell that had `variables` only."""
    script = "set -euo pipefail; source examples/env_config.sh; env -0"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env={"PATH": os.environ["PATH"], **variables}, capture_output=True, check=True
    )
    return dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if item)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("backend", [None, "fsdp2", "ptd"])
def test_nothing_hurts_in_an_empty_environment(device: str, backend: str | None) -> None:
    assert harmful_settings(device, backend=backend, environment={}) == []


def test_connections_that_the_backends_want() -> None:
    """FSDP2 wants more than one anywhere; tensor parallelism wants one, on CUDA only."""
    one, two = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "2"}
    for device in ("cpu", "cuda", "npu"):
        for backend in (None, "fsdp2"):
            (said,) = harmful_settings(device, backend=backend, environment=one)
            assert said.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 keeps FSDP2") and "MAX_CONNECTIONS=2" in said
            assert harmful_settings(device, backend=backend, environment=two) == []
        assert harmful_settings(device, backend="ptd", tensor_parallel_size=2, environment=one) == []
        assert harmful_settings(device, backend="ptd", environment=two) == []
        said_of_two = harmful_settings(device, backend="ptd", tensor_parallel_size=2, environment=two)
        assert len(said_of_two) == (device == "cuda")
    (said,) = harmful_settings("cuda", backend="ptd", tensor_parallel_size=2, environment={})
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in said


@pytest.mark.parametrize("setting", environment._SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_hurts_on_its_devices_only(setting: environment._Setting) -> None:
    for device in ("cpu", "cuda", "npu"):
        for value in (*setting.values, setting.values[0].upper()):
            said = harmful_settings(device, environment={setting.name: value})
            assert len(said) == (device in setting.devices)
            assert all(sentence.startswith(f"{setting.name}={value} ") for sentence in said)
        assert harmful_settings(device, environment={setting.name: "harmless"}) == []


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = {"OMP_NUM_THREADS": "4"}
    assert harmful_settings("cpu", environment=threads, cores=8, processes=2) == []
    assert harmful_settings("cuda", environment=threads, cores=4, processes=2) == []
    (said,) = harmful_settings("cpu", environment=threads, cores=6, processes=2)
    assert said.endswith("export OMP_NUM_THREADS=3")
    # one thread each can't be fewer, and a word that is no number is OpenMP's own affair
    assert harmful_settings("cpu", environment={"OMP_NUM_THREADS": "1"}, cores=2, processes=4) == []
    assert harmful_settings("cpu", environment={"OMP_NUM_THREADS": "4,2"}, cores=2, processes=4) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert "in 3 process(es)" in harmful_settings("cpu", environment=threads, cores=6)[0]


def test_a_run_says_it_once_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    monkeypatch.setattr(accelerator.current(), "name", "cuda")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    log.forget_notices()
    try:
        fsdp2, ptd = run_of(use_torch_fsdp2=True), run_of(world_size=2, tensor_model_parallel_size=2)
        for run in (fsdp2, fsdp2, ptd):
            prepare_process(run)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        log.forget_notices()
    assert [sentence.split("=")[0] for sentence in said] == ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"]


@pytest.mark.parametrize("backend", [{"use_torch_fsdp2": True}, {}], ids=["fsdp2", "ptd"])
def test_only_a_run_that_allows_it_computes_in_tf32(backend: dict[str, bool]) -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with fake_accelerator() as fake:
            prepare_process(run_of(**backend))
            assert fake.log == []
            prepare_process(run_of(allow_tf32=True, **backend))
            assert fake.log == ["tf32"]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("backend", ["fsdp2", "ptd"])
def test_what_launch_scripts_source_hurts_nowhere(device: str, backend: str) -> None:
    """It sets what its device needs and nothing for another one, and leaves alone what the shell had."""
    found = sourced(MM_DEVICE=device, MM_ROAD=backend, NPUS_PER_NODE="1")
    assert harmful_settings(device, backend=backend, tensor_parallel_size=2, environment=found) == []
    assert ("HCCL_CONNECT_TIMEOUT" in found) == ("TASK_QUEUE_ENABLE" in found) == (device == "npu")
    assert ("PYTORCH_CUDA_ALLOC_CONF" in found) == (device == "cuda")
    assert ("OMP_NUM_THREADS" in found) == (device == "cpu")
    mine = {"HCCL_CONNECT_TIMEOUT": "7200", "PYTORCH_CUDA_ALLOC_CONF": "backend:native", "OMP_NUM_THREADS": "3"}
    assert mine.items() <= sourced(MM_DEVICE=device, **mine).items()


def test_several_nodes_choose_their_own_network() -> None:
    assert "GLOO_SOCKET_IFNAME" not in sourced(MM_DEVICE="cpu", NNODES="2")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        sourced(MM_ROAD="pdt")
    assert b"MM_ROAD is 'pdt'; expected fsdp2 or ptd" in refused.value.stderr
