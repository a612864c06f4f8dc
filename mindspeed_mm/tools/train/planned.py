"""The command `mindspeed-mm dry-run WHAT [its words]`: what `mindspeed-mm train` would train, without devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from mindspeed_mm.tools.train.target import find_target
from mindspeed_mm.utils.errors import ConfigError


def main(words: Sequence[str]) -> int:
    """Print one JSON object about a launch; its `--world-size` is the number of processes.

    Args:
        words: as after `mindspeed-mm train`, without torchrun's options.

    Returns:
        the exit status: 1 for a launch that is refused.

    Raises:
        ConfigError: the words name no launch, or a launch script, whose launch is only known once bash has run it.
    """
    if not words or words[0] in ("-h", "--help"):
        print("usage: mindspeed-mm dry-run WHAT [its words] [--world-size N]\n\nWHAT: as of mindspeed-mm train")
        return 0 if words else 2
    target = find_target(words[0], words[1:])
    if target.bash is not None:
        raise ConfigError(
            f"mindspeed-mm dry-run: '{target.bash}' is a launch script; put --dry-run after the flags of its entry "
            "script, and start it by mindspeed-mm train --nproc-per-node 1"
        )
    size = ["--world-size", str(target.processes)] if target.processes and "--world-size" not in words else []
    return subprocess.run(
        [sys.executable, *target.words, "--dry-run", *size], cwd=target.folder, check=False
    ).returncode
