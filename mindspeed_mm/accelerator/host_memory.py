"""Memory of the host that training frees stays with the process, for the next step.

glibc gives the system back what a step frees at the end of the heap, and gets it anew, page by page and zeroed, in the
next one: 5 % to 20 % of the time of a step, most where several threads do so. glibc's own limits grow up to 32 MiB for
a buffer and 64 MiB for the heap's end (mallopt(3)); these are the same for buffers, and larger for the end.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of malloc.h."""
_LARGEST_BUFFER = 32 * 2**20
"""Larger ones have pages of their own from the system; glibc takes no higher limit."""
_KEPT = 2**30
_STEP = 64 * 2**20
_STATED = "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep up to 1 GiB of freed memory at the end of its heap, and return whether it does.

    It doesn't without glibc, or where the environment states how memory is allocated (MALLOC_… and GLIBC_TUNABLES of
    glibc, or another allocator by LD_PRELOAD).
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(_STATED) for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_THRESHOLD, _LARGEST_BUFFER), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _STEP))
    return all(bool(mallopt(name, value)) for name, value in settings)
