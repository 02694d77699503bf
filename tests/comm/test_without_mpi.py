"""What can be read, proved and planned without MPI must not import it: importing mpi4py starts MPI."""

import subprocess
import sys

PURE = ["steps", "algorithms.registry", "prove", "choose", "agreement", "buffers"]
PURE += ["units", "cost", "simulate", "render"]


def imported_without_mpi(*modules: str) -> subprocess.CompletedProcess[str]:
    """Import modules of nnmpi.comm in a process in which mpi4py cannot be imported."""
    lines = ["import sys", "sys.modules['mpi4py'] = None", *(f"import nnmpi.comm.{module}" for module in modules)]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)


def test_the_pure_modules_need_no_mpi() -> None:
    done = imported_without_mpi(*PURE)
    assert done.returncode == 0, done.stderr


def test_a_module_that_needs_mpi_would_be_found() -> None:
    done = imported_without_mpi("execution")
    assert done.returncode != 0
    assert "mpi4py" in done.stderr
