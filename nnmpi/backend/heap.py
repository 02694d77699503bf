"""Keeping freed memory in the process instead of giving it back to the kernel after every step.

A training step frees arrays of megabytes and asks for them again a moment later. glibc by default maps each such array
afresh, and the kernel then zeroes it page by page: a quarter of a convolutional network's step.
"""

import ctypes
import sys

# Numbers of glibc's malloc.h. The mapping threshold cannot be set above 32 MiB.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell malloc to keep what is freed, for arrays of up to 32 MiB; return whether it listens (glibc alone does).

    The process then holds on to the most memory that it ever used.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    settings = ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20), (_MMAP_THRESHOLD, 32 * 2**20))
    return all(bool(mallopt(ctypes.c_int(name), ctypes.c_int(value))) for name, value in settings)
