"""`python -m nnmpi.export`: see `--help`."""

import sys

from nnmpi.trained.export import main, parse
from nnmpi.trained.options import launch

if __name__ == "__main__":
    launch(sys.argv[1:], parse, main)
