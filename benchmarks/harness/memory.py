"""What a process holds in memory, as Linux counts it, and what a block of code takes.

Nothing here imports nnmpi: processes that train with PyTorch alone use it, too.
"""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def resident_bytes() -> int:
    """Return the resident size of this process now; 0 where the system does not say."""
    return _read("VmRSS")


def peak_bytes() -> int:
    """Return the largest resident size since the process began, or since `reset_peak`."""
    return _read("VmHWM")


def data_bytes() -> int:
    """Return the private writable memory of this process, which RLIMIT_DATA limits."""
    return _read("VmData")


def reset_peak() -> None:
    """Let the peak be counted anew from here on, where the system can do so."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _read(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)


class TracedBytes:
    """What a block of code took, in bytes, once it is over.

    Attributes:
        peak_bytes: the most at one time, above what there was before.
        kept_bytes: what was there after it, above what there was before.
    """

    peak_bytes = 0
    kept_bytes = 0


@contextmanager
def traced() -> Iterator[TracedBytes]:
    """Measure a block. NumPy tells tracemalloc of its arrays; MPI's own buffers are not seen."""
    gc.collect()
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    taken = TracedBytes()
    try:
        yield taken
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        taken.peak_bytes, taken.kept_bytes = peak - before, after - before
    finally:
        if started:
            tracemalloc.stop()
