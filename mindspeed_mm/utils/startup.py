"""Imported first by entry scripts: turns garbage collection off while they import.

It would find nothing among several thousand modules and cost a tenth of the start. `pretrain` turns it on again before
the first step. Ctrl-C meanwhile ends the process with one line.
"""

import gc

import mindspeed_mm.utils.interrupted  # noqa: F401

gc.disable()
