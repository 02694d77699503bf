"""Run a program on MPI's ranks, or on simulated ones: how every command with ranks begins."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from nnmpi.base.command import Console, watch_alone
from nnmpi.base.errors import HelpAsked, UsageError
from nnmpi.base.launcher import read_launch
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.shutdown import exit_refused
from nnmpi.comm.mpi.start import start
from nnmpi.comm.world import LIMIT_S, WARNING_S

T = TypeVar("T")

EXIT_LIMIT_S = 60.0  # all ranks end together: a rank that exits this long before others has failed


def parse_together(
    words: Sequence[str], parse: Callable[[Sequence[str]], T], group: Group
) -> tuple[Console, T]:
    """Return rank 0's console and the parsed command line. Collective.

    Raises:
        NnmpiError: of `parse`, on all ranks.
    """
    with agreed(group):
        return Console(quiet=not group.is_root), parse(words)


def run_on_ranks(
    words: Sequence[str],
    program: Callable[[Sequence[str], Group], Any],
    simulation: Callable[[], dict[str, Any]] = lambda: {"ranks": 0},
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Call program(words, group) on MPI's ranks, or with --simulate on simulated ranks.

    One rank prints requested help.

    Args:
        words: of the command line.
        program: to run; its result is returned.
        simulation: returns the arguments of `simulate`; with 0 ranks, MPI's are used.
        around: a context around simulated ranks.

    Raises:
        LaunchError, UsageError: of `comm.mpi.start.start`, and for --simulate under mpirun.
        NnmpiError: of the program.
    """
    launch = read_launch(os.environ)
    quiet = launch is not None and launch.rank > 0
    try:
        if any(word.partition("=")[0] == "--simulate" for word in words):
            watch_alone()
            options = simulation()
            if options["ranks"]:
                if launch is not None and launch.size > 1:
                    raise UsageError(
                        f"--simulate runs all ranks in one process, and {launch.name} has started"
                        f" {launch.size}"
                    )
                # imported here: MPI's ranks start without it
                from nnmpi.comm.simulated.simulated_world import simulate

                with around(), exit_refused():
                    return simulate(partial(program, words), **options)
        group = start(None if "NNMPI_EXIT_LIMIT_S" in os.environ else EXIT_LIMIT_S)
        quiet = not group.is_root
        group.comm.world.watch(WARNING_S, LIMIT_S)  # from here on, a deadlock ends the job
        with exit_refused():
            return program(words, group)
    except HelpAsked as request:
        return Console(quiet).finish(str(request))
