"""`python -m nnmpi.evaluate`: see `--help`."""

import sys

from nnmpi.trained.evaluate import main, parse
from nnmpi.trained.options import launch

if __name__ == "__main__":
    launch(sys.argv[1:], parse, main)
