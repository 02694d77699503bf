"""What ran, on what: the lines above the tables, and the same facts in the JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.accuracy.machine import facts
from benchmarks.training.options import Options
from nnmpi.comm.describe import read_cpu

INTEL, AMD, AVX512 = "GenuineIntel", "AuthenticAMD", "AVX512"
_MKL: Mapping[str, str] = {
    INTEL: "an Intel processor, on which MKL takes the widest vectors that it finds",
    AMD: "an AMD processor, on which MKL runs AVX2 code: half of what Zen 5 can, and all that Zen 4 can",
}


def collect(options: Options, removed: Mapping[str, str], found: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts by name.

    Args:
        removed: the pins of the BLAS that were in the environment.
        found: what contestants said of themselves.
    """
    return {
        "machine": {**facts(), "vendor": read_cpu("vendor_id") or "unknown"},
        "ranks": list(options.ranks),
        "cases": list(options.cases),
        "rounds": options.rounds,
        "block_s": options.block_s,
        "checked_only": options.check,
        "removed": dict(removed),
        **found,
    }


def lines(header: Mapping[str, Any]) -> list[str]:
    """Return the facts in words."""
    machine = header["machine"]
    versions = [f"{name} {machine[name]}" for name in ("python", "numpy", "mpi4py", "torch") if name in machine]
    named = [
        ("taken", f"{machine['date']}: {machine['cpu']} ({machine['vendor']}), {machine['cores']} cores"),
        ("versions", ", ".join([*versions, *filter(None, [header.get("mpi")])])),
        ("threads", "1 per rank, in nnmpi and in PyTorch"),
        ("nnmpi's BLAS", header.get("blas", "unknown")),
    ]
    if "torch_capability" in header:
        words = _MKL.get(machine["vendor"], "a processor for which MKL's choice is not known here")
        named += [
            ("PyTorch", f"{header['torch_blas']}; vectors of its own code: {header['torch_capability']}"),
            ("PyTorch's MKL", f"{words}. One that is made to use AVX-512 on AMD is not measured"),
        ]
    if header["removed"]:
        pins = ", ".join(f"{name}={value}" for name, value in header["removed"].items())
        named.append(("removed", f"{pins}, which would have made the BLAS compute for another processor"))
    return [f"{name + ':':<14} {text}" for name, text in named]
