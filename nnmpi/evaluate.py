"""`python -m nnmpi.evaluate`: see `--help`."""

import sys

from nnmpi.trained.evaluate import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
