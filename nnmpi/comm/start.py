"""Starting MPI: once, with the right number of threads, and so that one rank's failure ends the job for all.

After `start` MPI is up, exceptions and exits are watched, and BLAS has its threads.
"""

import atexit
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType

import threadpoolctl

from nnmpi.comm.group import Group
from nnmpi.comm.mpi.library import load_mpi
from nnmpi.comm.mpi.shutdown import Shutdown, describe_uncaught
from nnmpi.command import printable
from nnmpi.errors import LaunchError, UsageError
from nnmpi.launcher import read_launch
from nnmpi.threads import is_rank

EXIT_LIMIT_S = 600.0
SILENT_S = 3.0


def start(exit_limit_s: float | None = None) -> Group:
    """Start MPI and return the group of all ranks; a second call returns the same group. Collective.

    From then on an uncaught exception on one rank ends the whole job, with that rank's traceback (for nnmpi's own
    errors: their sentence) printed once. `sys.exit(status)` on one rank does not: raise an exception instead. See
    `nnmpi.comm.mpi.shutdown` for what is covered.

    Args:
        exit_limit_s: how long a rank that ended its program waits for the others before it ends the job. None leaves
            it as it is: the environment's NNMPI_EXIT_LIMIT_S, or else ten minutes; `math.inf` is for ever.

    Raises:
        LaunchError: when there is no MPI library, or when the launcher started several processes that MPI does not
            know as one job. Only the launcher's rank 0 raises; the others end silently with the same status.
        UsageError: for a limit that is not a positive number.
    """
    group, shutdown = _start()
    if exit_limit_s is not None:
        shutdown.limit_s = _check_limit(exit_limit_s)
    return group


@functools.cache
def _start() -> tuple[Group, Shutdown]:
    """Do what `start` does, the first time."""
    watch_alone()
    limit_s = read_limit(os.environ)
    try:
        mpi = load_mpi(os.environ)
    except LaunchError as error:
        _silence_all_but_rank_0(error)
        raise
    from nnmpi.comm.mpi.mpi_world import mpi_world  # imports mpi4py.MPI, which must have been loaded by then

    _limit_running_blas()
    world = mpi_world()
    shutdown = Shutdown(mpi, limit_s, world)
    if world.comm.size > 1:
        sys.excepthook = shutdown.on_exception
        threading.excepthook = shutdown.on_thread_exception
        atexit.register(shutdown.on_end)
        if mpi.Query_thread() >= mpi.THREAD_MULTIPLE:
            shutdown.close = world.watch_over_ranks()
    group = Group(world.comm)
    return group, shutdown


def read_limit(environ: Mapping[str, str]) -> float | None:
    """Return NNMPI_EXIT_LIMIT_S in seconds, ten minutes without it; None for no limit.

    Raises:
        UsageError: when it is not a positive number.
    """
    text = environ.get("NNMPI_EXIT_LIMIT_S", str(EXIT_LIMIT_S))
    try:
        return _check_limit(float(text))
    except ValueError as error:
        raise UsageError(f"NNMPI_EXIT_LIMIT_S is {text!r}; give a positive number of seconds, or inf") from error


def _check_limit(limit_s: float) -> float | None:
    if not limit_s > 0:
        raise UsageError(f"an exit limit of {limit_s} s is not positive; give seconds, or inf for none")
    return None if math.isinf(limit_s) else limit_s


def watch_alone() -> None:
    """Let an uncaught exception of this process, which has no others, end it with its sentence and exit status."""
    sys.excepthook = _failed_alone


def _failed_alone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a single process as `Shutdown.on_exception` ends a rank: the `sys.excepthook` while there are no others."""
    status, text = describe_uncaught(kind, error, trace)
    if text:
        sys.stderr.write(printable(text) + "\n")
    raise SystemExit(status)


def _silence_all_but_rank_0(error: LaunchError) -> None:
    """End this process, unless it is the launcher's rank 0.

    It ends a little later than it could: the launcher ends the whole job with the first process, and rank 0 must have
    printed the error by then.
    """
    launch = read_launch(os.environ)
    if launch is not None and launch.rank > 0:
        time.sleep(SILENT_S)
        raise SystemExit(error.exit_status)


def _limit_running_blas() -> None:
    """Set the threads of a BLAS that was loaded before nnmpi could set the variables that it reads."""
    if is_rank():
        threadpoolctl.threadpool_limits(limits=1, user_api="blas")
