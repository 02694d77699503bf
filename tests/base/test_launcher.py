"""Reading a process's place from what launchers set."""

import os

import pytest

from nnmpi.base.launcher import Launch, read_launch, set_home, start_words

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    "environ, name", [(OPEN_MPI, "Open MPI's mpirun"), (MPICH, "MPICH's mpirun"), (SLURM, "srun")]
)
def test_each_launcher_is_read(environ, name):
    assert read_launch(environ) == Launch(name, size=8, rank=5, local_size=4)


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"PMI_SIZE": "4"}]
)
def test_no_launcher_is_none(environ):
    assert read_launch(environ) is None


def test_the_innermost_launcher_counts():
    """Open MPI's mpirun starts its daemons by srun, two of them here, and the ranks inherit srun's
    variables.
    """
    outer = SLURM | {"SLURM_STEP_NUM_TASKS": "2"}
    result = read_launch(OPEN_MPI | outer)
    assert (result.name, result.size) == ("Open MPI's mpirun", 8)


def test_srun_may_speak_as_mpichs_mpirun():
    """With --mpi=pmi2; but MPICH's mpirun in a job of Slurm's is MPICH's."""
    names = []
    for here in ({"PMI_SIZE": "8", "PMI_RANK": "5"}, MPICH):
        launch = read_launch(SLURM | here)
        names.append(launch.name)
    assert names == ["srun", "MPICH's mpirun"]
    assert start_words(3, SLURM) == "srun -n 3" and start_words(3, MPICH) == "mpirun -n 3"


@pytest.mark.parametrize(
    "text, node, expected",
    [
        ("9(x999999999),2", 999999999, 2),
        ("3", 0, 3),
        ("4(x2),3", 0, 4),
        ("4(x2),3", 1, 4),
        ("4(x2),3", 2, 3),
        ("4(x2),3", 3, None),
        ("", 0, None),
        ("x", 0, None),
    ],
)
def test_slurms_list_of_tasks(text, node, expected):
    result = read_launch(SLURM | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)})
    assert result.local_size == expected


def test_open_mpi_gets_a_home_where_the_environment_has_none():
    """Without one its mpirun does not start."""
    for environ in ({}, {"HOME": "/there"}):
        expected = environ.get("HOME", os.path.expanduser("~"))
        set_home(environ)
        assert environ == {"HOME": expected}
