"""Imported first by entry scripts: what they import then is there to stay.

Garbage collection while several thousand modules are imported finds nothing and costs a tenth of the start. `pretrain`
turns it on again when the first step is due.
"""

import gc

gc.disable()
