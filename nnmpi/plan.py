"""`python -m nnmpi.plan`: see `--help`."""

import sys

from nnmpi.backend.memory import keep_freed_memory
from nnmpi.train.plan_command import launch

if __name__ == "__main__":
    keep_freed_memory()  # as the train command does, whose steps are predicted
    launch(sys.argv[1:])
