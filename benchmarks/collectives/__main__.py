"""`mpirun -n P python benchmarks/collectives`: see `--help`, and the README beside this file."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from nnmpi.comm.start import start  # noqa: E402

if __name__ == "__main__":
    group = start()
    from benchmarks.collectives.command import main  # it imports mpi4py.MPI, which `start` must have loaded by then

    main(sys.argv[1:], group)
