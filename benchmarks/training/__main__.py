"""Starts the command: `python benchmarks/training --help`, and the README beside this file."""

import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from benchmarks.training.environment import clean  # noqa: E402

removed = clean(os.environ)  # must come before NumPy is loaded, so before everything else

from benchmarks.training.command import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of all that ends processes and removes folders
    sys.exit(main(sys.argv[1:], removed))
