"""Libraries that come along to a machine without a network, as a folder of wheels."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from email.parser import Parser
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 64 * 2**20
"""Bytes that a folder of wheels may have, with the repository beside it."""
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64")
PLATFORMS += ("manylinux2014_x86_64", "manylinux1_x86_64")
#: what the machine must have: these are large or belong together, and are never replaced there
EXPECTED = ("torch", "torchvision", "transformers", "tokenizers", "numpy", "triton")
#: what transformers needs itself, so that it is there as well
EXPECTED += ("huggingface-hub", "safetensors", "packaging", "pyyaml", "regex", "tqdm", "typer", "pillow")
#: what torch needs itself
EXPECTED += ("jinja2",)
#: what is taken along, the versions of constraints.txt where it has one; without what they need of EXPECTED
TAKEN = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "xxhash", "filelock")
TAKEN += ("rich", "markdown-it-py", "mdurl", "pygments")
TAKEN += ("accelerate", "psutil", "peft", "diffusers", "importlib-metadata", "zipp", "lazy-importer", "requests")
TAKEN += ("urllib3", "idna", "certifi", "charset-normalizer", "megatron-core", "ftfy", "wcwidth")


def normal(name: str) -> str:
    """Return a distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Wheel:
    """A wheel: its distribution, its version, and what it needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            (name,) = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
            told = Parser().parsestr(archive.read(name).decode())
        self.name, self.version = normal(told["Name"]), told["Version"]
        self.needs = told.get_all("Requires-Dist") or []


def wheels_of(folder: Path) -> list[Wheel]:
    """Read the wheels of a folder.

    Raises:
        SystemExit: the folder has none, or several of one distribution.
    """
    wheels = [Wheel(path) for path in sorted(folder.glob("*.whl"))]
    names = [wheel.name for wheel in wheels]
    if not wheels:
        raise SystemExit(f"--wheels {folder}: there are no wheels; make them by benchmarks/device.sh --make-wheels")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"--wheels {folder}: more than one wheel of {', '.join(twice)}; keep one of each")
    return wheels


def wanted(wheels: Iterable[Wheel], installed: Callable[[str], str | None]) -> list[Wheel]:
    """Choose the wheels to install: of what is missing or older here, and is none of EXPECTED.

    Args:
        installed: distribution → its version here; None: it is missing.
    """

    def is_missing(wheel: Wheel) -> bool:
        here = installed(wheel.name)
        return here is None or _numbers(here) < _numbers(wheel.version)

    return [wheel for wheel in wheels if wheel.name not in EXPECTED and is_missing(wheel)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def installed_version(name: str) -> str | None:
    """Return the version of a distribution of this Python; None: it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def install(folder: Path, target: Path) -> list[str]:
    """Install what is `wanted` of a folder of wheels into `target`, which PYTHONPATH then names first.

    Returns:
        "name version" of each.

    Raises:
        subprocess.CalledProcessError: pip fails, and has said why.
    """
    chosen = wanted(wheels_of(folder), installed_version)
    if chosen:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        pip += ["--disable-pip-version-check", "--target", str(target), *(str(wheel.path) for wheel in chosen)]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return [f"{wheel.name} {wheel.version}" for wheel in chosen]


def make(folder: Path) -> None:
    """Download the wheels of TAKEN for Python 3.12 on x86-64, and check that nothing is missing and all is small.

    Raises:
        SystemExit: a wheel needs what is neither expected nor taken along, or they are too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pinned = pins((ROOT / "constraints.txt").read_text())
    named = [f"{name}=={pinned[name]}" if name in pinned else name for name in TAKEN if name != "pydantic-core"]
    download(named, folder)
    (core,) = [
        need.replace(" ", "")
        for wheel in wheels_of(folder)
        if wheel.name == "pydantic"
        for need in wheel.needs
        if normal(need).startswith("pydantic-core")
    ]
    download([core], folder)  # pydantic names the one version that it works with
    wheels = wheels_of(folder)
    if lacking := missing_needs(wheels):
        raise SystemExit(f"{folder}: neither expected on the machine nor taken along: {', '.join(lacking)}")
    size = sum(wheel.path.stat().st_size for wheel in wheels)
    if size > LARGEST:
        raise SystemExit(f"{folder}: {size / 2**20:.0f} MiB of wheels; at most {LARGEST / 2**20:.0f} MiB may travel")
    print(f"{folder}: {len(wheels)} wheels, {size / 2**20:.1f} MiB")


def download(requirements: list[str], folder: Path) -> None:
    """Download wheels without what they need."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--disable-pip-version-check", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    subprocess.run([*pip, "--dest", str(folder), *requirements], check=True)


def pins(constraints: str) -> dict[str, str]:
    """Read the pinned versions of a constraints file."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return {normal(name): version for name, equals, version in (line.partition("==") for line in lines) if equals}


def missing_needs(wheels: Iterable[Wheel]) -> list[str]:
    """Return what wheels need and neither they nor EXPECTED have; needs of extras and other platforms don't count."""
    there = {wheel.name for wheel in wheels} | set(EXPECTED)
    found = {
        f"{need_name(need)} (of {wheel.name})"
        for wheel in wheels
        for need in wheel.needs
        if need_name(need) not in there and _applies(need)
    }
    return sorted(found)


def need_name(need: str) -> str:
    """Return the distribution that a requirement names."""
    return normal(re.match(r"[A-Za-z0-9._-]+", need)[0])  # type: ignore[index]


def _applies(need: str) -> bool:
    marker = need.partition(";")[2].strip()
    if not marker:
        return True
    from packaging.markers import Marker

    there: Mapping[str, str] = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
    return Marker(marker).evaluate({**there, "sys_platform": "linux", "platform_system": "Linux"})


def needs_of_the_package() -> set[str]:
    """Return the distributions that mindspeed_mm itself needs, with those of its Megatron and generation extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return {need_name(need) for need in (*project["dependencies"], *extras["megatron"], *extras["generation"])}
