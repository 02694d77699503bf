"""`python -m nnmpi.train`: see `--help`."""

import sys

from nnmpi.backend.memory import keep_freed_memory
from nnmpi.train.cli import launch

if __name__ == "__main__":
    keep_freed_memory()
    launch(sys.argv[1:])
