"""Imported first by entry scripts: what they import then is there to stay.

Garbage collection while several thousand modules are imported finds nothing and costs a tenth of the start. `pretrain`
turns it on again when the first step is due. Ctrl-C meanwhile ends the process with one line.
"""

import gc

import mindspeed_mm.utils.interrupted  # noqa: F401

gc.disable()
