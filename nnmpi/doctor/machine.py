"""What each node has and how ranks lie on it, and what of that is slow or wrong."""

import os
import platform
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from nnmpi.backend.blas import blas_pool, find_older, name_blas, read_cpu
from nnmpi.comm.agreement import name_ranks
from nnmpi.comm.group import Group
from nnmpi.errors import counted
from nnmpi.launcher import read_launch
from nnmpi.threads import usable_cores
from nnmpi.units import format_bytes
from nnmpi.version import VERSION

SHM = Path("/dev/shm")  # where MPI libraries have the memory that ranks share
LITTLE_SHM_BYTES = 64 << 20  # Docker's default; a model of 16 million float32 fills it
LITTLE_MEMORY_BYTES = 1 << 30

Facts = Mapping[str, Any]
"""What a rank says of its place, as JSON values; see `look`."""


def look(group: Group) -> list[Facts]:
    """Return what each rank says of its place, by rank. Collective."""
    pool = blas_pool(threadpoolctl.threadpool_info())
    own, node = usable_cores()
    launch = read_launch(os.environ)
    facts = {
        "host": platform.node(),
        "processor": read_cpu("model name") or platform.processor() or platform.machine(),
        "cores": [own, node],
        "bound": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "load": os.getloadavg()[0],
        "versions": f"nnmpi {VERSION}, Python {platform.python_version()}, NumPy {np.__version__}",
        "mpi": group.comm.world.library,
        "launcher": launch.name if launch is not None else "none",
        "blas": name_blas(pool),
        "threads": int(pool.get("num_threads", 1)),
        "older": find_older(),
        "shm": shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        "memory": _available_bytes(),
        "interfaces": _interfaces(),
    }
    return group.gather(facts)


def describe(everyones: Sequence[Facts]) -> list[str]:
    """Return what there is, in lines: once for all ranks, then node by node."""
    first = everyones[0]
    lines = [
        f"{counted(len(everyones), 'rank')}, started by {first['launcher']}; MPI: {first['mpi']}",
        first["versions"],
    ]
    for host, ranks in _by_host(everyones).items():
        there = everyones[ranks[0]]
        shm = "none" if there["shm"] is None else f"{format_bytes(there['shm'])} free"
        memory = "unknown" if there["memory"] is None else f"{format_bytes(there['memory'])} free"
        lines += [
            f"{host}: {name_ranks(ranks)}; {there['processor']}, {there['cores'][1]} cores, load {there['load']:.1f}",
            f"  BLAS: {there['blas']}, {counted(there['threads'], 'thread')} per rank",
            f"  cores of each rank: {', '.join(dict.fromkeys(_spans(everyones[rank]['bound']) for rank in ranks))}",
            f"  memory: {memory}; shared memory: {shm}",
            f"  interfaces: {', '.join(there['interfaces']) or 'unknown'}",
        ]
    return lines


def find_faults(everyones: Sequence[Facts]) -> list[str]:
    """Return what is slow or wrong, a sentence each, with what helps."""
    found = []
    for key, what in (("versions", "versions"), ("mpi", "MPI libraries")):
        if len({facts[key] for facts in everyones}) > 1:
            found.append(f"ranks have different {what}; install the same on all nodes")
    for host, ranks in _by_host(everyones).items():
        found += [f"{host}: {sentence}" for sentence in _faults_of([everyones[rank] for rank in ranks])]
    return found


def _faults_of(node: Sequence[Facts]) -> list[str]:
    """Return what is slow or wrong on one node."""
    first, ranks, cores, found = node[0], len(node), node[0]["cores"][1], []
    if ranks > cores:
        found.append(f"{ranks} ranks share {cores} cores and wait for one another; start at most {cores} there")
    sharing = Counter(tuple(facts["bound"]) for facts in node)
    bound, most = max(sharing.items(), key=lambda item: item[1], default=((), 0))
    if bound and len(bound) < most <= cores:
        found.append(f"{most} ranks are bound to the cores {_spans(bound)}, others are idle; give --bind-to none")
    if ranks * first["threads"] > max(cores, ranks):
        found.append(
            f"{ranks} ranks with {first['threads']} BLAS threads each want more than {cores} cores; leave "
            "OMP_NUM_THREADS out, or set it to 1"
        )
    if first["load"] > 1.5 * cores:
        found.append(f"its load is {first['load']:.1f} on {cores} cores: others compute there, too; times mean little")
    if first["older"]:
        found.append(first["older"])
    if ranks > 1 and first["shm"] is not None and first["shm"] < LITTLE_SHM_BYTES:
        found.append(
            f"{SHM} has {format_bytes(first['shm'])} free; large models will exchange gradients by messages, which is "
            "slower (docker run --shm-size)"
        )
    if first["memory"] is not None and first["memory"] < LITTLE_MEMORY_BYTES:
        found.append(f"only {format_bytes(first['memory'])} of memory are free")
    return found


def _by_host(everyones: Sequence[Facts]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyones):
        found.setdefault(facts["host"], []).append(rank)
    return found


def _spans(cores: Sequence[int]) -> str:
    """Return numbers of cores in words: "0-3, 8"."""
    return name_ranks(cores).partition(" ")[2] if cores else "any"


def _available_bytes() -> int | None:
    """Return the memory that programs may still take; None where the system does not say."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return None


def _interfaces() -> list[str]:
    """Return the network's interfaces that are up, with their rates as far as they are known."""
    found = []
    with suppress(OSError):
        for _, name in socket.if_nameindex():
            place = Path("/sys/class/net") / name
            with suppress(OSError, ValueError):
                if (place / "operstate").read_text().strip() == "down":
                    continue
            rate = ""
            with suppress(OSError, ValueError):
                mbits = int((place / "speed").read_text())
                rate = f" ({mbits / 1000:g} Gbit/s)" if mbits > 0 else ""
            found.append(name + rate)
    return found
