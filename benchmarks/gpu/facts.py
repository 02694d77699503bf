"""The machine's facts, at the head of each report on a device."""

import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.harness.machine import machine_facts
from nnmpi.backend.backend import Backend
from nnmpi.base.errors import LaunchError
from nnmpi.comm.mpi.start import import_mpi

PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "ml_dtypes")
QUERY = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,compute_cap,"
    "mig.mode.current"
)


def collect(backend: Backend) -> dict[str, Any]:
    """Return host, card, driver and versions by name; for a failed query, its error."""
    result: dict[str, Any] = {
        **machine_facts(),
        "device": backend.device,
        "stand_in": is_stand_in(backend),
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            result[package] = version(package)
    result["mpi"] = mpi_library()
    if result["stand_in"]:
        return result
    cupy = backend.xp
    result["cupy"] = cupy.__version__
    runtime = cupy.cuda.runtime
    for name, ask in (
        ("cuda_driver", runtime.driverGetVersion),
        ("cuda_runtime", runtime.runtimeGetVersion),
        ("devices", runtime.getDeviceCount),
        ("nvidia_smi", nvidia_smi),
    ):
        try:
            result[name] = ask()
        except Exception as error:  # the report continues without this fact
            result[name] = f"not to be had: {type(error).__name__}: {error}"
    return result


def is_stand_in(backend: Backend) -> bool:
    """Return whether the device is the tests' stand-in, which computes with NumPy, or the host."""
    return "tests/device/fake" in (backend.xp.__file__ or "") or not backend.is_device


def nvidia_smi() -> dict[str, str]:
    """Return the first card's properties, by nvidia-smi."""
    words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    return dict(
        zip(QUERY.split(","), map(str.strip, done.stdout.splitlines()[0].split(",")), strict=True)
    )


def mpi_library() -> str:
    """Return mpi4py's MPI library as text; MPI is not started."""
    try:
        return str(import_mpi().Get_library_version()).strip().splitlines()[0][:100]
    except LaunchError as error:
        return f"none: {error}"
