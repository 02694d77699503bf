"""`python -m nnmpi.verify`: see `--help`."""

import sys

from nnmpi.comm.start import start
from nnmpi.verify.cli import main

if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:], start()) else 1)
