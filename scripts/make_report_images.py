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
from tests.support.processes import free_port  # noqa: E402
from tests.support.train_command import Command  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RUNS = Path("runs")
QUICKSTART, FASTER, DRAWN = RUNS / "quickstart", RUNS / "quickstart_faster", RUNS / "quickstart_sora" / "images_run"
STEPS, KILLED_AT = 200, 130
_LARGEST = 200_000
_SECONDS = 1200


def running() -> None:
    """The quick start, while it trains."""
    _run([sys.executable, "examples/quickstart/prepare.py", "--out", str(QUICKSTART)])
    (QUICKSTART / "report.html").unlink(missing_ok=True)
    with _started("examples/quickstart/finetune_quickstart.sh"):
        _wait_until(lambda: _step_of_page(QUICKSTART) >= STEPS // 4, "has come to a quarter of its steps")
        _take(QUICKSTART / "report.html", "report-running", height=940)
    _take(QUICKSTART / "report.html", "report-dark", height=940, is_dark=True)
    _take(QUICKSTART / "report.html", "report-samples", sections=("answers", "samples"), height=900)


def crashed() -> None:
    """The same with another learning rate, after a rank was killed."""
    shutil.rmtree(FASTER, ignore_errors=True)
    words = ["--lr", "3.0e-3", "--save-interval", "60", "--save", str(FASTER)]
    with _started(str(QUICKSTART), *words) as command:
        command.wait_for(FASTER, KILLED_AT)
        os.kill(command.rank(1), signal.SIGKILL)
    _wait_until(lambda: 'class="state crashed' in (FASTER / "report.html").read_text(encoding="utf-8"), "has crashed")
    _take(FASTER / "report.html", "report-crashed", height=560)


def comparison() -> None:
    """Both, the second one from its last checkpoint to its end."""
    with _started(str(FASTER), "--load", str(FASTER)):
        pass
    page = RUNS / "comparison.html"
    words = ["report", str(QUICKSTART), str(FASTER), "--output", str(page)]
    _run([sys.executable, "-m", "mindspeed_mm.tools.cli", *words])
    _take(page, "report-comparison", height=1240)


def generation() -> None:
    """The quick start of generation, with what it draws of the same prompts over the steps."""
    shutil.rmtree(DRAWN.parent, ignore_errors=True)
    _run([sys.executable, "examples/quickstart_sora/prepare.py", "--out", str(DRAWN.parent)])
    with _started("examples/quickstart_sora/train_sora.sh"):
        pass
    _take(DRAWN / "report.html", "report-generation", sections=("generated",), height=760)


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
    os.environ |= {"PYTHONPATH": str(ROOT), "MM_DEVICE": "cpu", "TRAIN_ITERS": str(STEPS), "SAVE_PATH": str(DRAWN)}
    os.environ |= {"SAMPLE_INTERVAL": str(STEPS // 8), "MASTER_PORT": str(free_port())}
    if CHROMIUM is None:
        sys.exit("there is no Chromium: apt-get install chromium")
    unknown = [name for name in sys.argv[1:] if name not in PICTURES]
    if unknown:
        sys.exit(f"'{unknown[0]}' is no picture; expected {', '.join(PICTURES)}")
    IMAGES.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run that was started is ended, too
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


def _take(page: Path, name: str, *, height: int, sections: Sequence[str] = (), is_dark: bool = False) -> None:
    """Write a picture of a page, or of its head and some of its sections."""
    path, copy = IMAGES / f"{name}.png", page.with_name(f"picture-{page.name}")
    others = "".join(f":not(#{section})" for section in sections)
    style = f"<style>main > section{others} {{ display: none }}</style>" if sections else ""
    text = page.read_text(encoding="utf-8").replace(str(ROOT), "/home/me/mindspeed_mm")
    copy.write_text(text.replace("</head>", f"{style}</head>"), encoding="utf-8")
    said = take_screenshot(copy.resolve().as_uri(), path, height=height, is_dark=is_dark)
    copy.unlink()
    if said:
        sys.exit(f"{page}: the console says {said}")
    Image.open(path).convert("RGB").save(path, optimize=True)
    size, of_page = path.stat().st_size, page.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB, of a page of {of_page / 1000:.0f} kB", flush=True)
    if size > _LARGEST:
        sys.exit(f"{path} is larger than {_LARGEST} bytes")


def _run(words: list[str]) -> None:
    done = subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with status {done.returncode}")


@contextlib.contextmanager
def _started(*words: str) -> Iterator[Command]:
    """A command of `mindspeed-mm train`, which has ended after the block."""
    command = Command(list(words), RUNS / "pictures.log")
    try:
        yield command
        if command.process.wait(_SECONDS) not in (0, 1):
            sys.exit(f"{words} ended with status {command.process.returncode}: see {command.log}")
    except BaseException:
        command.kill()
        raise


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for something that a report shows."""
    deadline = time.monotonic() + _SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            sys.exit(f"no report shows that the run {what}: see {RUNS}/pictures.log")
        time.sleep(0.5)


def _step_of_page(run: Path) -> int:
    path = run / "report.html"
    found = re.search(r"training: step ([\d,]+) of", path.read_text(encoding="utf-8") if path.exists() else "")
    return 0 if found is None else int(found[1].replace(",", ""))


if __name__ == "__main__":
    main()
