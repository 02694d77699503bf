"""`python -m nnmpi.predict`: see `--help`."""

import sys

from nnmpi.trained.predict import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
