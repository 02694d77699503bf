"""What ran, on what: the lines above the rows, and the same facts in the JSON file."""

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.accuracy.machine import facts
from benchmarks.collectives.options import Options
from nnmpi.backend.record import Backend
from nnmpi.comm.describe import describe
from nnmpi.comm.group import Group
from nnmpi.comm.sizes import name_bytes

# The settings that decide how many threads a rank has, and how MPI sends. (Open MPI's launcher sets many more itself.)
PINS = ("OMP_", "OPENBLAS_", "MKL_", "MPIR_CVAR_", "UCX_", "FI_") + tuple(
    f"OMPI_MCA_{part}" for part in ("btl", "mtl", "pml", "osc", "coll", "mpi_")
)


def collect(options: Options, group: Group, backend: Backend, fit: str) -> dict[str, Any]:
    """Return the facts by name, as JSON values. Collective.

    Args:
        fit: the model that predicts, in words.
    """
    found = describe(group)
    return {
        "operation": options.operation,
        "algorithms": list(options.algorithms),
        "dtype": options.dtype,
        "backend": f"{backend.name} on {backend.device}",
        "device_arrays": group.devices().describe() if backend.is_device else "",
        "checked": options.check,
        "ranks": group.size,
        "nodes": found.nodes,
        "affinity": group.gather(_affinity()),
        "mpi": found.mpi,
        "blas": f"{found.blas}, {found.threads} thread{'s' * (found.threads != 1)} per rank",
        "pins": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PINS)},
        "warnings": list(found.warnings),
        "machine": facts(),
        "fit": fit,
    }


def lines(header: Mapping[str, Any], options: Options, fit_place: str) -> list[str]:
    """Return the facts as they are printed, with the place of the fit, which is nobody else's matter."""
    machine, nodes = header["machine"], header["nodes"]
    pins = ", ".join(f"{name}={value}" for name, value in header["pins"].items())
    how = f"{options.iterations} rounds" if options.iterations else f"{options.budget_s:g} s"
    named = [
        ("collective", f"{options.operation} of {options.dtype}, {header['backend']}"),
        (
            "sizes",
            f"{name_bytes(options.sizes[0])} to {name_bytes(options.sizes[-1])}, {how} each; results "
            f"{'verified' if options.check else 'not verified (--check)'}",
        ),
        ("ranks", f"{header['ranks']} on {nodes} node{'s' * (nodes != 1)}, {header['mpi']}"),
        ("processor", f"{machine['cpu']}; cores {_cores(header['affinity'])}"),
        ("threads", header["blas"]),
        ("settings", pins or "none"),
        ("fit", header["fit"] + fit_place),
        *([("device arrays", header["device_arrays"])] if header["device_arrays"] else []),
        *(("warning", text) for text in header["warnings"]),
    ]
    return [f"{name + ':':<12} {text}" for name, text in named]


def _affinity() -> list[int]:
    """Return the numbers of the cores that this rank may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _cores(affinity: list[list[int]]) -> str:
    """Return the cores of all ranks in words."""
    if not affinity[0]:
        return "unknown"
    if all(each == affinity[0] for each in affinity):
        return f"{_numbers(affinity[0])} ({len(affinity[0])}) for every rank, not bound"
    return "; ".join(f"{_numbers(cores)} for rank {rank}" for rank, cores in enumerate(affinity))


def _numbers(cores: list[int]) -> str:
    """Return numbers in words, neighbours joined: "0-3, 8"."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and spans[-1][-1] == core - 1:
            spans[-1] = [spans[-1][0], core]
        else:
            spans.append([core, core])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
