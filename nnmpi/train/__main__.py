"""`python -m nnmpi.train`: see `--help`."""

import sys

from nnmpi.backend.memory import keep_freed_memory
from nnmpi.comm.start import start
from nnmpi.train.cli import main

if __name__ == "__main__":
    keep_freed_memory()
    main(sys.argv[1:], start())
