"""The launcher's (mpirun's, srun's) facts about this process, from environment variables.

Nothing here needs MPI: it is read before MPI is loaded, and to notice an MPI that does not know of
its launcher.

How many threads one rank's BLAS may use: one, unless the environment says otherwise.

Without this every rank's BLAS starts a thread for each core of the node, and the ranks starve one
another: on busy cores two threads took 5 to 50 times as long as one. One is also the same on every
machine, so a repeated command gives the same bits. The variables are read when the BLAS is loaded,
so they must be set before NumPy is imported: `nnmpi/__init__` does that under a launcher. Where
NumPy came first, and without a launcher, `nnmpi.comm.mpi.start` sets the running BLAS.
"""

import os
import re
import sys
from collections.abc import Container, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The innermost launcher comes first: Open MPI's mpirun starts its daemons by srun, whose variables
# its ranks inherit. For Slurm only the variables of a step count: a batch script has SLURM_NTASKS
# too, and runs plain python serially.
# name; the variables of the number of ranks, the own one, the ranks on this node, the node's number
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
)


@dataclass(frozen=True)
class Launch:
    """This process's place as its launcher sees it.

    Attributes:
        name: the launcher as text, such as "Open MPI's mpirun".
        size: processes that were started together.
        rank: the number of this one.
        local_size: how many of them are on this node; None where the launcher does not say.
    """

    name: str
    size: int
    rank: int
    local_size: int | None


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launcher's facts; None if no known launcher started this process."""
    for name, *others, here, node in LAUNCHERS:
        size, rank = (_number(environ, other) for other in others)
        if size is not None and rank is not None:
            return Launch(
                name, size, rank, _tasks_here(environ.get(here, ""), _number(environ, node) or 0)
            )
    return None


def launch_of(process: int) -> Launch | None:
    """Return the launcher's facts about another process of this node; None if it has ended."""
    with suppress(OSError):
        entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        return read_launch(
            dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)
        )
    return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable as an integer, or None when it is not there or is no
    number.
    """
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _tasks_here(text: str, node: int) -> int | None:
    """Return the tasks on one node from a number or from Slurm's list: "4(x2),3" means 4, 4 and 3
    tasks.
    """
    counts: list[int] = []
    for word in text.split(","):
        result = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if result is None:
            return None
        counts += [int(result[1])] * int(result[2] or 1)
    return counts[node] if node < len(counts) else None


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


def usable_cores() -> tuple[int, int]:
    """Return the cores that this process may use, and those that its launcher may use on this node.

    They differ when the launcher binds ranks to cores. Its own share is seen in the parent process,
    and a container's in the control group.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS: no binding to look at
        return (count := os.cpu_count() or 1), count
    local = len(os.sched_getaffinity(0))
    try:
        node = max(local, len(os.sched_getaffinity(os.getppid())))
    except OSError:  # the parent has ended, or is another user's
        node = local
    limit = _quota()
    return min(local, limit), min(node, limit)


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the whole cores that the control group grants (at least 1), or a large number where it
    sets no limit.
    """
    try:
        quota, period = path.read_text().split()[:2]
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or the word "max"
        return sys.maxsize
