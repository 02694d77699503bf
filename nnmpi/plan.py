"""`python -m nnmpi.plan`: see `--help`."""

import sys

from nnmpi.train.planning import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
