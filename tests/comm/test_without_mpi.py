"""Everything can be imported without an MPI library, but what is MPI itself; and without what Unix
alone has.
"""

import pkgutil
import subprocess
import sys

import pytest

import nnmpi

MPI = [f"nnmpi.comm.mpi.{name}" for name in ("mpi_world", "watchdog")]
UNIX = ("fcntl", "resource", "pwd", "grp", "termios", "pty")
OTHERS = ("nnmpi.backend.jit", "nnmpi.nn.functional")  # numba; raises an error


def imported_without_mpi(modules, program=""):
    """Import modules in a process without mpi4py, and without what Windows and browsers lack."""
    hidden = [f"sys.modules[{name!r}] = None" for name in ("mpi4py", *UNIX)]
    lines = ["import sys", *hidden, *(f"import {module}" for module in modules)]
    return subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, program])],
        capture_output=True,
        text=True,
        timeout=60,
    )


def modules():
    """Return the package's modules that need nothing that a user may not have."""
    names = [module.name for module in pkgutil.walk_packages(nnmpi.__path__, "nnmpi.")]
    return [name for name in names if not name.endswith("__main__") and not name.startswith(OTHERS)]


def test_all_modules_but_those_of_mpi():
    names = [name for name in modules() if name not in MPI]
    done = imported_without_mpi(names)
    assert len(names) > 150
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MPI)
def test_a_module_that_needs_mpi_would_be_found(name):
    done = imported_without_mpi([name])
    assert done.returncode != 0
    assert "halted; None in sys.modules" in done.stderr


def test_what_proves_draws_simulates_and_checks_needs_no_unix():
    """And no MPI."""
    program = """
from nnmpi.lab.comm import main as comm
from nnmpi.teaching.exercise.__main__ import main as exercise; print(exercise(["ring-all-reduce"]))
from nnmpi.lab.schedule import main as schedule
from nnmpi.comm.simulated.simulated_world import simulate
print(comm(["render", "ring", "--ranks", "3"]))
print(schedule(["--pipeline", "gpipe", "--stages", "2", "--microbatches", "3"]))
print(simulate(lambda group: group.sum_floats([1.0])[0], ranks=3))
"""
    done = imported_without_mpi([], program)
    assert done.returncode == 0, done.stderr
    assert (
        "ring, 3 ranks" in done.stdout and "gpipe: 2 ranks" in done.stdout and "3.0" in done.stdout
    )


def test_the_names_of_the_package():
    """What a user gets from it by name, without starting anything."""
    done = imported_without_mpi(["nnmpi; [getattr(nnmpi, name) for name in nnmpi.__all__]"])
    assert done.returncode == 0, done.stderr
