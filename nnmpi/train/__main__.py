"""`nnmpi train`: see `--help`. It begins on MPI's ranks (--ranks starts them) or simulated ones."""

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

if __name__ == "__main__":
    gc.disable()  # imports leave no cycles to collect

from nnmpi.base.command import watch_alone  # noqa: E402
from nnmpi.base.errors import HelpAsked  # noqa: E402
from nnmpi.comm.ranks import run_on_ranks  # noqa: E402
from nnmpi.train.cli import RANKS, main, parse, rank_command  # noqa: E402
from nnmpi.train.loop import StopSignals  # noqa: E402


def launch(words: Sequence[str]) -> None:
    """Train on MPI's ranks, or with --simulate on simulated ranks.

    Raises:
        NnmpiError: see `run_on_ranks` and `main`.
    """

    def simulation() -> dict[str, Any]:
        config = parse(words)
        sync = config.sync
        return {
            "ranks": sync.simulate,
            "machine": sync.machine,
            "seed": config.run.seed,
            "cpu_factor": 0.0 if sync.slowness(0).minimum_s else 1.0,
        }

    if any(word.partition("=")[0] in RANKS for word in words):
        watch_alone()
        with suppress(HelpAsked):  # `run_on_ranks` prints it
            if command := rank_command(words):
                # Open MPI's mpirun passes SIGTERM on, and the ranks save; else it kills them
                os.environ.setdefault("PRTE_MCA_ess_base_forward_signals", "15")
                os.execv(command[0], command)
    run_on_ranks(words, main, simulation, StopSignals)


if __name__ == "__main__":
    gc.freeze()  # imported modules live to the end: keep the collector from scanning them
    gc.enable()
    launch(sys.argv[1:])
