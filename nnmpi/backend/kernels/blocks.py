"""Blocks of rows that stay in a processor's cache while several passes run over them.

A pass over megabytes costs what memory costs, a pass over a block that lies in the cache a quarter of that. On a
device, where each call costs more than it computes, everything is one block.
"""

import numpy as np

from nnmpi.backend.array import Array

# A block of that many float32, its results and its scratch fit into 1 MiB, the smallest L2 cache of server processors.
ELEMENTS = 2**16


def row_blocks(rows: Array) -> list[slice]:
    """Return slices that cover the first axis, at least one; those of an empty array are empty."""
    count = len(rows)
    if type(rows) is not np.ndarray or rows.size <= ELEMENTS:
        return [slice(0, count)]
    step = max(1, ELEMENTS * count // rows.size)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
