"""`mindspeed-mm serve` as a process of its own, and rows of data files as messages of OpenAI's interface."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.launch import ROOT

LONGEST = 120  # seconds until a model is loaded, on a busy machine too


class ServerProcess:
    """A server that has loaded its model.

    Args:
        place: what it serves.
        folder: for its log.
        words: further words of the command line.
    """

    def __init__(self, place: Path, folder: Path, *words: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        command = [sys.executable, "-W", "ignore", "-m", "mindspeed_mm.tools.cli", "serve", str(place), "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*command, *map(str, words)], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        deadline = time.monotonic() + LONGEST
        while not (found := re.search(r"serving '(.+)' at http://(.+):(\d+)/v1", self.log.read_text("utf-8"))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"the server hasn't started:\n{self.log.read_text('utf-8')}")
            time.sleep(0.1)
        self.model, self.host, self.port = found[1], found[2], int(found[3])

    def ask(
        self, path: str, body: object = None, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request; returns its status, and the JSON object or the text of the response.

        Args:
            body: an object is sent as JSON, bytes as they are; None: the request is a GET.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=LONGEST)
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        own = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        connection.request("GET" if sent is None else "POST", path, sent, {**own, **(headers or {})})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, json.loads(text) if text.startswith("{") else text

    def figure(self, name: str, key: str | None = None) -> float:
        """Return a figure of the route /metrics; 0 where it hasn't been counted yet."""
        _, text = self.ask("/metrics", key=key)
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(LONGEST)

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()


def openai_messages(row: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the messages of a row without its last answer, with its images and sounds inside."""
    media = {kind: iter(row.get(f"{kind}s", ())) for kind in ("image", "audio")}
    messages = []
    for turn in row["messages"][:-1]:
        pieces = re.split(r"<(image|audio)>", turn["content"])
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                parts.append(_medium(piece, folder / next(media[piece])))
            elif piece:
                parts.append({"type": "text", "text": piece})
        messages.append({"role": turn["role"], "content": parts if len(pieces) > 1 else turn["content"]})
    return messages


def _medium(kind: str, file: Path) -> dict[str, Any]:
    content = base64.b64encode(file.read_bytes()).decode()
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": content, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
