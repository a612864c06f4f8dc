"""Run every benchmark of benchmarks/ at its smallest, so that none stops working unseen.

    python scripts/smallest_benchmarks.py                 # about five minutes on two cores
    python scripts/smallest_benchmarks.py step_cost       # one of them

Stops at the first that fails, and names it. A file with a `__main__` part is a benchmark, and must accept --smallest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: samples_per_second.py starts it by the Python of another trainer
ELSEWHERE = ("other_trainers.py",)
LONGEST = 300  # seconds, on a busy machine too; alone on two cores each takes less than 60


def benchmarks() -> list[Path]:
    """The programs in benchmarks/; what they share has no `__main__` part, or is for other environments."""
    programs = [f for f in sorted((ROOT / "benchmarks").glob("*.py")) if f.name not in ELSEWHERE]
    return [f for f in programs if '__name__ == "__main__"' in f.read_text()]


def failure(program: Path) -> str | None:
    """Run a benchmark at its smallest; returns what is wrong with it."""
    if "add_smallest(" not in program.read_text():
        return "has no smallest form: give its parser --smallest (`add_smallest` of benchmarks/common.py)"
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables["PYTHON"] = sys.executable
    script = program.with_suffix(".sh")  # which starts the program, where there is one
    command = ["bash", str(script)] if script.exists() else [sys.executable, "-W", "ignore", str(program)]
    with tempfile.TemporaryDirectory(prefix="smallest-") as folder:
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "TMPDIR": folder}
        with open(Path(folder) / "output.txt", "w+") as output:
            try:
                status = subprocess.run(
                    [*command, "--smallest"],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=LONGEST,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"none after {LONGEST} s"
            output.seek(0)
            return f"exit status {status}:\n{output.read()[-4000:]}" if status else None


def main() -> int:
    """Run all, or those named on the command line."""
    found = {program.stem: program for program in benchmarks()}
    unknown = sorted(set(sys.argv[1:]) - set(found))
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(found)}")
        return 2
    for name in sys.argv[1:] or found:
        started = time.perf_counter()
        wrong = failure(found[name])
        if wrong:
            print(f"benchmarks/{name}.py FAILED: {wrong}")
            return 1
        print(f"benchmarks/{name}.py: {time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
