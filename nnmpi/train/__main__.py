"""`python -m nnmpi.train`: see `--help`."""

import sys

from nnmpi.comm.start import start
from nnmpi.train.cli import main

if __name__ == "__main__":
    main(sys.argv[1:], start())
