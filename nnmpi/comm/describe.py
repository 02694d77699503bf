"""What runs here, in words, for headers and reports: the MPI, the nodes, the BLAS and its threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import threadpoolctl

from nnmpi.backend.blas import find_older
from nnmpi.comm.group import Group


@dataclass(frozen=True)
class Description:
    """The machinery under a run.

    Attributes:
        mpi: the MPI library and its version, such as "Open MPI 5.0.11".
        ranks: processes in the group.
        nodes: machines that they run on.
        blas: the BLAS that NumPy uses, such as "openblas 0.3.30 (SkylakeX)".
        threads: the threads that it uses in each rank.
        warnings: sentences about what makes this run slower than it need be.
    """

    mpi: str
    ranks: int
    nodes: int
    blas: str
    threads: int
    warnings: tuple[str, ...]


def describe(group: Group) -> Description:
    """Return what runs on this rank, and the ranks and nodes of the group. Collective."""
    on_node = group.node()
    nodes = sum(group.gather(int(on_node.is_root)))
    on_node.free()
    pool = blas_pool(threadpoolctl.threadpool_info())
    warning = find_older()
    return Description(
        mpi=group.comm.world.library,
        ranks=group.size,
        nodes=nodes,
        blas=name_blas(pool),
        threads=int(pool.get("num_threads", 1)),
        warnings=(warning,) if warning else (),
    )


def blas_pool(pools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return threadpoolctl's entry for the BLAS that NumPy loaded; the first one if there are several, {} for none."""
    found = [pool for pool in pools if pool.get("user_api") == "blas"]
    from_numpy = [pool for pool in found if "numpy" in str(pool.get("filepath", ""))]
    return next(iter(from_numpy or found), {})


def name_blas(pool: Mapping[str, Any]) -> str:
    """Return library, version and the kind of core that it computes for."""
    if not pool:
        return "unknown BLAS"
    core = f" ({pool['architecture']})" if pool.get("architecture") else ""
    return f"{pool['internal_api']} {pool.get('version') or ''}".rstrip() + core


def read_cpu(field: str) -> str:
    """Return what Linux says of the first processor under a name such as "flags"; nothing elsewhere."""
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith(field)), "")
    except OSError:
        return ""
    return line.partition(":")[2].strip()
