"""Starts the command: `python benchmarks/efficiency --help`, and the README beside this file."""

import sys
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.efficiency.parts import EFFICIENCY  # noqa: E402

if __name__ == "__main__":
    sys.exit(EFFICIENCY.main())
