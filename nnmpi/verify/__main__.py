"""`python -m nnmpi.verify`: see `--help`."""

import sys

from nnmpi.comm.start import start

if __name__ == "__main__":
    group = start()
    from nnmpi.verify.cli import main  # imports mpi4py.MPI, which would initialise itself before `start` could

    sys.exit(0 if main(sys.argv[1:], group) else 1)
