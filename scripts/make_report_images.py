"""Take the pictures of docs/images: the reports of runs that train now, in headless Chromium.

    python scripts/make_report_images.py                        # all: some minutes on two cores
    python scripts/make_report_images.py comparison             # one of them: see PICTURES

The quick start is trained, and photographed while it trains; then once more with another learning rate, until a rank
is killed, and from its last checkpoint to the end; and the quick start of generation. Chromium is Debian's package
`chromium`. A message on the console of a page is an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.chromium import CHROMIUM, take_screenshot  # noqa: E402
from tests.support.processes import processes_below  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RUNS = Path("runs")
QUICKSTART, FASTER, DRAWN = RUNS / "quickstart", RUNS / "quickstart_faster", RUNS / "quickstart_sora" / "images_run"
TRAIN = [sys.executable, "-m", "mindspeed_mm.tools.cli", "train"]
STEPS, KILLED_AT = 240, 130
_LARGEST = 200_000
_SECONDS = 1200


def running() -> None:
    """The quick start, while it trains."""
    _run([sys.executable, "examples/quickstart/prepare.py", "--out", str(QUICKSTART)])
    (QUICKSTART / "report.html").unlink(missing_ok=True)
    with _started([*TRAIN, "examples/quickstart/finetune_quickstart.sh"], TRAIN_ITERS=str(STEPS)) as process:
        _wait(process, lambda: _step_of_page(QUICKSTART) >= STEPS // 4)
        _take(QUICKSTART / "report.html", "report-running", height=1060)
        _end(process, 0)
    _take(QUICKSTART / "report.html", "report-dark", height=1060, is_dark=True)
    _take(QUICKSTART / "report.html", "report-samples", sections=("answers", "samples"), height=900)


def crashed() -> None:
    """The same with another learning rate, after a rank was killed."""
    words = ["--lr", "3.0e-3", "--save-interval", "60", "--overwrite", "--save", str(FASTER)]
    with _started([*TRAIN, str(QUICKSTART), *words]) as process:
        _wait(process, lambda: _logged(FASTER) >= KILLED_AT)
        os.kill(_rank(process.pid, 1), signal.SIGKILL)
        _end(process, 1)
    _take(FASTER / "report.html", "report-crashed", height=700)


def comparison() -> None:
    """Both, the second one from its last checkpoint to its end."""
    _run([*TRAIN, str(FASTER), "--load", str(FASTER)])
    page = RUNS / "comparison.html"
    _run(
        [sys.executable, "-m", "mindspeed_mm.tools.cli", "report", str(QUICKSTART), str(FASTER), "--output", str(page)]
    )
    _take(page, "report-comparison", height=1240)


def generation() -> None:
    """The quick start of generation, with what it draws of the same prompts over the steps."""
    shutil.rmtree(DRAWN.parent, ignore_errors=True)
    _run([sys.executable, "examples/quickstart_sora/prepare.py", "--out", str(DRAWN.parent)])
    _run([*TRAIN, "examples/quickstart_sora/train_sora.sh"], SAVE_PATH=str(DRAWN))
    _take(DRAWN / "report.html", "report-generation", sections=("generated", "samples"), height=900)


#: name → what takes it, in this order: later ones need the runs of earlier ones
PICTURES: dict[str, Callable[[], None]] = {
    "running": running,
    "crashed": crashed,
    "comparison": comparison,
    "generation": generation,
}


def main() -> None:
    """Take the pictures that are named, or all."""
    os.chdir(ROOT)
    if CHROMIUM is None:
        sys.exit("there is no Chromium: apt-get install chromium")
    unknown = [name for name in sys.argv[1:] if name not in PICTURES]
    if unknown:
        sys.exit(f"'{unknown[0]}' is no picture; expected {', '.join(PICTURES)}")
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


def _take(page: Path, name: str, *, height: int, sections: Sequence[str] = (), is_dark: bool = False) -> None:
    """Write a picture of a page, or of its head and some of its sections."""
    path, copy = IMAGES / f"{name}.png", page.with_name(f"picture-{page.name}")
    others = "".join(f":not(#{section})" for section in sections)
    style = f"<style>main > section{others} {{ display: none }}</style>" if sections else ""
    copy.write_text(page.read_text(encoding="utf-8").replace("</head>", f"{style}</head>"), encoding="utf-8")
    said = take_screenshot(copy.resolve().as_uri(), path, height=height, is_dark=is_dark)
    copy.unlink()
    if said:
        sys.exit(f"{page}: the console says {said}")
    Image.open(path).convert("RGB").save(path, optimize=True)
    size, of_page = path.stat().st_size, page.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB, of a page of {of_page / 1000:.0f} kB", flush=True)
    if size > _LARGEST:
        sys.exit(f"{path} is larger than {_LARGEST} bytes")


@contextlib.contextmanager
def _started(words: list[str], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MM_DEVICE": "cpu", **variables}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _run(words: list[str], **variables: str) -> None:
    with _started(words, **variables) as process:
        _end(process, 0)


def _end(process: subprocess.Popen[bytes], status: int) -> None:
    if process.wait(_SECONDS) != status:
        sys.exit(f"{process.args} ended with status {process.returncode}, expected {status}")


def _wait(process: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_there():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{process.args} has ended, or hangs, before what was waited for")
        time.sleep(0.5)


def _step_of_page(run: Path) -> int:
    path = run / "report.html"
    found = re.search(r"training: step ([\d,]+) of", path.read_text(encoding="utf-8") if path.exists() else "")
    return 0 if found is None else int(found[1].replace(",", ""))


def _logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    steps = re.findall(r'"iteration": (\d+)', path.read_text(encoding="utf-8")) if path.exists() else []
    return max(map(int, steps), default=0)


def _rank(launcher: int, number: int) -> int:
    variable = f"\0RANK={number}\0".encode()
    for pid in processes_below(launcher):
        with contextlib.suppress(OSError):
            if variable in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
    sys.exit(f"there is no rank {number}")


if __name__ == "__main__":
    main()
