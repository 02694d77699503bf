"""The launcher's environment variables: rank and size before MPI starts, and BLAS threads.

Nothing here needs MPI. Rank and size are read before MPI is loaded, and compared with MPI's: an MPI
library of a different kind from the launcher's reports a size of 1.

A rank's BLAS gets one thread unless the environment sets another number. Otherwise every rank's
BLAS starts a thread per core of the node, and the ranks starve one another: on busy cores two
threads took 5 to 50 times as long as one. With one thread on every machine, a repeated command also
gives the same bits. BLAS reads the variables when it is loaded, so they must be set before NumPy is
imported: `nnmpi/__init__` does that under a launcher. If NumPy is loaded already, or without a
launcher, `nnmpi.comm.mpi.start` sets the number of threads of the loaded BLAS.
"""

import math
import os
import re
import sys
import time
from collections.abc import Container, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nnmpi.base.errors import LaunchError, raised_as

TORCHRUN = "torchrun"
# Name; variables of size, rank, ranks on this node, and the node's number.
# The innermost launcher is first: Open MPI's mpirun starts its daemons by srun, and its ranks
# inherit srun's variables. Slurm's variables are those of a job step: a batch script, which runs
# plain python serially, has SLURM_NTASKS, too.
LAUNCHERS = (
    (
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    ("MPICH's mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", ""),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    # starts processes without MPI: known, so that they are refused and do not train each alone
    (TORCHRUN, "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", ""),
)


@dataclass(frozen=True)
class Launch:
    """A process's rank, as set by its launcher.

    Attributes:
        name: of the launcher, such as "Open MPI's mpirun".
        size: the number of ranks.
        rank: of the process.
        local_size: the number of ranks on its node; None if the launcher does not set it.
    """

    name: str
    size: int
    rank: int
    local_size: int | None


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch of an environment; None without a known launcher."""
    for name, *others, here, node in LAUNCHERS:
        size, rank = (_number(environ, other) for other in others)
        if here not in environ and "SLURM_PROCID" in environ and not node:
            continue  # `srun --mpi=pmi2` sets PMI_RANK as MPICH's mpirun does
        if name == TORCHRUN and size == 1:
            continue  # a single process, whose variables programs of PyTorch set themselves
        if size is not None and rank is not None:
            return Launch(
                name, size, rank, _tasks_here(environ.get(here, ""), _number(environ, node) or 0)
            )
    return None


def start_words(ranks: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return how this process's launcher starts some ranks: "mpirun -n 4"."""
    launch = read_launch(environ)
    return f"{'srun' if launch is not None and launch.name == 'srun' else 'mpirun'} -n {ranks}"


def python_words() -> list[str]:
    """Return the words that start another Python, without the current folder's modules.

    -P keeps the folder off the path of modules. In a checkout that is not installed the folder is
    where nnmpi itself is found, so there it stays.
    """
    with suppress(OSError):  # the folder is gone
        if Path(__file__).resolve().parents[2] == Path.cwd():
            return [sys.executable]
    return [sys.executable, "-P"]


def make_temporary_folder() -> str:
    """Make and return a folder in the one that Open MPI takes for its temporary files.

    Raises:
        LaunchError: when it cannot be written, of which Open MPI itself would die.
    """
    chosen = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    folder = os.environ.get(chosen, "/tmp")
    with raised_as(
        LaunchError,
        f"MPI's temporary folder, {chosen and f'{chosen}='}{folder}, cannot be written",
        "set TMPDIR to a folder that can",
    ):
        os.makedirs(folder, exist_ok=True)  # Open MPI would make it, too
        own = os.path.join(folder, f"nnmpi-{os.getpid()}-{time.time_ns()}")
        os.mkdir(own, 0o700)
    return own


def check_temporary_folder() -> None:
    """Refuse to start Open MPI where it can write no temporary files: see above."""
    os.rmdir(make_temporary_folder())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _tasks_here(text: str, node: int) -> int | None:
    """Return a node's tasks from a number or from Slurm's list: "4(x2),3" means 4, 4 and 3."""
    before, here = 0, None
    for word in text.split(","):
        result = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if result is None:
            return None
        nodes = int(result[2] or 1)
        if before <= node < before + nodes:
            here = int(result[1])
        before += nodes
    return here


VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def user_chose_threads(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment sets the number of BLAS threads."""
    return any(name in environ for name in VARIABLES)


def limit_threads(
    environ: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules
) -> None:
    """Set BLAS threads to 1 for a launched rank, unless NumPy is loaded already."""
    if "numpy" not in loaded and read_launch(environ) and not user_chose_threads(environ):
        environ.update(dict.fromkeys(VARIABLES, "1"))


def set_home(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set HOME, without which Open MPI's mpirun does not start, to the user's or /tmp."""
    if "HOME" not in environ:
        home = os.path.expanduser("~")  # by the user's number
        environ["HOME"] = home if os.path.isabs(home) else "/tmp"


def usable_cores() -> tuple[int, int]:
    """Return the numbers of cores on this node that this process and its launcher may use.

    They differ if the launcher binds ranks to cores. The launcher's number is that of the parent
    process's affinity. A container's quota limits both.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS has no affinity
        return (count := os.cpu_count() or 1), count
    limit = _quota()
    return min(len(os.sched_getaffinity(0)), limit), min(len(_processors()), limit)


def _processors() -> set[int]:
    """Return the numbers of the processors that this process or its launcher may use."""
    result = os.sched_getaffinity(0)
    with suppress(OSError):  # the parent has ended or belongs to another user
        result |= os.sched_getaffinity(os.getppid())
    return result


TICKS_PER_S = 100  # of /proc/stat
TOPOLOGY = Path("/sys/devices/system/cpu")


def idle_cores(pause_s: float = 0.05) -> int:
    """Return the number of usable cores on which nothing computes while this process sleeps.

    A core's hardware threads count as one, as a launcher counts: their ranks would share its units
    for products. Where the system has no /proc, all are taken for idle.
    """
    try:
        before = _idle_ticks()
        time.sleep(pause_s)
        ticks = _idle_ticks()
        is_idle = dict[str, bool]()
        for number in _processors():
            name = f"cpu{number}"
            file = TOPOLOGY / name / "topology/thread_siblings_list"
            core = file.read_text() if file.exists() else name
            idle = ticks[name] - before[name] > pause_s * TICKS_PER_S / 2
            is_idle[core] = idle and is_idle.get(core, True)
    except OSError:
        return usable_cores()[1]
    return min(sum(is_idle.values()), _quota())


def _idle_ticks() -> dict[str, int]:
    rows = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    return {row[0]: int(row[4]) + int(row[5]) for row in rows if row[0].startswith("cpu")}


def describe_idle(command: str, ranks: int = 1, replica: int = 1, most: float = math.inf) -> str:
    """Return which cores stand idle beside ranks that all sleep, and what would use them, or "".

    Args:
        command: with {} for the number of ranks.
        ranks: of this job, all on this node.
        replica: ranks per replica of the model.
        most: replicas.
    """
    threads = max([1, *(_number(os.environ, name) or 1 for name in VARIABLES)])
    cores = idle_cores()
    more, idle = min(cores // threads // replica, most) * replica, cores - ranks * threads
    if more <= ranks:
        return ""
    return f"{idle} of {cores} cores idle; to use more: {command.format(more)}"


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the control group's cores, rounded down to at least 1; a large number for no limit."""
    try:
        quota, period = path.read_text().split()[:2]
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or the word "max"
        return sys.maxsize
