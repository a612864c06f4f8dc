"""`from megatron.training import get_args`, with and without Megatron-LM, and the global arguments."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_mm.configs.global_args import destroy_args, get_args, set_args

ROOT = Path(__file__).resolve().parents[3]

COMMON = """
import sys
from argparse import Namespace
import mindspeed_mm
from mindspeed_mm.configs import global_args
args = Namespace(x=1)
"""


def run(code: str, *path: Path, isolated: bool = False) -> None:
    """Run code in a fresh interpreter; `isolated` hides the installed packages (so there is no megatron at all)."""
    prelude = f"import sys; sys.path[:0] = {[str(ROOT), *map(str, path)]!r}\n"
    flags = ["-I", "-S"] if isolated else ["-I"]
    done = subprocess.run(
        [sys.executable, *flags, "-c", prelude + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_set_and_get() -> None:
    args = Namespace(x=1)
    set_args(args)
    assert get_args() is args
    destroy_args()
    with pytest.raises(RuntimeError, match="before the arguments were read"):
        get_args()


def test_stand_in_beside_megatron_core() -> None:
    run(
        COMMON
        + """
from megatron.training import get_args, set_args
import megatron.training, megatron.training.global_vars
global_args.set_args(args)
assert get_args() is args and megatron.training.global_vars.get_args() is args
set_args(Namespace(x=2))
assert global_args.get_args().x == 2
assert "Stand-in" in megatron.training.__doc__
assert not {"megatron.core", "torch"} & set(sys.modules)
import importlib.util
assert importlib.util.find_spec("megatron.core").origin.endswith("__init__.py")
assert importlib.util.find_spec("megatron.legacy") is None
mindspeed_mm.megatron_standin.install()
assert sum(type(f).__name__ == "_StandInFinder" for f in sys.meta_path) == 1
"""
    )


def test_stand_in_without_any_megatron() -> None:
    run(
        COMMON
        + """
from megatron.training import get_args
global_args.set_args(args)
assert get_args() is args
try:
    import megatron.core
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("megatron.core came from nowhere")
try:
    from megatron.training import pretrain
except ImportError:
    pass
else:
    raise SystemExit("the stand-in offers more than it says")
""",
        isolated=True,
    )


def megatron_lm(folder: Path) -> Path:
    """A folder with the part of Megatron-LM's package that matters here."""
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .global_vars import get_args\nREAL = True\n")
    (package / "global_vars.py").write_text(
        "_GLOBAL_ARGS = None\n\ndef get_args():\n    assert _GLOBAL_ARGS is not None\n    return _GLOBAL_ARGS\n"
    )
    return folder


def test_megatron_lms_own_global_is_told(tmp_path: Path) -> None:
    run(
        COMMON
        + """
global_args.set_args(args)
import megatron.training
assert megatron.training.REAL and megatron.training.get_args() is args
global_args.set_args(Namespace(x=3))
assert megatron.training.get_args().x == 3
global_args.destroy_args()
try:
    megatron.training.get_args()
except AssertionError:
    pass
else:
    raise SystemExit("destroyed arguments live on")
assert "torch" not in sys.modules
""",
        megatron_lm(tmp_path),
    )


def test_megatron_lm_imported_before_us(tmp_path: Path) -> None:
    run(
        "import megatron.training\n"
        + COMMON
        + "global_args.set_args(args)\nassert megatron.training.get_args() is args\n",
        megatron_lm(tmp_path),
    )
