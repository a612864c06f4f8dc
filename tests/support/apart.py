"""torchao, which `scripts/common.sh` installs apart from the rest: transformers would import it in every process."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspeed_mm
from mindspeed_mm.utils.extras import is_installed

TORCHAO = Path(mindspeed_mm.__file__).parents[1] / ".venv" / "torchao"


def find_torchao() -> None:
    """Let this process find torchao from now on: a process for a test alone.

    Raises:
        ModuleNotFoundError: it is neither installed nor in the folder.
    """
    if is_installed("torchao"):
        return
    if not TORCHAO.is_dir():
        raise ModuleNotFoundError(f"there is no torchao, and no '{TORCHAO}': scripts/test.sh makes it")
    sys.path.append(str(TORCHAO))
