"""Pages in headless Chromium, of Debian's package `chromium` or any other that is found."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

#: the program; None: there is none
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 90


def shown_page(page: Path, *options: str, width: int = 1280, height: int = 1000) -> tuple[str, list[str]]:
    """Let Chromium show a page without a network; returns the document after its scripts, and what the console says.

    Args:
        options: further ones of the command line.
        width, height: of the window in pixels.
    """
    done = _run([*options, "--dump-dom", f"--window-size={width},{height}", page.resolve().as_uri()])
    return done.stdout, _console(done.stderr)


def take_screenshot(
    page: str, picture: Path, *options: str, width: int = 1280, height: int = 1000, is_dark: bool = False
) -> list[str]:
    """Write a picture of a page; returns what the console says.

    Args:
        page: URL.
        picture: PNG file to write.
        options: further ones of the command line.
        width, height: of the window in pixels; at least 500 pixels wide.
    """
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    size = f"--window-size={width},{height}"
    return _console(_run([*options, scheme, size, f"--screenshot={picture.resolve()}", page]).stderr)


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None, "there is no Chromium"
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        usual = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        usual += ["--enable-logging=stderr", "--virtual-time-budget=4000", f"--user-data-dir={profile}"]
        usual += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
        return subprocess.run(
            [CHROMIUM, *usual, *words], capture_output=True, text=True, timeout=_SECONDS, check=True, errors="replace"
        )


def _console(log: str) -> list[str]:
    return re.findall(r":CONSOLE[:(]\d+\)?\] (.*)", log)
