"""What the parts of scripts/run_docs.py share: a page's snippets, what stands for them, and how they are started."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.check_docs import PROGRAMS, Snippet, snippets

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
OWN_MODEL, CHINESE = ROOT / "docs/own_model.md", ROOT / "docs/own_model.zh.md"
LONGEST = 300  # seconds that a command may take, on a busy machine too
#: set before torch is imported, here and in what is started: small, without a network, on the host
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MM_DEVICE": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
}

#: (page, command or text): a Chinese page counts as the English one, so that what they share is run once
Done = set[tuple[str, str]]


class DocumentError(Exception):
    """What a document says can't be followed."""


def page_of(name: str) -> Path:
    """A page of docs/."""
    return ROOT / "docs" / name


def fences(page: Path, language: str) -> list[Snippet]:
    """The snippets of a page in one language; "" has none."""
    return [snippet for snippet in snippets(page) if snippet.language == language]


def items(snippet: Snippet) -> list[str]:
    """What has to be run of a snippet: each command of bash, each line that is printed, any other text as a whole."""
    text = snippet.text
    if snippet.language == "bash":
        text = re.sub(r"\\\n\s*", "", text)
        return [command for command in (re.sub(r"(^|\s+)#.*", "", line) for line in text.splitlines()) if command]
    return text.splitlines() if not snippet.language else [text]


def key(page: Path, item: str) -> tuple[str, str]:
    """How `Done` names an item."""
    return str(page.relative_to(ROOT)).replace(".zh.md", ".md"), item


def exchange(text: str, instead: Mapping[str, str], page: Path) -> str:
    """Replace parts of a page's text by what is run instead; each must be there."""
    for written, other in instead.items():
        if written not in text:
            raise DocumentError(f"{page.name}: '{text}' has no '{written}' any more: change scripts/docs_runs")
        text = text.replace(written, other)
    return text


def expect(output: str, lines: list[str], page: Path) -> None:
    """What a run has to say."""
    for line in lines:
        if line not in output:
            raise DocumentError(f"{page.name}: the run has not printed '{line}':\n{output[-6000:]}")


def shell(command: str, page: Path, *, folder: Path | None = None, **variables: str) -> str:
    """Run a command by bash, in this Python's environment, and return its output."""
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, **VARIABLES, "VIRTUAL_ENV": str(Path(binaries).parent), **variables}
    environment["PATH"] = os.pathsep.join([binaries, os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
    )
    if done.returncode:
        raise DocumentError(f"{page.name}: {command}\n{done.stdout[-6000:]}\nended with status {done.returncode}")
    return done.stdout


def preload(*modules: str) -> None:
    """Import what every `start` would import again."""
    for module in modules:
        importlib.import_module(module)


def start(command: str, page: Path, *, ranks: int = 1, fails: bool = False) -> str:
    """Run a program of this repository in processes forked from this one: see `preload`.

    `python FILE.py …` and the installed commands run in one process; with `torchrun --nproc_per_node N FILE.py …`,
    `ranks` processes get the launcher's variables. Returns their output.
    """
    words = shlex.split(command)
    if by_launcher := words[0] == "torchrun":
        words = words[3:] if words[1].startswith("--nproc") else words[1:]
    elif words[0] == "python":
        words = words[1:]
    fork = multiprocessing.get_context("fork")
    with socket.socket() as free, tempfile.TemporaryFile("w+") as output:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
        free.close()
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port} if by_launcher else {}
        processes = [
            fork.Process(
                target=_program,
                args=(words, output.fileno(), {**world, **({"RANK": str(r), "LOCAL_RANK": str(r)} if world else {})}),
            )
            for r in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LONGEST)
            if process.exitcode is None:
                process.kill()
                process.join()
        output.seek(0)
        printed = output.read()
    statuses = [process.exitcode for process in processes]
    if any(statuses) != fails:
        raise DocumentError(f"{page.name}: {command}\n{printed[-6000:]}\nended with {statuses}")
    return printed


def _program(words: Sequence[str], output: int, variables: Mapping[str, str]) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    sys.argv = list(words)
    try:
        if words[0] in PROGRAMS and not words[0].endswith(".py"):
            sys.exit(importlib.import_module(PROGRAMS[words[0]]).main(list(words[1:])))
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
