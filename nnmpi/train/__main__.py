"""`nnmpi train`: see `--help`."""

import gc
import sys

gc.disable()  # imports leave no cycles to collect

from nnmpi.train.cli import launch  # noqa: E402

if __name__ == "__main__":
    gc.freeze()  # imported modules live to the end: keep the collector from scanning them
    gc.enable()
    launch(sys.argv[1:])
