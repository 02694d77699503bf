"""Which pairs of launcher and MPI library are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi.comm.mpi.library import NO_NETWORK, refuse_foreign_launcher, refuse_lonely_rank, stays_on_one_node
from nnmpi.errors import LaunchError
from nnmpi.launcher import Launch

ROOT = Path(__file__).parents[2]
OPEN_MPI = Launch("Open MPI's mpirun", 4, 0, 4, 0)
MPICH = Launch("MPICH's mpirun", 4, 0, 4, 0)
SRUN = Launch("srun", 4, 0, 4, 0)
HYDRA = {"HYDI_CONTROL_FD": "7"}


@pytest.mark.parametrize(("vendor", "launch", "environ"), [("MPICH", OPEN_MPI, {}), ("Open MPI", MPICH, HYDRA)])
def test_a_foreign_launcher_is_refused_before_mpi_starts(vendor: str, launch: Launch, environ: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=f"started 4 processes, but mpi4py found another MPI, {vendor}"):
        refuse_foreign_launcher(vendor, launch, environ)


@pytest.mark.parametrize(
    ("vendor", "launch", "environ"),
    [
        ("Open MPI", OPEN_MPI, {}),
        ("MPICH", MPICH, HYDRA),
        ("MPICH", SRUN, {}),
        ("Open MPI", SRUN, {}),
        ("Open MPI", MPICH, {}),  # srun --mpi=pmi2 sets the same variables as MPICH's mpirun
        ("MPICH", Launch("Open MPI's mpirun", 1, 0, 1, 0), {}),
        ("MPICH", None, {}),
    ],
)
def test_what_may_work_is_tried(vendor: str, launch: Launch | None, environ: dict[str, str]) -> None:
    refuse_foreign_launcher(vendor, launch, environ)


@pytest.mark.parametrize("launch", [OPEN_MPI, MPICH, SRUN])
def test_a_rank_that_is_alone_among_several_is_refused(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="each is alone"):
        refuse_lonely_rank(1, "MPICH", launch)
    refuse_lonely_rank(4, "MPICH", launch)


def test_srun_is_told_of_its_option() -> None:
    with pytest.raises(LaunchError, match="--mpi=pmix"):
        refuse_lonely_rank(1, "Open MPI", SRUN)


@pytest.mark.parametrize("launch", [None, Launch("srun", 1, 0, 1, 0)])
def test_a_single_process_is_welcome(launch: Launch | None) -> None:
    refuse_lonely_rank(1, "Open MPI", launch)


@pytest.mark.parametrize(
    ("launch", "environ", "stays"),
    [
        (OPEN_MPI, {"PMIX_RANK": "0"}, True),
        (Launch("srun", 1, 0, 1, 0), {}, True),
        (None, {"HOME": "/"}, True),
        (Launch("Open MPI's mpirun", 8, 0, 4, 0), {}, False),
        (Launch("srun", 4, 0, None, None), {}, False),
        (None, {"PMIX_RANK": "0"}, False),  # of a launcher that is not known here
        (OPEN_MPI, {"OMPI_MCA_btl": "tcp,self"}, False),
        (OPEN_MPI, {"OMPI_MCA_pml": "cm"}, False),  # which needs an mtl
    ],
)
def test_only_a_job_on_one_node_does_without_a_network(
    launch: Launch | None, environ: dict[str, str], stays: bool
) -> None:
    assert stays_on_one_node(launch, environ) == stays


def test_a_single_process_looks_for_no_network_cards() -> None:
    code = "import os; from nnmpi.comm.mpi.library import load_mpi; load_mpi(os.environ)\n"
    code += "print(os.environ['OMPI_MCA_btl'])"
    names = ("OMPI_", "PMIX_", "PMI_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout.strip() == NO_NETWORK["OMPI_MCA_btl"], ended.stderr


def test_a_job_without_a_home_directory_starts() -> None:
    """As cron starts one: Open MPI would abort inside MPI_Init."""
    program = "import nnmpi; print('ranks', nnmpi.start().size)"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, "ranks 1\n"), ran.stderr
