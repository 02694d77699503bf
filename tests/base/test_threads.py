"""BLAS threads of one rank."""

import os
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import pytest

from nnmpi.base import launcher
from nnmpi.base.launcher import VARIABLES, limit_threads, usable_cores

FOUR_HERE = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_a_rank_has_one_thread() -> None:
    environ = dict(FOUR_HERE)
    limit_threads(environ, loaded=())
    assert environ == FOUR_HERE | dict.fromkeys(VARIABLES, "1")


@pytest.mark.parametrize(
    ("environ", "loaded"),
    [({}, ()), (FOUR_HERE, {"numpy"}), *((FOUR_HERE | {name: "3"}, ()) for name in VARIABLES)],
)
def test_nothing_is_set(environ: dict[str, str], loaded: Container[str]) -> None:
    """Without a launcher, where NumPy came first, and where the user has chosen."""
    before = dict(environ)
    limit_threads(environ, loaded)
    assert environ == before


def test_the_cores_of_this_machine() -> None:
    local, node = usable_cores()
    assert 1 <= local <= node <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", sys.maxsize)],
)
def test_the_quota_of_a_container(text: str, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert launcher._quota(path) == expected
    assert launcher._quota(tmp_path / "none") == sys.maxsize


def test_importing_nnmpi_limits_numpy() -> None:
    """It sets the variables, and loads neither NumPy nor the engine: a proof needs a few modules
    besides Python's.
    """
    many = str(4 * (os.cpu_count() or 1))
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environ |= {
        "OMPI_COMM_WORLD_SIZE": many,
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": many,
    }
    code = "import sys, nnmpi.comm.prove, nnmpi.comm.algorithms.registry, nnmpi.schedule.check\n"
    code += (
        "print('numpy' in sys.modules, sum(name.startswith('nnmpi') for name in sys.modules) <"
        " 30)\n"
    )
    code += "import threadpoolctl, nnmpi.ops\n"
    code += "print([pool['num_threads'] for pool in threadpoolctl.threadpool_info()])"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=root, capture_output=True, text=True
    )
    assert result.stdout.split("\n")[:2] == ["False True", "[1]"], result.stderr


SIMULATED = """
import numpy, threadpoolctl, nnmpi
from nnmpi.comm.fit import parse_network

def main(group):
    rows = numpy.ones((4096 // group.size, 512), numpy.float32)
    weights = numpy.ones((512, 512), numpy.float32)
    for _ in range(6):
        group.all_reduce((rows.T @ (rows @ weights)).reshape(-1), "ring")
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

runs = {n: nnmpi.simulate(main, n, parse_network("alpha_us=20,gbit=10", n)) for n in (1, 4)}
print({threads for run in runs.values() for found in run for threads in found}, runs[1].seconds / runs[4].seconds)
"""


@pytest.mark.host_only("the clocks are processor times")
def test_a_simulated_rank_has_one_thread_and_more_of_them_are_faster() -> None:
    """Also where the BLAS has a thread for each core: four ranks share out what one computes, and
    add up by a ring.
    """
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", SIMULATED], env=environ, cwd=root, capture_output=True, text=True
    )
    threads, speedup = result.stdout.rsplit(" ", 1)
    assert threads == "{1}" and 1.7 < float(speedup) < 4.5, result.stderr
