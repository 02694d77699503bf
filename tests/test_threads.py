"""BLAS threads of one rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi import threads
from nnmpi.threads import VARIABLES, limit_threads, rank_threads, usable_cores

FOUR_HERE = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ((16, 16), 4),
        ((18, 18), 4),
        ((2, 2), 1),  # more ranks than cores
        ((4, 16), 4),  # bound to a share of four cores
        ((1, 16), 1),  # bound to one core
        ((8, 16), 4),  # bound to a socket, which two ranks share
    ],
)
def test_the_cores_are_shared(cores: tuple[int, int], expected: int) -> None:
    environ = dict(FOUR_HERE)
    assert limit_threads(environ, loaded=(), cores=cores) == expected
    assert {environ[name] for name in VARIABLES} == {str(expected)}


def test_without_a_launcher_nothing_is_set() -> None:
    environ: dict[str, str] = {}
    assert limit_threads(environ, loaded=(), cores=(16, 16)) is None
    assert environ == {}


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_set_stays(name: str) -> None:
    environ = FOUR_HERE | {name: "3"}
    assert limit_threads(environ, loaded=(), cores=(16, 16)) is None
    assert environ == FOUR_HERE | {name: "3"}


def test_a_loaded_numpy_is_left_to_start() -> None:
    environ = dict(FOUR_HERE)
    assert limit_threads(environ, loaded={"numpy"}, cores=(16, 16)) is None
    assert environ == FOUR_HERE
    assert rank_threads(environ, (16, 16)) == 4


def test_the_cores_of_this_machine() -> None:
    own, node = usable_cores()
    assert 1 <= own <= node <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("text", "expected"), [("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", sys.maxsize)]
)
def test_the_quota_of_a_container(text: str, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert threads._quota(path) == expected
    assert threads._quota(tmp_path / "none") == sys.maxsize


def test_importing_nnmpi_limits_numpy() -> None:
    """The import sets the variables before it loads NumPy, whose BLAS then has one thread; cycles are found after."""
    many = str(4 * (os.cpu_count() or 1))
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environ |= {"OMPI_COMM_WORLD_SIZE": many, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": many}
    code = "import gc, nnmpi, threadpoolctl\n"
    code += "print([pool['num_threads'] for pool in threadpoolctl.threadpool_info()], gc.isenabled())"
    root = Path(__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], env=environ, cwd=root, capture_output=True, text=True)
    assert found.stdout.strip() == "[1] True", found.stderr
