"""`python -m nnmpi.train`: see `--help`."""

import sys

from nnmpi.backend.memory import keep_freed_memory
from nnmpi.comm.start import start

if __name__ == "__main__":
    keep_freed_memory()
    group = start()
    from nnmpi.train.cli import main  # imports mpi4py.MPI, which would initialise itself before `start` could

    main(sys.argv[1:], group)
