"""How many threads one rank's BLAS may use: the node's cores divided by the ranks on it.

Without this every rank's BLAS starts a thread for each core of the node, and the ranks starve one another. The
variables are read when the BLAS is loaded, so they must be set before NumPy is imported: `nnmpi/__init__` does that.
Where NumPy came first, `nnmpi.comm.start` sets the running BLAS instead.
"""

import os
import sys
from collections.abc import Container, Mapping, MutableMapping
from pathlib import Path

from nnmpi.launcher import read_launch

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads(
    environ: MutableMapping[str, str] = os.environ,
    loaded: Container[str] = sys.modules,
    cores: tuple[int, int] | None = None,
) -> int | None:
    """Set the BLAS thread variables for a rank under a launcher; return the number set, or None for nothing done.

    Nothing is done without a launcher, where the user has set one of the variables, and once NumPy is loaded.

    Args:
        environ: the variables to read and set.
        loaded: the names of the modules that are loaded.
        cores: what `usable_cores()` gives, when it is known already.
    """
    if "numpy" in loaded:
        return None
    threads = rank_threads(environ, cores)
    if threads is not None:
        environ.update(dict.fromkeys(VARIABLES, str(threads)))
    return threads


def rank_threads(environ: Mapping[str, str], cores: tuple[int, int] | None = None) -> int | None:
    """Return the threads that this rank should use, or None when there is no launcher or the user has chosen."""
    launch = read_launch(environ)
    if launch is None or launch.local_size is None or any(name in environ for name in VARIABLES):
        return None
    own, node = cores or usable_cores()
    return min(own, max(1, node // launch.local_size))


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
