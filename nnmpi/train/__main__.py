"""`nnmpi train`: see `--help`."""

import gc
import sys

from nnmpi.base.early import explain_signals

if __name__ == "__main__":
    explain_signals()  # before the slow imports: `python -m nnmpi.train`, as launchers start it

gc.disable()  # imports leave no cycles to collect

from nnmpi.train.cli import launch  # noqa: E402

if __name__ == "__main__":
    gc.freeze()  # imported modules live to the end: keep the collector from scanning them
    gc.enable()
    launch(sys.argv[1:])
