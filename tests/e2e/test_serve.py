"""`mindspeed-mm serve`: answers of OpenAI's client, requests that are refused, clients that go, and the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from mindspeed_mm.tools.converters.generic import Given, checkpoint_to_hf
from tests.support.answers import NEW_TOKENS, AnswerCase, transformers_answers
from tests.support.bad_requests import REFUSED, WORDS, asked, with_url
from tests.support.kept_checkpoints import ARCHIVES
from tests.support.serving import ServerProcess, openai_messages

KEY = "a-key"
ANSWER = {"role": "assistant", "content": ""}


def row(*turns: str, images: tuple[str, ...] = (), audios: tuple[str, ...] = (), system: str | None = None) -> Any:
    """A row whose turns are the user's and the assistant's in turn."""
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, turns, strict=False)]
    head = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*head, *messages, ANSWER], "images": list(images), "audios": list(audios)}


TEXT = (row("what is this"), row("how many", "two", "where are they", system="say little"))
IMAGES = (
    row("large<image>small", images=("0_0.png",)),
    row("<image>what<image>is<image>", images=("0_0.png", "1_0.png", "3_0.png")),
    row("<image>what", "a circle", "how<image>many", images=("2_0.png", "1_0.png")),
)
SOUNDS = (row("below<audio>which", audios=("1.wav",)), row("<image>is<audio>", images=("3_0.png",), audios=("0.wav",)))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AnswerCase:
    return AnswerCase("qwen2_5_omni", tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def server(case: AnswerCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "key").write_text(KEY + "\n")
    root = case.data.parent
    words = ["--api-key-file", folder / "key", "--media-root", root, "--batch-size", 4, "--max-new-tokens", NEW_TOKENS]
    started = ServerProcess(case.hf_dir, folder, *WORDS, *words)
    yield started
    started.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def client_of(server: ServerProcess) -> openai.OpenAI:
    """OpenAI's client, which sends each request once."""
    return openai.OpenAI(base_url=f"http://{server.host}:{server.port}/v1", api_key=KEY, max_retries=0)


def answers_of(client: openai.OpenAI, case: AnswerCase, rows: tuple[Any, ...], model: str) -> list[str]:
    """The server's answers to rows, asked at once, whole and streamed."""

    def ask(asked: Any) -> str:
        messages = openai_messages(asked, case.data.parent)
        whole = client.chat.completions.create(model=model, messages=messages)
        streamed = client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        *events, last = list(streamed)
        pieces = [event.choices[0].delta.content or "" for event in events]
        assert "".join(pieces) == whole.choices[0].message.content
        assert last.usage == whole.usage
        assert whole.usage.completion_tokens <= NEW_TOKENS
        assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        return whole.choices[0].message.content

    with ThreadPoolExecutor(len(rows)) as pool:
        return list(pool.map(ask, rows))


def test_answers_equal_transformers(client: openai.OpenAI, case: AnswerCase) -> None:
    """Texts, an image, several, sounds; with a system text and earlier turns; whole and in pieces."""
    rows = (*TEXT, *IMAGES, *SOUNDS)
    expected = transformers_answers(AnswerCase.of(case, list(rows)))
    assert answers_of(client, case, rows, "tiny") == expected
    assert len(set(expected)) > 4


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "internvl", "gemma3", "llava_next", "qwen2_audio", "qwen3"])
def test_other_families(name: str, tmp_path: Path) -> None:
    """Families with tiles, with sounds alone, and of text."""
    case = AnswerCase(name, tmp_path / "case")
    rows = (
        *TEXT,
        *(IMAGES if "image" in case.family.kinds else ()),
        *(SOUNDS[:1] if "audio" in case.family.kinds else ()),
    )
    if name == "gemma3":  # its turns alternate, and its pictures have one size
        rows = rows[:1] + rows[2:]
    started = ServerProcess(case.hf_dir, tmp_path, "--max-new-tokens", NEW_TOKENS, "--batch-size", 4)
    try:
        found = answers_of(client_of(started), case, rows, started.model)
        assert found == transformers_answers(AnswerCase.of(case, list(rows)))
        assert started.stop() == 0
    finally:
        started.close()


@pytest.mark.full
def test_a_run_folder_is_served(tmp_path: Path) -> None:
    """Its newest checkpoint, as it is: the answers of plain transformers on its export."""
    with tarfile.open(ARCHIVES / "fsdp2.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    run, hf_dir, export = tmp_path / "run", tmp_path / "hf", tmp_path / "export"
    checkpoint_to_hf(Given("load_dir", str(run)), Given("save_dir", str(export)), Given("assets", str(hf_dir)))
    case = AnswerCase.over("qwen2_5_vl", export, tmp_path / "rows")
    rows = (*TEXT, *IMAGES)
    words = ("--processor-path", hf_dir, "--max-new-tokens", NEW_TOKENS)
    started = ServerProcess(run, tmp_path / "server", *words)
    try:
        assert started.model == "run"
        found = answers_of(client_of(started), case, rows, started.model)
        assert found == transformers_answers(AnswerCase.of(case, list(rows)))
        assert started.stop() == 0
    finally:
        started.close()


def test_malformed_requests_are_refused(server: ServerProcess) -> None:
    """Each by its status and a sentence that names the field; the server goes on."""
    wrong = {}
    for name, (body, status, param, words) in REFUSED.items():
        found, answer = server.ask("/v1/chat/completions", body, KEY)
        error = answer["error"] if isinstance(answer, dict) else {}
        named = param is None or error.get("param") == param
        if found != status or not named or words not in error.get("message", "") or len(error) != 4:
            wrong[name] = (found, answer)
    assert not wrong
    assert server.ask("/health") == (200, {"status": "ok"})
    assert server.ask("/v1/chat/completions", asked(), KEY)[0] == 200


def test_routes_and_keys(server: ServerProcess, client: openai.OpenAI) -> None:
    """What is served, and what transformers' application would do otherwise."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "what " * 40_000}])
    assert raised.value.code == "context_length_exceeded"
    for path in ("/load_model", "/reset", "/v1/responses", "/v1/completions", "/v1/audio/transcriptions"):
        assert server.ask(path, {"model": "tiny"}, KEY)[0] == 404, path
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert server.ask(path, key=KEY)[0] == 404, path
    for path, body in (("/v1/models", None), ("/metrics", None), ("/v1/chat/completions", asked())):
        for key in (None, "another", KEY + "x"):
            assert server.ask(path, body, key)[0] == 401, path
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    assert server.ask("/v1/chat/completions", asked(), KEY, {"Content-Type": "text/plain"})[0] == 400
    assert server.figure('mm_requests_total{status="401"}', KEY) >= 10


def test_files_below_the_root_alone(server: ServerProcess, case: AnswerCase, tmp_path: Path) -> None:
    """Neither by dots nor by a link does a URL name a file elsewhere."""
    root, outside = case.data.parent, tmp_path / "outside.png"
    Image.new("RGB", (56, 56)).save(outside)
    link, inside = root / "link.png", root / "inside.png"
    for path, target in ((link, outside), (inside, root / "0_0.png")):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    good = [root / "0_0.png", inside, f"{root}/../{root.name}/0_0.png", str(root / "0_0.png").replace("_", "%5F")]
    for path in good:
        status, answer = server.ask("/v1/chat/completions", with_url(f"file://{path}"), KEY)
        assert status == 200, answer
    dots = f"{root}/../" + os.path.relpath(outside, root.parent)
    for path in (outside, link, dots, dots.replace("..", "%2e%2e"), "/etc/passwd", root, f"{root}x", "/proc/self/mem"):
        status, answer = server.ask("/v1/chat/completions", with_url(f"file://{path}"), KEY)
        assert status in (400, 403), (path, answer)
        assert "isn't below the folder of media" in answer["error"]["message"], (path, answer)
    for url in (f"file://{root}/none.png", f"file://elsewhere{root}/0_0.png", f"file:{root.name}/0_0.png"):
        assert server.ask("/v1/chat/completions", with_url(url), KEY)[0] == 400, url


def test_settings_of_requests(server: ServerProcess, client: openai.OpenAI) -> None:
    """Lengths, texts that end an answer, and drawn tokens."""

    def said(**fields: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "what is this"}], **fields
        ).choices[0]

    usual = said().message.content
    assert said(temperature=0, top_p=0.3, n=1, user="me", stop=None, presence_penalty=0).message.content == usual
    assert said(max_tokens=3).message.content == usual[: len(said(max_completion_tokens=3).message.content)] != usual
    stop = usual[2:4]
    stopped = said(stop=stop)
    assert (stopped.message.content, stopped.finish_reason) == (usual[: usual.index(stop)], "stop")
    pieces = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "what is this"}], stop=[stop, "never"], stream=True
    )
    assert "".join(event.choices[0].delta.content or "" for event in pieces) == usual[: usual.index(stop)]
    drawn = [said(temperature=1.5, seed=seed).message.content for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
    assert len({said(temperature=1.5).message.content for _ in range(3)}) > 1


def reaches(server: ServerProcess, figure: str, value: float) -> None:
    """Wait until the server says so."""
    deadline = time.monotonic() + 20
    while (found := server.figure(figure, KEY)) != value:
        assert time.monotonic() < deadline, f"{figure} is {found}, expected {value}"
        time.sleep(0.01)


def test_clients_that_go_free_the_model(server: ServerProcess) -> None:
    """Long answers, streamed and whole, end when their clients do, long before they would have ended otherwise."""
    gone, long = 'mm_requests_total{status="499"}', asked("what is this", max_tokens=2000)
    began, before = time.monotonic(), server.figure(gone, KEY)
    status, answer = server.ask("/v1/chat/completions", long, KEY)
    whole = time.monotonic() - began
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    for stream in (True, False):
        for _ in range(5):  # on a busy machine an answer may end before its client is seen to run
            took = go_away(server, {**long, "stream": stream})
            if server.figure(gone, KEY) > before:
                break
        before += 1
        assert server.figure(gone, KEY) == before and took < 0.8 * whole
    reaches(server, "mm_requests_under_way", 0)


def go_away(server: ServerProcess, request: dict[str, Any]) -> float:
    """Close the connection of a request that runs; returns the seconds until the model is free."""
    body = json.dumps(request).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: "
    head += f"application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    began = time.monotonic()
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(head.encode() + body)
        reaches(server, "mm_requests_running", 1)
    reaches(server, "mm_requests_running", 0)
    took = time.monotonic() - began
    reaches(server, "mm_requests_under_way", 0)  # it has been counted
    return took


def test_a_signal_lets_running_answers_finish(server: ServerProcess, client: openai.OpenAI) -> None:
    """The last test of this server: it refuses what comes after SIGTERM, finishes what runs, and ends with status 0."""
    messages: Any = [{"role": "user", "content": "what is this"}]
    stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=300, stream=True)
    pieces = [next(stream)]
    refusals: list[int] = []

    def ask_later() -> None:
        server.process.send_signal(signal.SIGTERM)
        while len(refusals) < 2:
            refusals.append(server.ask("/health", key=KEY)[0])
            refusals.append(server.ask("/v1/chat/completions", asked(), KEY)[0])

    asking = threading.Thread(target=ask_later)
    asking.start()
    pieces += list(stream)
    asking.join()
    assert refusals == [503, 503]
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")
    assert server.process.wait(30) == 0
    assert "SIGTERM: 1 answers are finished" in server.log.read_text()
