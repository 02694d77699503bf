"""`python -m nnmpi.predict`: see `--help`."""

import sys

from nnmpi.trained.options import launch
from nnmpi.trained.predict import main, parse

if __name__ == "__main__":
    launch(sys.argv[1:], parse, main)
