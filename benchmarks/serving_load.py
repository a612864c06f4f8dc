"""`mindspeed-mm serve` under load: many clients at once, with malformed requests and killed clients among them.

    python benchmarks/serving_load.py                     # two minutes or so on two cores
    python benchmarks/serving_load.py --batch-size 1 --good 400 --rounds 10

A tiny model that reads texts, images and sounds is served. Each round, all clients send at once: OpenAI's client, whole
and streamed; requests that must be refused; and clients that close their connection while they are answered. The status
is 1 if a good answer differs from transformers' own, a bad request isn't refused, memory grows from round to round by
more than a tenth, requests are left over, or the server doesn't end with status 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> int:
    """Serve, ask, and print a line for each round."""
    from common import add_smallest

    from tests.support.answers import NEW_TOKENS, AnswerCase, transformers_answers
    from tests.support.bad_requests import WORDS
    from tests.support.serving import ServerProcess, openai_messages

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--good", type=int, default=200, help="requests of a round that must be answered")
    parser.add_argument("--bad", type=int, default=50, help="requests of a round that must be refused")
    parser.add_argument("--killed", type=int, default=20, help="clients of a round that go away")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    add_smallest(parser)
    options = parser.parse_args()
    if options.smallest:
        options.good, options.bad, options.killed, options.rounds = 12, 8, 3, 2
    folder = Path(tempfile.mkdtemp(prefix="serving-load-"))
    case = AnswerCase("qwen2_5_omni", folder / "case")
    rows = [row for row in case.rows if not row["videos"]]
    asked = AnswerCase.of(case, rows)
    answers = transformers_answers(asked)
    questions = [(openai_messages(row, case.data.parent), text) for row, text in zip(rows, answers, strict=True)]
    words = ("--max-new-tokens", NEW_TOKENS, "--batch-size", options.batch_size)
    server = ServerProcess(case.hf_dir, folder, *WORDS, *words)
    try:
        load = Load(server, questions)
        sizes = [load.round(options.good, options.bad, options.killed) for _ in range(options.rounds)]
        left = server.figure("mm_requests_under_way")
        status = server.stop()
    finally:
        server.close()
    growth = sizes[-1] / sizes[0] - 1
    print(f"memory from the first round to the last: {growth:+.1%}; requests left: {left:g}; exit status {status}")
    return 1 if load.faults or growth > 0.1 or left or status else 0


class Load:
    """Clients of a server.

    Args:
        server: the server.
        questions: messages, and the text of the right answer.
    """

    def __init__(self, server: Any, questions: list[tuple[list[dict[str, Any]], str]]) -> None:
        import openai

        self.server, self.faults = server, 0
        self._questions = questions
        self._client = openai.OpenAI(base_url=f"http://{server.host}:{server.port}/v1", api_key="none", max_retries=0)
        self._rng = random.Random(0)

    def round(self, good: int, bad: int, killed: int) -> float:
        """Send all at once; returns the server's resident memory in MB after the last answer."""
        from tests.support.bad_requests import REFUSED

        kinds: list[Callable[[], str | None]] = []
        for number in range(good):
            messages, text = self._questions[number % len(self._questions)]
            kinds.append(lambda m=messages, t=text, s=bool(number % 2): self._good(m, t, s))
        refused = itertools.cycle(self._rng.sample(sorted(REFUSED), len(REFUSED)))
        kinds += [lambda n=name: self._bad(n) for name in itertools.islice(refused, bad)]
        kinds += [lambda s=bool(n % 2), w=n * 0.02: self._killed(s, w) for n in range(killed)]
        self._rng.shuffle(kinds)
        problems: list[str] = []
        barrier = threading.Barrier(len(kinds) + 1)

        def work(ask: Callable[[], str | None]) -> None:
            barrier.wait()
            try:
                problem = ask()
            except Exception as error:  # a client's, of whatever kind: it has no answer
                problem = f"{type(error).__name__}: {error}"
            if problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(kind,)) for kind in kinds]
        for thread in threads:
            thread.start()
        barrier.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        self.faults += len(problems)
        memory = self.server.figure("process_resident_memory_bytes") / 1e6
        print(
            f"{good} good, {bad} bad, {killed} killed in {seconds:.1f} s: {len(problems)} failures, {memory:.0f} MB",
            *problems[:5],
            sep="\n  ",
            flush=True,
        )
        return memory

    def _good(self, messages: Any, text: str, streams: bool) -> str | None:
        create = self._client.chat.completions.create
        if streams:
            events = create(model=self.server.model, messages=messages, stream=True)
            found = "".join(event.choices[0].delta.content or "" for event in events)
        else:
            found = create(model=self.server.model, messages=messages).choices[0].message.content
        return None if found == text else f"answered {found!r}, expected {text!r}"

    def _bad(self, name: str) -> str | None:
        from tests.support.bad_requests import REFUSED

        body, status, _, _ = REFUSED[name]
        found, answer = self.server.ask("/v1/chat/completions", body)
        return None if found == status else f"{name}: status {found}, expected {status}: {answer}"

    def _killed(self, streams: bool, seconds: float) -> str | None:
        content = {"model": self.server.model, "messages": [{"role": "user", "content": "what is this"}]}
        body = json.dumps({**content, "max_tokens": 2000, "stream": streams}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((self.server.host, self.server.port)) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            time.sleep(seconds)
        return None


if __name__ == "__main__":
    sys.exit(main())
