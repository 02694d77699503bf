"""How much memory NumPy and Python took for something: the most, and what is left of it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


class Taken:
    """What a block of code took, in bytes, once it is over.

    Attributes:
        peak_bytes: the most at one time, above what there was before.
        kept_bytes: what was there after it, above what there was before.
    """

    peak_bytes = 0
    kept_bytes = 0


@contextmanager
def traced() -> Iterator[Taken]:
    """Measure a block. NumPy tells tracemalloc of its arrays; MPI's own buffers are not seen."""
    gc.collect()
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    taken = Taken()
    try:
        yield taken
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        taken.peak_bytes, taken.kept_bytes = peak - before, after - before
    finally:
        if started:
            tracemalloc.stop()
