"""`python -m nnmpi.train`: see `--help`."""

import gc
import sys

from nnmpi.backend.memory import keep_freed_memory
from nnmpi.train.cli import launch

if __name__ == "__main__":
    gc.freeze()  # what has been imported stays: no search for cycles need pass over it
    keep_freed_memory()
    launch(sys.argv[1:])
