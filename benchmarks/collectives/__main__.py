"""`mpirun -n P python benchmarks/collectives`: see `--help`, and the README beside this file."""

import sys
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.collectives.command import main  # noqa: E402
from nnmpi.comm.mpi.start import start  # noqa: E402

if __name__ == "__main__":
    main(sys.argv[1:], start())
