"""Starts the command: `python benchmarks/training --help`, and the README beside this file."""

import os
import signal
import sys
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.training.contestants import PINS, TUNED_MALLOC  # noqa: E402

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Before the first import of NumPy: its BLAS detects the processor when it is loaded.
removed = {name: os.environ.pop(name) for name in PINS if name in os.environ}
for name in TUNED_MALLOC:
    os.environ.pop(name, None)
os.environ.update(dict.fromkeys(THREADS, "1"))

from benchmarks.training.command import main  # noqa: E402

if __name__ == "__main__":
    # exit through the cleanup of processes and folders
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:], removed))
