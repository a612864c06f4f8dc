"""The process that serves: it listens, loads the model meanwhile, and lets running answers finish after a signal."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from mindspeed_mm.tasks.serving.describe import ServeRun
from mindspeed_mm.tasks.serving.guard import AsgiApp, RequestGuard
from mindspeed_mm.tasks.serving.metrics import ServeMetrics
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import info_rank0, logger

_CANCELLED_SECONDS = 2  # that cancelled answers have to end


def serve(run: ServeRun) -> int:
    """Serve a model until a signal ends it; returns the exit status.

    Raises:
        ConfigError: the address can't be used, or the model can't be built.
        CheckpointError: weights are damaged, or don't belong to the model.
    """
    metrics = ServeMetrics()
    guard = RequestGuard(None, run.limits, metrics, run.api_key)
    metrics.watch("mm_requests_under_way", "Requests that are read, waiting or answered", lambda: guard.in_flight)
    with _listen(run.host, run.port) as listener:
        server = ModelServer(run, guard, listener.getsockname()[1], lambda: load_application(run, metrics))
        server.run([listener])
    if server.fault is not None:
        raise server.fault
    if not server.is_loaded:  # a thread is still loading, and nothing can stop it
        sys.stdout.flush()
        os._exit(0)
    return 1 if server.unfinished else 0


def load_application(run: ServeRun, metrics: ServeMetrics) -> AsgiApp:
    """Load the model, and return the application that answers with it."""
    from mindspeed_mm.tasks.inference.session import open_generator, open_prompts, positions_of
    from mindspeed_mm.tasks.serving.application import build_application
    from mindspeed_mm.tasks.serving.chat_completions import ChatHandler

    logging.getLogger("transformers").setLevel(logging.ERROR)
    prompts = open_prompts(run.answers)
    handler = ChatHandler(run, open_generator(run.answers, prompts), positions_of(run.answers), metrics)
    metrics.watch("mm_requests_running", "Requests whose answers are generated", lambda: handler.thread.running)
    return build_application(handler, metrics)


class ModelServer(uvicorn.Server):
    """uvicorn's server with a model that is loaded while it listens.

    Args:
        run: the launch.
        guard: gets the application when it is there.
        port: where it listens.
        load: returns the application.

    Attributes:
        fault: why the model can't be loaded; None: it can.
        is_loaded: whether it has been.
        unfinished: answers that were cut off at the end.
    """

    def __init__(self, run: ServeRun, guard: RequestGuard, port: int, load: Callable[[], AsgiApp]) -> None:
        config = uvicorn.Config(
            guard,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=_CANCELLED_SECONDS,
        )
        super().__init__(config)
        self.fault: Exception | None = None
        self.is_loaded = False
        self.unfinished = 0
        self._run, self._guard, self._port, self._load = run, guard, port, load
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to load."""
        await super().startup(sockets)
        threading.Thread(target=self._open, name="loading", daemon=True).start()

    def _open(self) -> None:
        try:
            application = self._load()
        except Exception as error:  # raised again by the main thread
            self.fault, self.should_exit = error, True
            return
        self.is_loaded = True
        self._guard.app = application
        if self._guard.state == "loading":
            self._guard.state = "ready"
        host = f"[{self._run.host}]" if ":" in self._run.host else self._run.host
        info_rank0(f"serving '{self._run.name}' at http://{host}:{self._port}/v1")

    async def on_tick(self, counter: int) -> bool:
        """End when running answers have been given, or their time is up."""
        if self._deadline is not None and (not self._guard.in_flight or time.monotonic() > self._deadline):
            self.unfinished = self._guard.in_flight
            if self.unfinished:
                logger.warning(f"{self.unfinished} answers are cut off after --drain-seconds")
            return True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse further requests at the first signal; end at once at the second."""
        if self._deadline is not None:
            os._exit(128 + sig)
        name = signal.Signals(sig).name
        info_rank0(f"{name}: {self._guard.in_flight} answers are finished, and no others begun; a second one ends all")
        self._guard.state = "draining"
        self._deadline = time.monotonic() + self._run.drain_seconds


def _listen(host: str, port: int) -> socket.socket:
    address = host.strip("[]")
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; write another address or port") from None
