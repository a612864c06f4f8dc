"""Worker processes for distributed tests: forked from one server that has torch and transformers imported already.

`run_ranks` starts fresh processes, as a launcher does, for one function. `RankPool` keeps processes with an initialised
gloo group and runs many functions in them one after the other; use it wherever a test does not need a process of its
own. Functions must be module-level and return something picklable. Neither imports megatron: these are the workers of
the FSDP2 backend.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.processes import free_port

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3.modeling_qwen3",
    "diffusers.models.transformers.transformer_wan",
    # what a training run imports after it was described: some seconds of each worker otherwise
    "mindspeed_mm.training",
    "mindspeed_mm.backends.fsdp2",
    "mindspeed_mm.tasks.train.language",
    "mindspeed_mm.data.loading.build",
    "mindspeed_mm.models.transformers.qwen2_5_vl.traits",
    "mindspeed_mm.models.transformers.qwen3_vl.data",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
    # what the first function of a worker imported otherwise
    "torch.utils.serialization",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.internvl.modeling_internvl",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "mindspeed_mm.data.media.media_reader",
    "mindspeed_mm.models.transformers_model",
    "pytest",
    "tests.support.launch",
    "tests.support.tiny",
    "tests.support.preload",
]
#: what the workers of the Megatron backend have beside it, of a server of their own: the others must never import it
MEGATRON_PRELOAD = ["tests.support.megatron_preload"]
# Set before the server starts: OpenMP reads its setting when torch is first imported. Gloo stays on the loopback
# device, because resolving the host's own name can fail on a machine without a network.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# Each group has threads. Megatron's groups are left when the next function starts; those of device meshes stay, and a
# pool with more threads than this is replaced by a new one.
MOST_THREADS = 250
OUTPUT_SHOWN = 4000  # characters of a rank's own output that an error repeats


class RankError(AssertionError):
    """A function failed in a worker, a worker died, or the time was up. The message holds each rank's traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run `fn(*args)` in `world_size` fresh processes and return what each rank returned, by rank.

    The launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set; no process group is made.

    Raises:
        RankError: a rank raised, died, or the ranks took more than `timeout` seconds; all of them are killed first.
    """
    ranks = _Ranks(world_size, with_group=False)
    try:
        return ranks.call(fn, args, timeout)
    finally:
        ranks.kill()


class RankPool:
    """`world_size` processes with a gloo process group that stay alive between functions.

    Started at the first `run`. After any failure the processes are thrown away and the next `run` starts new ones: a
    collective that one rank left in the middle can't be trusted again. So are processes with too many threads. Between
    functions the random seeds, the default dtype and the environment variables are put back.
    """

    def __init__(self, world_size: int, *, megatron: bool = False) -> None:
        """
        Args:
            megatron: the processes have Megatron-core's modules from the start.
        """
        self.world_size = world_size
        self._megatron = megatron
        self._ranks: _Ranks | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Run `fn(*args)` on every rank and return what each returned, by rank. See `run_ranks` for errors."""
        if self._ranks is None:
            self._ranks = _Ranks(self.world_size, with_group=True, megatron=self._megatron)
        try:
            results = self._ranks.call(fn, args, timeout)
        except BaseException:
            self.close()
            raise
        if max(map(_threads, self.pids)) > MOST_THREADS:
            self.close()
        return results

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by rank; empty while none are running."""
        return [] if self._ranks is None else [process.pid or 0 for process in self._ranks.processes]

    def close(self) -> None:
        """Kill the workers; the next `run` starts new ones."""
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None


class _Ranks:
    """Worker processes and the pipes to them."""

    def __init__(self, world_size: int, with_group: bool, megatron: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        with _server_environment(), _server(megatron):
            context = multiprocessing.get_context("forkserver")
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                process = context.Process(
                    target=_serve, args=(theirs, rank, world_size, str(self.folder), with_group), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        # Plain pickle: multiprocessing's own would hand tensors over in shared memory that dies with the worker.
        # The search path goes along, so that a worker finds the module of a test collected after it started.
        job = pickle.dumps((list(sys.path), free_port(), pickle.dumps((fn, args))))
        deadline = time.monotonic() + timeout
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(job)
            except OSError:
                raise RankError(self._died(rank)) from None
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < len(self.pipes):
            heard = results.keys() | failures.keys()
            pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in heard}
            ready: list[Any] = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank) for rank in pending.values())
                shown = "".join(self._output(rank) for rank in pending.values())
                message = f"rank {late} not finished after {timeout:g} s"
                raise RankError("\n".join([*failures.values(), message + shown]))
            for pipe in ready:
                rank = pending[pipe]
                try:
                    worked, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = self._died(rank)
                else:
                    if worked:
                        results[rank] = value
                    else:
                        failures[rank] = f"rank {rank} raised\n{value}{self._output(rank)}"
                if failures:
                    # The others may wait for the failed rank in a collective: a moment, not the whole time-out.
                    deadline = min(deadline, time.monotonic() + 2.0)
        if failures:
            raise RankError("\n".join(failures[rank] for rank in sorted(failures)))
        return [results[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=10)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _died(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(timeout=5)
        return f"rank {rank} died with exit code {process.exitcode}{self._output(rank)}"

    def _output(self, rank: int) -> str:
        file = self.folder / f"rank{rank}.log"
        text = file.read_text(errors="replace").strip() if file.exists() else ""
        return f"\n--- output of rank {rank} ---\n{text[-OUTPUT_SHOWN:]}\n" if text else "\n"


def _serve(pipe: Connection, rank: int, world_size: int, folder: str, with_group: bool) -> None:
    """The life of a worker: functions come through the pipe, results go back, until the pipe closes."""
    import torch
    import torch.distributed as dist

    # daemons may have no children, and a run's loader starts workers (which end when their parent is gone)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    log = os.open(os.path.join(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(WORKER_ENV)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    _share_device_of_gloo()
    # What was imported stays: collecting after each function then looks at that function's objects only. A training run
    # must not freeze its own, though: its model and groups would stay, and with them the threads of the groups.
    freeze, gc.freeze = gc.freeze, lambda: None
    freeze()
    environment = dict(os.environ)

    generation = 0
    while True:
        try:
            path, port, payload = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        os.environ.clear()
        os.environ.update(environment, MASTER_PORT=str(port))
        sys.path[:] = path
        try:
            if with_group and not dist.is_initialized():
                # A file, not a port: nothing on the machine can take it between choosing and using it.
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/group{generation}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=120),
                )
                generation += 1
            _reset_state()
            fn, args = pickle.loads(payload)
            reply = pickle.dumps((True, fn(*args)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(reply)
        del reply
        forget_globals()
        gc.collect()
        freeze()  # what is left has been imported


def _reset_state() -> None:
    """Make a function's start independent of the function before it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    forget_globals()
    _leave_groups()


def _share_device_of_gloo() -> None:
    """Give all gloo groups of this process one device.

    Each group makes its own otherwise, whose thread wakes 100 times a second: four workers of the Megatron backend that
    wait for their next function took a tenth of a core.
    """
    from torch.distributed import distributed_c10d as c10d

    class OnSharedDevice(c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = c10d.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [_device_of_gloo()], 2, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevice


@functools.cache
def _device_of_gloo() -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d.ProcessGroupGloo.create_device(interface=WORKER_ENV["GLOO_SOCKET_IFNAME"])


def _leave_groups() -> None:
    """Leave the groups that a function on megatron made before: they are many, and each keeps threads.

    Done when the next function starts, as only then has every rank ended the one before. Elsewhere groups stay, as
    torch remembers those of device meshes.
    """
    from torch.distributed import distributed_c10d as c10d

    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is None:
        return
    megatron.destroy_model_parallel()
    rotary = sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding")
    for kind in list(vars(rotary).values()) if rotary else []:
        for method in list(vars(kind).values()) if isinstance(kind, type) else []:
            if isinstance(method, functools._lru_cache_wrapper):
                method.cache_clear()  # its keys are modules that hold a group
    if c10d.is_initialized():
        for group in list(c10d._world.pg_map):
            if group is not c10d.GroupMember.WORLD:
                c10d.destroy_process_group(group)


def forget_globals() -> None:
    """Drop the package's process-wide state (arguments, notices already said, the library that multiplies float32
    matrices), if it was imported at all."""
    arguments = sys.modules.get("mindspeed_mm.configs.global_args")
    if arguments is not None:
        arguments.destroy_args()
    log = sys.modules.get("mindspeed_mm.utils.log")
    if log is not None:
        log.forget_notices()
    if "mindspeed_mm.accelerator.host_products" in sys.modules:
        sys.modules["torch"].set_float32_matmul_precision("highest")


@functools.cache
def _server_with(megatron: bool) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOAD + MEGATRON_PRELOAD if megatron else PRELOAD)
    return server


def _server(megatron: bool) -> Any:
    """While it is entered, new processes of the forkserver method come from one of our two servers."""
    connect = _server_with(megatron).connect_to_new_process
    return mock.patch.object(forkserver, "connect_to_new_process", connect)


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """Give the server process its environment: it inherits ours at the moment it starts."""
    before = {key: os.environ.get(key) for key in WORKER_ENV}
    os.environ.update(WORKER_ENV)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _threads(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0
