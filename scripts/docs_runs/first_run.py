"""docs/first_run.md, and README's own first run, on the tiny directory and the row of docs/own_model.md."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.docs_runs.common import README, Done, expect, fences, items, key, shell, start


def run(page: Path) -> Done:
    """Follow both pages: each has the same commands."""
    done: Done = set()
    for place in (page, README):
        for snippet in fences(place, "bash"):
            commands = [command for command in items(snippet) if command.startswith("mindspeed-mm")]
            if not commands:
                continue
            init, train = commands
            shutil.rmtree("runs/first", ignore_errors=True)
            expect(start(init, place), ["written: runs/first/run.yaml"], place)
            if place == page:
                expect(shell(train, place), ["exported to runs/first/hf"], place)
            done |= {key(place, init), key(place, train)}
    return done
