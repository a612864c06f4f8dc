"""`mindspeed-mm export RUN OUT`: a checkpoint's weights in the hub's layout, by mm-convert."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm.tools import convert

_COMMAND = ("GenericDCPConverter", "dcp_to_hf")


def main(words: Sequence[str]) -> int:
    """Export a run folder or a checkpoint.

    Args:
        words: the run or its checkpoint, the folder to write, and the options of dcp_to_hf.

    Returns:
        the exit status.
    """
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        print("usage: mindspeed-mm export RUN OUT [options of mm-convert GenericDCPConverter dcp_to_hf]\n")
        return convert.main([*_COMMAND, "--help"])
    run, out, *options = words
    return convert.main([*_COMMAND, "--load_dir", run, "--save_dir", out, *options])
