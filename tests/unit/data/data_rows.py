"""Short ways of writing rows, and reading samples, in the tests of the data room."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any


def turn(role: str, content: Any, **extra: Any) -> dict[str, Any]:
    """One turn of a row."""
    return {"role": role, "content": content, **extra}


def talk(*contents: Any, system: str | None = None, **columns: Any) -> dict[str, Any]:
    """A row whose turns alternate between user and assistant."""
    turns = [turn("system", system)] if system is not None else []
    turns += [turn(("user", "assistant")[number % 2], content) for number, content in enumerate(contents)]
    return {"messages": turns, **columns}


def targets(sample: dict[str, Any], tokenizer: Any) -> str:
    """The text of the target tokens of a sample, with runs of them separated by '|'."""
    runs: list[list[int]] = [[]]
    for token in sample["labels"].tolist():
        if token == -100:
            runs.append([])
        else:
            runs[-1].append(token)
    return "|".join(tokenizer.decode(run) for run in runs if run)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """One list of several."""
    return list(itertools.chain.from_iterable(lists))


ROLES = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
ROLES |= {"assistant_tag": "assistant"}
SHAREGPT = {"messages": "conversations", "role_tag": "from", "content_tag": "value"}
SHAREGPT |= {"user_tag": "human", "assistant_tag": "gpt"}


def turns_of(n: int, role: str, content: str, user: str, assistant: str, ask: Any = None) -> list[dict[str, Any]]:
    ask = ask or f"<image>which digit {n}"
    return [{role: user, content: ask}, {role: assistant, content: "seven " * (n + 1)}]


def calls_of(n: int) -> list[dict[str, Any]]:
    call = json.dumps({"name": "look", "arguments": {"x": n}})
    talk = [("system", "brief"), ("human", f"look {n}"), ("function_call", call), ("observation", "8"), ("gpt", "ok")]
    return [{"from": role, "value": text} for role, text in talk]


def parts_of(n: int) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": f"which digit {n}"}]


FORMS: dict[str, tuple[Any, dict[str, str]]] = {
    "messages": (lambda n: {"messages": turns_of(n, "role", "content", "user", "assistant"), "images": ["a.png"]},
                 {**ROLES, "images": "images"}),
    "openai_parts": (lambda n: {"messages": turns_of(n, "role", "content", "user", "assistant", parts_of(n))}, ROLES),
    "llava": (lambda n: {"conversations": turns_of(n, "from", "value", "human", "gpt"), "image": "a.png"},
              {**SHAREGPT, "images": "image"}),
    "sharegpt_with_calls": (lambda n: {"conversations": calls_of(n)}, SHAREGPT),
    "sharegpt_system_column": (
        lambda n: {"conversations": turns_of(n, "from", "value", "user", "assistant", "digit"), "system": f"brief {n}"},
        {**SHAREGPT, "user_tag": "user", "assistant_tag": "assistant", "system": "system"}),
    "query_response": (
        lambda n: {"query": f"<image>which {n}", "response": "seven", "history": [["a", "b"]] * (n % 2),
                   "system": "brief", "images": ["a.png"]},
        {"formatting": "alpaca", "prompt": "query", "response": "response", "history": "history", "system": "system",
         "images": "images"}),
    "alpaca": (
        lambda n: {"instruction": f"which {n}", "input": "digit" * (n % 2), "output": "seven", "history": [["a", "b"]],
                   "system": "brief"},
        {"formatting": "alpaca", "prompt": "instruction", "query": "input", "response": "output",
         "history": "history", "system": "system"}),
}  # fmt: skip
