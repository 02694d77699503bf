"""The variables under which everything is measured: the BLAS finds out the processor itself and has one thread."""

from collections.abc import MutableMapping

# Some machines set these for all programs. OpenBLAS then computes for a processor that is not there.
PINS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# What an experienced user of PyTorch sets: memory that was freed stays in the process.
TUNED_MALLOC = (("MALLOC_MMAP_THRESHOLD_", "1000000000"), ("MALLOC_TRIM_THRESHOLD_", "4000000000"))


def clean(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the pins, set one thread, forget settings of malloc; return the pins that were there."""
    removed = {name: environ.pop(name) for name in PINS if name in environ}
    for name, _ in TUNED_MALLOC:
        environ.pop(name, None)
    environ.update(dict.fromkeys(THREADS, "1"))
    return removed
