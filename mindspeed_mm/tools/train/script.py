"""What a rank of `mindspeed-mm train SCRIPT …` runs: the script as Python would, its own faults as sentences."""

import os
import runpy
import sys

from mindspeed_mm.launch import errors_as_sentences


def run_script(path: str) -> None:
    """Run a script as `__main__`, with its folder in front of the places where modules are looked for.

    Args:
        path: the script; `sys.argv` begins with it.
    """
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    with errors_as_sentences():
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    del sys.argv[0]
    run_script(sys.argv[0])
