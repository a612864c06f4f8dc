"""Measure and check training on one device, and print one Markdown table: ours, transformers' and diffusers' loops.

    bash benchmarks/device.sh                  # one CUDA device or NPU, at most eight minutes
    bash benchmarks/device.sh --smallest       # every part that a host can run, at its smallest
    bash benchmarks/device.sh --parts "dense text" parity --minutes 3

docs/performance.md, "On a device", says what the parts and columns are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from device_runner import DEVICE, NOT_RUN, Part, Runner, Table  # noqa: E402

OURS = ("torch", "transformers", "pydantic", "xxhash")
GENERATION = (*OURS, "diffusers", "ftfy")
PACKAGES = ("torch", "transformers", "diffusers", "megatron-core", "accelerate", "numpy", "flash-attn", "flash-attn-3")
_FAULT = re.compile(rf"{NOT_RUN}|no trace: |\(\w+ at \S+\)")
KERNELS, PARITY = "kernels of attention", "parity with plain transformers"
MAKING = "model and rows"
CASE_FOLDERS = {"dense text": "dense", "images": "images", "experts": "experts", "Wan": "wan"}


def parts(smallest: bool = False) -> list[Part]:
    """All parts, in the order of their importance: those at the end are the first that no time is left for.

    Args:
        smallest: nothing is timed, so that parts may run at once, and one compiled contender stands for all.
    """
    made = {
        case: Part(case, MAKING, GENERATION if case == "Wan" else OURS, alone=False, least=10) for case in CASE_FOLDERS
    }

    def timed(case: str, contender: str, *needs: str, seconds: float = 75, least: float = 15) -> Part:
        all_needs = (*made[case].needs, *needs)
        return Part(case, contender, all_needs, (made[case].name,), seconds, least, alone=not smallest)

    further = [timed(case, "ours compiled", seconds=120, least=40) for case in ("Wan", "images", "experts")]
    further.insert(1, Part(PARITY, "FSDP2 compiled", OURS, seconds=120, least=40))
    return [
        Part(KERNELS, "", OURS, alone=False, seconds=90, least=10),
        Part(PARITY, "FSDP2", OURS, alone=False, seconds=120),
        Part(PARITY, "Megatron", (*OURS, "megatron"), alone=False, seconds=120),
        *made.values(),
        timed("dense text", "ours"),
        timed("dense text", "Trainer packed", "accelerate"),
        timed("images", "ours"),
        timed("images", "Trainer", "accelerate"),
        timed("Wan", "ours"),
        timed("Wan", "diffusers"),
        timed("experts", "ours"),
        *(timed("experts", "Trainer packed", "accelerate") for _ in range(not smallest)),
        timed("dense text", "ours on Megatron", "megatron"),
        *(timed("dense text", "Trainer", "accelerate") for _ in range(not smallest)),
        timed("dense text", "ours compiled", seconds=120, least=5 if smallest else 40),
        *([] if smallest else further),
    ]


def main() -> None:
    """Run the parts asked for and print the table."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", metavar="WORDS", help="only parts whose names have one of these in them")
    parser.add_argument("--minutes", type=float, default=7.8, help="for everything; parts that don't fit are not run")
    parser.add_argument("--out", type=Path, help="folder of the table; default: $OUT, else device-results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of what this machine lacks")
    parser.add_argument("--make-wheels", type=Path, help="download them into a folder, and do nothing else")
    parser.add_argument("--worker", help="a part, run in this process")
    parser.add_argument("--folder", type=Path, help="for models and rows; default: a temporary one")
    parser.add_argument("--results", type=Path, help="file of a worker's rows")
    add_smallest(parser)
    options = parser.parse_args()
    if options.make_wheels:
        from device_wheels import make

        make(options.make_wheels)
        return
    if options.worker:
        work(options.worker, options.folder, options.results, options.smallest, options.out)
        return
    with tempfile.TemporaryDirectory(prefix="device-") as temporary:
        lead(options, Path(options.folder or temporary))


def lead(options: argparse.Namespace, folder: Path) -> None:
    """Run the workers and print what they have found."""
    began = time.monotonic()
    default = folder / "results" if options.smallest else Path("device-results")
    out: Path = (options.out or Path(os.environ.get("OUT") or default)).absolute()
    brought = ""
    if options.wheels:
        from device_wheels import install

        installed = install(options.wheels, folder / "site")
        brought = f"; from wheels: {', '.join(installed) or 'nothing'}"
        sys.path.insert(0, str(folder / "site"))
    wanted = [part for part in parts(options.smallest) if is_wanted(part, options.parts)]
    if not wanted:
        raise SystemExit(f"--parts: none of {', '.join(part.name for part in parts())} has {options.parts} in its name")

    def command(part: Part, results: Path) -> list[str]:
        words = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--worker", part.name]
        words += ["--folder", str(folder), "--results", str(results), "--out", str(out)]
        return [*words, *(["--smallest"] if options.smallest else [])]

    set_environment(folder, options.smallest)
    table = Table(out, head_of(options.smallest) + brought, [part.name for part in wanted])
    deadline = began + options.minutes * 60
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runner = Runner(table, command, deadline, together=max(1, min(6, cores // 2 + 1)), folder=folder)
    runner.run(wanted)
    write_log(out / "log.txt", folder)
    table.head += f". All of it took {time.monotonic() - began:.0f} s."
    table.write()
    print(table.markdown())
    if options.smallest and (failures := unexpected(table.rows)):
        raise SystemExit("\n".join(failures))


def is_wanted(part: Part, words: list[str] | None) -> bool:
    """Whether a part is among those asked for, or what they need."""
    return (
        not words
        or any(word in part.name for word in words)
        or (
            part.contender == MAKING
            and any(
                part.case in word or word in other.name
                for word in words
                for other in parts()
                if part.name in other.after
            )
        )
    )


def set_environment(folder: Path, smallest: bool) -> None:
    """Set what all workers shall find in their environment; what is set already stays."""
    path = [str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    threads = 1 if smallest else max(1, min(8, (os.cpu_count() or 1) // 2))
    values = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    # one process, on a machine that may have no name and no network
    values |= {"MM_DEVICE_PEAK_TFLOPS": "0.1"} if smallest else {}  # so that the column is filled on a host, too
    values |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    for name, value in values.items():
        os.environ.setdefault(name, value)


def head_of(smallest: bool) -> str:
    """What the figures hold for."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    python = ".".join(map(str, sys.version_info[:3]))
    sizes = "Smallest sizes, which say nothing. " if smallest else ""
    return f"{sizes}Python {python}, {versions}; {os.cpu_count()} cores"


def unexpected(rows: list[dict[str, Any]]) -> list[str]:
    """Rows that the smallest form must not have: of parts that failed, and not for want of a device or a library."""
    allowed = ("needs CUDA", "is not installed", "are not installed")
    return [
        f"{row['part']}: {row['contender']}: {row['note']}"
        for row in rows
        if _FAULT.search(str(row.get("note"))) and not any(word in row["note"] for word in allowed)
    ]


def write_log(path: Path, folder: Path) -> None:
    """Join what the workers have written, the end of each."""
    texts = [f"== {file.stem}\n{file.read_text(errors='replace')[-20000:]}" for file in sorted(folder.glob("*.txt"))]
    path.write_text("\n".join(texts), encoding="utf-8")


def work(name: str, folder: Path, results: Path, smallest: bool, out: Path) -> None:
    """Run a part, once its turn has come; every row is in the file as soon as it is found."""
    part = next(part for part in parts() if part.name == name)

    def tell(row: dict[str, Any]) -> None:
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    try:
        prepare(part)
        if not sys.stdin.readline():
            return
        require_device(smallest)
        for row in found_by(part, folder, smallest, out):
            tell(row)
    except BaseException as error:
        traceback.print_exc()
        from device_contenders import said

        tell({"note": f"{NOT_RUN}{said(error)}"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the rows say it all; threads of collectives may hang at a regular end


def require_device(smallest: bool) -> None:
    """Refuse sizes that a host would not get through.

    Raises:
        RuntimeError: they are not the smallest, and torch sees no device.
    """
    from mindspeed_mm import accelerator

    if not smallest and accelerator.current().is_host:
        raise RuntimeError("torch sees no CUDA device or NPU here; a host runs --smallest")


def prepare(part: Part) -> None:
    """Import what takes long, without touching the device, before it is this part's turn."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import mindspeed_mm.accelerator

    if part.contender.startswith("Trainer"):
        from transformers import Trainer  # noqa: F401
    elif part.contender == MAKING:
        import mindspeed_mm.data
    elif part.contender.startswith("ours"):
        import mindspeed_mm.training  # noqa: F401
    if part.case == "Wan":
        import diffusers  # noqa: F401
    import device_cases  # noqa: F401
    import device_contenders  # noqa: F401


def found_by(part: Part, folder: Path, smallest: bool, out: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part."""
    import device_checks

    if part.case == KERNELS:
        yield {DEVICE: device_checks.device_line()}
        yield from device_checks.attention(smallest)
    if part.case == PARITY:
        compiled = (False, True) if smallest and part.contender == "FSDP2" else ("compiled" in part.contender,)
        own = folder / f"parity_{part.contender.replace(' ', '_')}"
        yield from device_checks.parity(own, smallest, fsdp2=part.contender != "Megatron", compiled=compiled)
    if part.case in CASE_FOLDERS:
        own = folder / CASE_FOLDERS[part.case]
        if part.contender == MAKING:
            from device_cases import CASES

            from mindspeed_mm import accelerator

            own.mkdir(exist_ok=True)
            yield {DEVICE: device_checks.device_line()}
            CASES[part.case].make(own, accelerator.current().device(), smallest)
            return
        from device_contenders import speed

        yield from speed(part.contender, part.case, own, smallest, None if smallest else out)


if __name__ == "__main__":
    main()
