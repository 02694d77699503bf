"""Makes a fit: measures links, adding, and the all-reduces that are not made of steps, in under a minute."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

from nnmpi.comm.curve import Curve
from nnmpi.comm.describe import name_library, read_cpu
from nnmpi.comm.fit import Fit, default_file, load_fit
from nnmpi.comm.fitting.probe import measure_add, measure_curves, measure_link
from nnmpi.comm.fitting.timing import Refilled
from nnmpi.comm.group import Group, Pending
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.native import Native
from nnmpi.comm.sharing.memory import SharedMemory
from nnmpi.comm.sharing.shared import SharedSum
from nnmpi.comm.sizes import parse_bytes
from nnmpi.errors import DeviceError, UsageError

BUDGET_S = 24.0
# Lengths of whole all-reduces: close together where one overtakes another, and where MPI changes its ways.
WHOLE_SIZES = (4, 16, 64, 256, *(2**bit for bit in range(10, 15)), *(2**bit for bit in range(16, 27, 2)))
NAP_S = 0.0005

Progress = Callable[[str], Any]


def measure(group: Group, progress: Progress | None = None, budget_s: float = BUDGET_S) -> Fit:
    """Measure this machine with these ranks. Collective.

    Args:
        progress: called on rank 0 with a line about what comes next.
        budget_s: seconds to spend in measuring, about.

    Raises:
        UsageError: for a single rank.
    """
    if group.size == 1:
        raise UsageError("one rank has nobody to send to, so there is nothing to fit; start at least 2 (mpirun -n 2)")
    begin, share = time.perf_counter(), budget_s / 6
    say = progress if progress is not None and group.is_root else _silent
    local = group.node()
    leaders = group.split(min(local.rank, 1))
    say("messages inside a node")
    inside = _links(group, local, local.size > 1, share)
    say("messages between nodes")
    several = len(set(group.nodes())) > 1
    across = _links(group, leaders, several and local.rank == 0, share)
    say("adding")
    add = measure_add(group, share / 2)
    say("MPI's own all-reduce, and the one through shared memory")
    native, started, *rest = _measure_whole(group, 3 * share)
    shared = rest[0] if rest else None
    leaders.free()
    local.free()
    link = inside or across
    assert link is not None  # two ranks are on one node or on two
    machine = Machine(inside=link, across=across, nodes=tuple(group.nodes()) if several else None, add=add)
    took = {"seconds": round(time.perf_counter() - begin, 1)}
    return Fit(machine, native, started, shared, group.share(facts(group) | took))


def find_fit(group: Group, file: Path | None = None) -> Fit | None:
    """Return the fit in a file, by default the one that was kept for these ranks; None if none was. Collective.

    Rank 0 reads; so the ranks agree, and need no common file system.

    Raises:
        UsageError: on all ranks, when the file holds no fit, or one of other ranks, nodes or another MPI.
    """
    known = facts(group)
    answer: dict[str, Any] = {}
    if group.is_root:
        try:
            found = load_fit(file) if file is not None else _kept(known)
            answer = {"fit": None if found is None else found.to_json()}
        except UsageError as error:
            answer = {"error": str(error)}
    answer = group.share(answer)
    if "error" in answer:
        raise UsageError(answer["error"])
    if answer["fit"] is None:
        return None
    fit = Fit.from_json(answer["fit"])
    if file is not None:
        fit.check(group.size, known["nodes"], known["mpi"], f"the fit {file}")
    elif not fit.fits(group.size, known["nodes"], known["mpi"]):
        return None  # as many ranks, but placed on the nodes in another way; nobody has asked for it
    return fit


def _kept(known: Mapping[str, Any]) -> Fit | None:
    """Return the fit that was kept for these facts; None if there is none, or it is damaged."""
    file = default_file(known)
    try:
        return None if file is None or not file.exists() else load_fit(file)
    except (UsageError, OSError):
        return None


def facts(group: Group) -> dict[str, Any]:
    """Return what a fit depends on, and what is good to know beside it. Collective."""
    return {
        "ranks": group.size,
        "nodes": group.nodes(),
        "mpi": name_library(MPI.Get_library_version()),
        "host": group.share(platform.node()),
        "cpu": read_cpu("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cache_bytes": _cache_bytes(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi4py": mpi4py.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _links(group: Group, members: Group, taking_part: bool, budget_s: float) -> Link | None:
    """Return what the first of the ranks that take part have measured among their members; None if there are none."""
    own = measure_link(members, budget_s).to_json() if taking_part else None
    _wait_asleep(group)
    found = next((each for each in group.gather(own) if each is not None), None)
    return None if found is None else Link.from_json(found)


def _wait_asleep(group: Group) -> None:
    """Wait for all ranks without taking a core from those that measure."""
    request = group.comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)


def _measure_whole(group: Group, budget_s: float) -> list[Curve]:
    """Return what MPI's own all-reduce takes, blocking and started, and the shared one, if there is one."""
    longest = WHOLE_SIZES[-1] // 4
    own, fresh = np.ones(longest, np.float32), np.ones(longest, np.float32)
    memory, common = None, own
    with suppress(DeviceError):  # on all ranks: then there is none, or too little
        memory = SharedMemory(group)
        common = memory.allocate(longest, np.float32)

    def prepare(nbytes: int) -> list[Refilled]:
        n = max(1, nbytes // 4)
        calls: list[Pending] = [Native(own[:n], group.comm), Native(own[:n], group.comm)]
        runs: list[Callable[[], Any]] = [calls[0].run, partial(_start_and_wait, calls[1])]
        refills: list[Callable[[], Any]] = [partial(np.copyto, own[:n], fresh[:n])] * 2
        if common is not own and memory is not None:
            runs.append(SharedSum(common[:n], memory).run)
            refills.append(partial(np.copyto, common[:n], fresh[:n]))
        return list(zip(runs, refills, strict=True))

    curves = measure_curves(group, prepare, WHOLE_SIZES, budget_s)
    group.barrier()
    if memory is not None:
        memory.free()
    return curves


def _start_and_wait(pending: Pending) -> None:
    pending.start()
    pending.wait()


def _cache_bytes() -> int:
    """Return the size of the last-level cache as Linux gives it; 8 MB where nothing is known."""
    sizes = [parse_bytes(file.read_text()) for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=8 * 2**20)


def _silent(line: str) -> None:
    """Say nothing."""
