"""Everything can be imported without an MPI library, but what is MPI itself."""

import pkgutil
import subprocess
import sys
from collections.abc import Iterable

import pytest

import nnmpi

MPI = [f"nnmpi.comm.mpi.{name}" for name in ("mpi_world", "watchdog")]
OTHERS = ("nnmpi.backend.jit",)  # numba


def imported_without_mpi(modules: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a process in which mpi4py cannot be imported."""
    lines = ["import sys", "sys.modules['mpi4py'] = None", *(f"import {module}" for module in modules)]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)


def modules() -> list[str]:
    """Return the package's modules that need nothing that a user may not have."""
    names = [module.name for module in pkgutil.walk_packages(nnmpi.__path__, "nnmpi.")]
    return [name for name in names if not name.endswith("__main__") and not name.startswith(OTHERS)]


def test_all_modules_but_those_of_mpi() -> None:
    names = [name for name in modules() if name not in MPI]
    done = imported_without_mpi(names)
    assert len(names) > 150
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MPI)
def test_a_module_that_needs_mpi_would_be_found(name: str) -> None:
    done = imported_without_mpi([name])
    assert done.returncode != 0
    assert "mpi4py" in done.stderr


def test_the_names_of_the_package() -> None:
    """What a user gets from it by name, without starting anything."""
    done = imported_without_mpi(["nnmpi; [getattr(nnmpi, name) for name in nnmpi.__all__]"])
    assert done.returncode == 0, done.stderr
