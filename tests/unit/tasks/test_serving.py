"""`mindspeed-mm serve`: its words, the guard of an application, and what it would start of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mindspeed_mm.tasks.serving import describe, guard, server
from mindspeed_mm.tasks.serving.describe import ServeLimits, ServeRun, describe_serving
from mindspeed_mm.tasks.serving.errors import RequestError
from mindspeed_mm.tasks.serving.guard import RequestGuard
from mindspeed_mm.tasks.serving.media import read_url
from mindspeed_mm.tasks.serving.metrics import ServeMetrics
from mindspeed_mm.tasks.serving.text_stream import TextStream
from mindspeed_mm.tasks.serving.vllm_server import GUARD_VARIABLE, VllmGuard, command_of, exported, guard_settings
from mindspeed_mm.tools import cli
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import logger
from tests.support.bad_requests import bomb, picture, with_url

LIMITS = ServeLimits(requests=2, body_bytes=1000, media=2, image_pixels=1000)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MM_API_KEY", raising=False)


def test_words(qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served, where, and to whom."""
    run = describe_serving(["--load", str(qwen3_dir)])
    assert (run.name, run.host, run.port, run.api_key, run.engine) == (
        qwen3_dir.name,
        "127.0.0.1",
        8000,
        None,
        "transformers",
    )
    words = ["--load", str(qwen3_dir), "--host", "0.0.0.0"]
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: other machines .* --api-key-file, or .* MM_API_KEY"):
        describe_serving(words)
    monkeypatch.setenv("MM_API_KEY", "from-environment")
    assert describe_serving(words).api_key == "from-environment"
    (tmp_path / "key").write_text("from-file\n")
    keyed = describe_serving([*words, "--api-key-file", str(tmp_path / "key")])
    assert keyed.api_key == "from-file" and "from-file" not in repr(keyed)
    for wrong in ("", "two words", "two\nlines"):
        (tmp_path / "key").write_text(wrong)
        with pytest.raises(ConfigError, match="expected one line of letters"):
            describe_serving([*words, "--api-key-file", str(tmp_path / "key")])
    with pytest.raises(ConfigError, match=r"--prompt belongs to inference_vlm\.py"):
        describe_serving([*words, "--prompt", "hello"])
    with pytest.raises(ConfigError, match="leave --num-beams out"):
        describe_serving([*words, "--num-beams", "2"])
    with pytest.raises(ConfigError, match="its model isn't sharded"):
        describe_serving([*words, "--use-torch-fsdp2"])
    with pytest.raises(ConfigError, match="vllm isn't installed"):
        describe_serving([*words, "--engine", "vllm"])


@pytest.mark.parametrize("name", ["hf", "iter_0000100", "release", "hf_ema"])
def test_parts_of_a_run_have_its_name(name: str, qwen3_dir: Path, tmp_path: Path) -> None:
    """The name that requests state is the run folder's."""
    place = tmp_path / "my_run" / name
    place.parent.mkdir()
    place.symlink_to(qwen3_dir)
    assert describe_serving(["--load", str(place)]).name == "my_run"


def test_wrong_words_are_told_before_torch_is_imported(qwen3_dir: Path) -> None:
    """With the nearest name; and so are a dry run's refusals."""
    code = "import sys; from mindspeed_mm.tools import cli; status = cli.main(sys.argv[1:]); "
    code += "print('torch' in sys.modules); sys.exit(status)"
    for words, sentence in (
        (["serve", str(qwen3_dir), "--portt", "1"], "unknown flag '--portt'; did you mean '--port'"),
        (["serve", "nowhere"], "nowhere"),
        (["serve", str(qwen3_dir), "--port", "70000"], "expected at most 65535"),
        (["serve", str(qwen3_dir), "--host", "0.0.0.0"], "need a key"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "False\n"), done.stderr
        assert sentence in done.stderr


def test_a_dry_run(qwen3_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's structure and the server's, without weights."""
    assert cli.main(["serve", str(qwen3_dir), "--dry-run", "--batch-size", "3", "--port", "81"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["accepted"] and said["model"]["class"].endswith("Qwen3ForCausalLM") and said["batch_size"] == 3
    assert said["server"] == {"name": qwen3_dir.name, "host": "127.0.0.1", "port": 81, "key": False}


class _Tokens:
    """A tokenizer whose tokens are single characters."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models

        self.backend_tokenizer = Tokenizer(models.BPE({chr(n): n for n in range(128)}, []))
        self.backend_tokenizer.decoder = decoders.Fuse()


def test_a_stream_holds_back_what_may_end_it() -> None:
    """A text that ends the answer is cut across pieces; one that only begins like it is written."""

    def pieces(text: str, stop: Sequence[str]) -> list[str]:
        found: list[str] = []
        stream = TextStream(_Tokens(), {0}, stop, found.append)
        for character in text:
            stream.put(ord(character))
        before = list(found)
        whole = text.partition("\0")[0]
        for other in stop:
            whole = whole.partition(other)[0]
        stream.finish(whole)
        assert "".join(found) == whole
        return before

    assert pieces("abcabd!", ["abd"]) == ["abc"]
    assert pieces("aab", ["ab", "x"]) == ["a"]
    assert pieces("aaab", ["aab"]) == ["a"]
    assert pieces("xyz", ["zz"]) == ["x", "y"]
    assert pieces("ab\0cd", []) == ["a", "b"]


def request(path: str = "/", body: Sequence[bytes] = (b"{}",), method: str = "POST", **headers: str) -> tuple[Any, Any]:
    """The scope of a request, and what `receive` gives one after the other; then it waits."""
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": named}
    events = [{"type": "http.request", "body": part, "more_body": n + 1 < len(body)} for n, part in enumerate(body)]
    return scope, iter(events)


async def response_of(
    app: Any, scope: Any, events: Iterator[Any], then: Any = None, takes: bool = True
) -> tuple[int | None, Any]:
    """What an application sends: status and JSON object.

    Args:
        then: set when the client goes away; None: it never does.
        takes: whether the client takes what is sent.
    """
    sent: list[Any] = []

    async def receive() -> Any:
        event = next(events, None)
        if event is None:
            await (then or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        return event

    async def send(event: Any) -> None:
        sent.append(event)
        if not takes:
            await asyncio.Event().wait()

    await app(scope, receive, send)
    text = b"".join(event.get("body", b"") for event in sent)
    return (sent[0]["status"] if sent else None), (json.loads(text) if text else None)


class App:
    """Answers when it is let, and counts."""

    def __init__(self) -> None:
        self.let, self.begun, self.cancelled = asyncio.Event(), 0, 0
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        self.bodies.append((await receive()).get("body", b"") if scope["method"] == "POST" else b"")
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def test_a_guard_limits_requests_and_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, sizes, slow bodies, keys, clients that go, and states of the server."""
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.05)
    monkeypatch.setattr(guard, "_DISCARDING", 0.05)
    monkeypatch.setattr(guard, "_SEND_SECONDS", 0.05)

    async def run() -> None:
        app = App()
        held = RequestGuard(app, LIMITS, ServeMetrics(), "key")
        key = {"authorization": "Bearer key"}
        gone = asyncio.Event()
        first = asyncio.create_task(response_of(held, *request(body=[b"a" * 600, b"b" * 400], **key)))
        second = asyncio.create_task(response_of(held, *request(**key), gone))
        while app.begun < 2:
            await asyncio.sleep(0)
        assert sorted(app.bodies) == [b"a" * 600 + b"b" * 400, b"{}"]
        status, answer = await response_of(held, *request(**key))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        gone.set()
        assert await second == (None, None)
        assert app.cancelled == 1 and held.in_flight == 1
        assert (await response_of(held, *request(body=[b"a" * 600, b"b" * 401], **key)))[0] == 413
        scope, events = request(body=[b"a" * 600, b"b" * 400, b"c"], content_length="1001", **key)
        assert (await response_of(held, scope, events))[0] == 413
        assert not list(events)
        assert (await response_of(held, *request(body=[], **key)))[0] == 408
        assert (await response_of(held, *request()))[0] == 401
        assert (await response_of(held, *request(authorization="Bearer kex")))[0] == 401
        held.state = "draining"
        assert (await response_of(held, *request("/health", method="GET")))[0] == 503
        assert (await response_of(held, *request(**key)))[0] == 503
        app.let.set()
        assert await first == (200, {})
        assert (await response_of(held, *request("/metrics", method="GET", **key)))[0] == 200
        held.state = "ready"
        assert (await response_of(held, *request(**key), takes=False))[0] == 200
        assert held.in_flight == held._held == 0
        loading = RequestGuard(None, LIMITS, ServeMetrics())
        status, answer = await response_of(loading, *request("/health", method="GET"))
        assert (status, answer["error"]["code"]) == (503, "loading")

    asyncio.run(asyncio.wait_for(run(), 20))


def serve_in_child(run: ServeRun, load: Callable[[], Any], log: Path) -> None:
    """Serve in a forked process with another application."""
    server.load_application = lambda run, metrics: load()  # type: ignore[assignment]
    with open(log, "w", buffering=1) as output:
        for handler in logger.handlers:
            handler.stream = output  # type: ignore[attr-defined]
        try:
            status = server.serve(run)
        except ConfigError as error:
            output.write(str(error))
            status = 3
    os._exit(status)


async def never(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers nothing."""
    await asyncio.Event().wait()


def broken() -> None:
    """Raise what a wrong directory does."""
    raise ConfigError("no such model")


@pytest.mark.parametrize(
    ("load", "asks", "signals", "status", "words"),
    [
        (lambda: time.sleep(60), False, 1, 0, "SIGTERM: 0 answers"),
        (broken, False, 0, 3, "no such model"),
        (lambda: never, True, 1, 1, "1 answers are cut off"),
        (lambda: never, True, 2, 143, "SIGTERM: 1 answers"),
    ],
    ids=["while it loads", "a model that can't be loaded", "the limit of time", "twice"],
)
def test_how_a_server_ends(
    load: Callable[[], Any], asks: bool, signals: int, status: int, words: str, qwen3_dir: Path, tmp_path: Path
) -> None:
    """By its exit status, whatever it does when the signal comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = replace(describe_serving(["--load", str(qwen3_dir)]), port=port, drain_seconds=0.3 if signals < 2 else 60)
    log = tmp_path / "log"
    child = multiprocessing.get_context("fork").Process(target=serve_in_child, args=(run, load, log))
    child.start()
    deadline = time.monotonic() + 30

    def status_of(path: str, body: bytes | None = None, seconds: float = 30) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
        connection.request("GET" if body is None else "POST", path, body)
        return connection.getresponse().status

    try:
        if asks:
            with socket.create_connection(("127.0.0.1", wait_for_port(port, deadline))) as client:
                while "serving" not in log.read_text() and time.monotonic() < deadline:
                    time.sleep(0.02)
                client.sendall(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                time.sleep(0.2)
                for _ in range(signals):
                    os.kill(child.pid or 0, signal.SIGTERM)
                    time.sleep(0.1)
                child.join(30)
        elif signals:
            wait_for_port(port, deadline)
            assert status_of("/health") == 503
            os.kill(child.pid or 0, signal.SIGTERM)
        child.join(30)
        assert child.exitcode == status, log.read_text()
        assert words in log.read_text()
    finally:
        child.kill()
        child.join()


def wait_for_port(port: int, deadline: float) -> int:
    """Wait until somebody listens; returns the port."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return port
        time.sleep(0.02)
    raise AssertionError("nobody listens")


def test_a_port_that_is_taken(qwen3_dir: Path) -> None:
    """It is told before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = replace(describe_serving(["--load", str(qwen3_dir)]), port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"Address already in use.*; write another address or port"):
            server.serve(run)


def test_media_are_fetched_from_named_hosts_alone(tmp_path: Path) -> None:
    """From a host of this machine: a file, one that is too large, and a host that leads elsewhere."""
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/small")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * (5000 if self.path == "/large" else 5))

        def log_message(self, *_: Any) -> None:
            pass

    host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=host.serve_forever, daemon=True).start()
    allowed = replace(LIMITS, media_hosts=("127.0.0.1",))
    place = f"http://127.0.0.1:{host.server_port}"
    try:
        assert read_url("image", f"{place}/small", allowed, "url").content == b"xxxxx"
        for url, limits, sentence in (
            (f"{place}/large", allowed, "larger than"),
            (f"{place}/away", allowed, "302"),
            (f"http://localhost:{host.server_port}/small", allowed, "fetches nothing from 'localhost'"),
            ("http://[::1", allowed, "fetches nothing from None"),
            (f"{place}/small", LIMITS, "--media-hosts"),
        ):
            with pytest.raises(RequestError, match=sentence):
                read_url("image", url, limits, "url")
    finally:
        host.shutdown()
        host.server_close()


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM can't be installed here: what asks for it is told that it is."""
    monkeypatch.setattr(describe, "is_installed", lambda name: name == "vllm")


def test_the_command_of_vllm(with_vllm: None, qwen3_dir: Path, tmp_path: Path) -> None:
    """A HF directory is served as it is, greedily unless asked, with the guard and without the key in sight."""
    (tmp_path / "key").write_text("secret")
    words = ["--load", str(qwen3_dir), "--api-key-file", str(tmp_path / "key"), "--port", "81", "--dtype", "bf16"]
    run = describe_serving([*words, "--media-root", str(tmp_path), "--media-hosts", "a.org", "b.org"])
    assert run.engine == "vllm" and exported(run) == qwen3_dir
    command = command_of(run, qwen3_dir)
    text = " ".join(command)
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(qwen3_dir)]
    for part in (
        f"--served-model-name {qwen3_dir.name} --host 127.0.0.1 --port 81",
        "--middleware mindspeed_mm.tasks.serving.vllm_server.VllmGuard",
        '--dtype bfloat16 --seed 42 --override-generation-config {"temperature": 0.0}',
        "--shutdown-timeout 60",
        f"--allowed-local-media-path {tmp_path} --allowed-media-domains a.org b.org",
    ):
        assert part in text
    assert "secret" not in text and "secret" in guard_settings(run)
    drawing = describe_serving([*words, "--do-sample", "--temperature", "0.7"])
    assert '--override-generation-config {"temperature": 0.7}' in " ".join(command_of(drawing, qwen3_dir))
    with pytest.raises(ConfigError, match="--image-max-pixels: vLLM has no such setting"):
        describe_serving([*words, "--image-max-pixels", "1000"])
    assert describe_serving([*words, "--image-max-pixels", "1000", "--engine", "transformers"]).engine == "transformers"


def test_the_guard_of_vllm(with_vllm: None, qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made from the environment: other models, other routes, media that aren't allowed; the rest is vLLM's."""
    words = ["--load", str(qwen3_dir), "--served-model-name", "tiny", "--max-image-pixels", "1000", "--max-media", "2"]
    run = describe_serving(
        [*words, "--media-root", str(tmp_path), "--max-answer-tokens", "9", "--media-hosts", "a.org"]
    )
    monkeypatch.setenv(GUARD_VARIABLE, guard_settings(run))
    chats = "/v1/chat/completions"
    good = {"model": "tiny", "messages": [{"role": "user", "content": "what"}], "tools": [{"type": "function"}]}
    image = {"type": "image_url", "image_url": {"url": picture(9, 9)}}

    async def run_all() -> None:
        app = App()
        app.let.set()
        held = VllmGuard(app)

        async def ask(content: object, path: str = chats) -> tuple[int | None, str]:
            status, answer = await response_of(held, *request(path, [json.dumps(content).encode()]))
            return status, answer.get("error", {}).get("message", "")

        assert await ask(good) == (200, "")
        assert json.loads(app.bodies[0]) == good
        assert (await ask({**good, "model": "base"}))[0] == 404
        for path in (
            "/v1/completions",
            "/v1/responses",
            "/invocations",
            "/v1/load_lora_adapter",
            "/pause",
            "/tokenize",
        ):
            assert (await ask(good, path))[0] == 404
        for path, status in (
            ("/v1/models", 200),
            ("/health", 200),
            ("/metrics", 200),
            ("/docs", 404),
            ("/server_info", 404),
        ):
            assert (await response_of(held, *request(path, method="GET")))[0] == status, path
        for body, sentence in (
            ({**good, "max_tokens": 10}, "at most 9"),
            (with_url(bomb()), "more than 1,000 pixels"),
            (with_url("file:///etc/passwd"), "isn't below the folder of media"),
            (with_url("http://b.org/a.png"), "fetches nothing from 'b.org'"),
            (with_url("data:image/png;base64,@"), "base64"),
            (with_url("data:image/png;base64,aGVsbG8="), "is not an image"),
            ({**good, "messages": [{"role": "user", "content": [image] * 3}]}, "3 media"),
            (
                {**good, "messages": [{"role": "user", "content": [{"image_url": "file:///etc/passwd"}]}]},
                "of type text",
            ),
            (
                {**good, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
                "an object",
            ),
            ([], "JSON object"),
        ):
            status, found = await ask(body)
            assert status in (400, 403) and sentence in found, (body, found)
        assert await ask(with_url("http://a.org/a.png")) == (200, "")
        assert await ask(with_url(picture(9, 9))) == (200, "")

    asyncio.run(asyncio.wait_for(run_all(), 20))


def test_a_checkpoint_is_exported_for_vllm(with_vllm: None, tmp_path: Path) -> None:
    """Once, and again when it has changed; the weights are those that mm-convert writes."""
    import tarfile

    from mindspeed_mm.tools.converters.generic import Given, checkpoint_to_hf
    from tests.support.kept_checkpoints import ARCHIVES

    with tarfile.open(ARCHIVES / "fsdp2.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    folder, hf_dir = tmp_path / "run", tmp_path / "hf"
    run = describe_serving(["--load", str(folder), "--processor-path", str(hf_dir)])
    made = exported(run)
    assert run.name == "run" and made.parent == folder
    checkpoint_to_hf(
        Given("load_dir", str(folder)),
        Given("save_dir", str(tmp_path / "other")),
        Given("model_assets_dir", str(hf_dir)),
    )
    assert (made / "config.json").is_file() and (made / "tokenizer.json").is_file()
    ours, theirs = load_file(made / "model.safetensors"), load_file(tmp_path / "other/model.safetensors")
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert exported(run) == made and (made / "model.safetensors").stat().st_mtime_ns == written
    (run.answers.source.weights / "state.json").touch()
    assert exported(run) == made and (made / "model.safetensors").stat().st_mtime_ns != written
