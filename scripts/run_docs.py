"""Run what the documents tell users to write and to run, each at its smallest, on one CPU.

    python scripts/run_docs.py                  # all parts, two at a time: two minutes or so on two cores
    python scripts/run_docs.py generation       # one of them: see PARTS

Snippets are taken from the pages, with the substitutions that scripts/docs_runs/ states: fewer processes, samples and
steps, and tiny directories where published weights are named. docs/own_model.md is followed in Chinese too; of what
else the Chinese pages show, each command or line must be one of the English page's. A command or text that is neither
run nor listed in `NOT_RUN` with a reason is a fault; so is an entry of that table that no page shows.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.check_docs import documents, snippets  # noqa: E402
from scripts.docs_runs.common import VARIABLES, DocumentError, Done, items, key  # noqa: E402

#: part → the function that runs it; those that take longest begin first
PARTS = {
    "quick_starts": "examples.quick_starts",
    "own_model": "own_model.run",
    "adding_a_model": "examples.adding_a_model",
    "generation": "generation.run",
    "evaluation": "evaluation.run",
    "serving": "serving.run",
}
#: how an item of a page begins that is not run here → why
NOT_RUN = {
    ("README.md", "bash scripts/test.sh"): "the first thing that .ci/run runs",
    (
        "docs/own_model.md",
        'pip install -e ".[all]" -c constraints.txt',
    ): "scripts/test.sh installs so, with more extras",
    ("docs/evaluation.md", "python -m venv lmms-env"): "an environment of its own, of packages that are none of ours",
    ("docs/evaluation.md", "lmms-env/bin/python -m lmms_eval"): "it downloads a benchmark and needs a server",
    ("docs/performance.md", "bash benchmarks/device.sh --make-wheels"): "it downloads packages for another machine",
    (
        "docs/performance.md",
        "bash benchmarks/device.sh --wheels",
    ): "smallest_benchmarks.py runs its smallest form",
    ("docs/architecture.md", "doors "): "a drawing of the package, of which nothing is run",
    ("docs/console.md", "model       "): "what a run prints",
    ("docs/console.md", " [2026-01-02"): "what a run prints",
}


def run_part(name: str) -> tuple[Done, float]:
    """Run a part in a folder of its own; returns what it has run, and the seconds that it took."""
    started = time.perf_counter()
    module, _, function = PARTS[name].partition(".")
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        os.chdir(folder)
        try:
            done = getattr(import_module(f"scripts.docs_runs.{module}"), function)()
        finally:
            os.chdir(ROOT)
    return done, time.perf_counter() - started


def left(done: Done) -> list[str]:
    """What the pages show and nobody has run, and entries of `NOT_RUN` that no page shows."""
    problems, used = [], set()
    for page in documents():
        for snippet in snippets(page):
            found = [key(page, item) for item in items(snippet)]
            if not snippet.language:  # one entry for a whole drawing
                found = found if any(item in done for item in found) else found[:1]
            for name, item in found:
                entry = next((e for e in NOT_RUN if e[0] == name and item.startswith(e[1])), None)
                used.add(entry)
                if entry is None and (name, item) not in done:
                    problems.append(f"{snippet.place}: nobody runs this, and NOT_RUN gives no reason: {item}")
    problems += [f"NOT_RUN: {page} shows no '{item}'" for page, item in NOT_RUN.keys() - used]
    return problems


def main() -> int:
    """Run all parts, or those named on the command line; returns the exit status."""
    os.environ.update(VARIABLES)
    unknown = sorted(set(sys.argv[1:]) - set(PARTS))
    if unknown:
        print(f"no part is called {', '.join(unknown)}; there are: {', '.join(PARTS)}")
        return 2
    done: Done = set()
    problems = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {pool.submit(run_part, name): name for name in sys.argv[1:] or PARTS}
        for future in as_completed(running):
            try:
                ran, seconds = future.result()
            except DocumentError as error:
                problems.append(str(error))
            except Exception as error:  # of whatever kind: a page can't be followed
                problems.append(f"{running[future]}: {type(error).__name__}: {error}")
            else:
                done |= ran
                print(f"{running[future]}: {len(ran)} commands and texts run in {seconds:.0f} s", flush=True)
    if not problems and len(running) == len(PARTS):
        problems = left(done)
    print("\n".join(problems) or "what the documents show runs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
