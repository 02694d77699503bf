"""What can be read, proved and planned without MPI must not import it: importing mpi4py starts MPI."""

import subprocess
import sys

import pytest

PURE = ["steps", "algorithms.registry", "replay", "prove", "choose", "buckets", "wire", "agree", "wording", "buffers"]


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_needs_no_mpi(module: str) -> None:
    program = f"import sys; sys.modules['mpi4py'] = None; import nnmpi.comm.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_module_that_needs_mpi_would_be_found() -> None:
    program = "import sys; sys.modules['mpi4py'] = None; import nnmpi.comm.execute"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "mpi4py" in done.stderr
