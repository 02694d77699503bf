"""How many threads one rank's BLAS may use: one, unless the environment says otherwise.

Without this every rank's BLAS starts a thread for each core of the node, and the ranks starve one another: on busy
cores two threads took 5 to 50 times as long as one. One is also the same on every machine, so a repeated command
gives the same bits. The variables are read when the BLAS is loaded, so they must be set before NumPy is imported:
`nnmpi/__init__` does that under a launcher. Where NumPy came first, `nnmpi.comm.mpi.start` sets the running BLAS.
"""

import os
import sys
from collections.abc import Container, Mapping, MutableMapping
from pathlib import Path

from nnmpi.launcher import read_launch

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def user_chose_threads(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment sets the number of BLAS threads."""
    return any(name in environ for name in VARIABLES)


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process, and the user has not chosen the threads of its BLAS."""
    return read_launch(environ) is not None and not user_chose_threads(environ)


def limit_threads(environ: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> None:
    """Set the BLAS thread variables to 1 for a rank under a launcher, unless NumPy is loaded already."""
    if "numpy" not in loaded and is_rank(environ):
        environ.update(dict.fromkeys(VARIABLES, "1"))


def usable_cores() -> tuple[int, int]:
    """Return the cores that this process may use, and those that its launcher may use on this node.

    They differ when the launcher binds ranks to cores. Its own share is seen in the parent process, and a container's
    in the control group.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS: no binding to look at
        return (count := os.cpu_count() or 1), count
    own = len(os.sched_getaffinity(0))
    try:
        node = max(own, len(os.sched_getaffinity(os.getppid())))
    except OSError:  # the parent has ended, or is another user's
        node = own
    limit = _quota()
    return min(own, limit), min(node, limit)


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the whole cores that the control group grants (at least 1), or a large number where it sets no limit."""
    try:
        quota, period = path.read_text().split()[:2]
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or the word "max"
        return sys.maxsize
