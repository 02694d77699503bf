"""BLAS threads of one rank."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from nnmpi.base import launcher
from nnmpi.base.launcher import VARIABLES, limit_threads, usable_cores

FOUR_HERE = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_a_rank_has_one_thread():
    environ = dict(FOUR_HERE)
    limit_threads(environ, loaded=())
    assert environ == FOUR_HERE | dict.fromkeys(VARIABLES, "1")


@pytest.mark.parametrize(
    "environ, loaded",
    [({}, ()), (FOUR_HERE, {"numpy"}), *((FOUR_HERE | {name: "3"}, ()) for name in VARIABLES)],
)
def test_nothing_is_set(environ, loaded):
    """Without a launcher, where NumPy came first, and where the user has chosen."""
    before = dict(environ)
    limit_threads(environ, loaded)
    assert environ == before


def test_the_cores_of_this_machine():
    local, node = usable_cores()
    assert 1 <= local <= node <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    "idle, quota, threads, expected",
    [
        ([0, 5, 5, 5, 5], 9, "1", "2 of 3 cores idle; to use more: go -n 3"),
        ([0, 5, 0, 5, 5], 9, "1", "1 of 2 cores idle; to use more: go -n 2"),
        ([0, 5, 0, 0, 5], 9, "1", ""),
        ([5, 5, 5, 5, 5], 2, "1", "1 of 2 cores idle; to use more: go -n 2"),
        ([5, 5, 5, 5, 5], 9, "3", ""),
    ],
)
def test_idle_cores_and_how_to_use_them(idle, quota, threads, expected, tmp_path, monkeypatch):
    """Of five processors two are one core's. This rank sleeps, and so its own core is idle."""
    ticks = [dict.fromkeys((f"cpu{number}" for number in range(5)), 10)]
    ticks.append({name: 10 + more for (name, _), more in zip(ticks[0].items(), idle, strict=True)})
    for number in (3, 4):
        (tmp_path / f"cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}/topology/thread_siblings_list").write_text("3-4\n")
    monkeypatch.setattr(launcher, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(launcher, "_idle_ticks", partial(next, iter(ticks)))
    monkeypatch.setattr(launcher, "_processors", lambda: {0, 1, 2, 3, 4})
    monkeypatch.setattr(launcher, "_quota", lambda: quota)
    monkeypatch.setenv("MKL_NUM_THREADS", threads)
    assert launcher.describe_idle("go -n {}") == expected


def test_where_nothing_tells_of_cores_all_are_idle(monkeypatch):
    monkeypatch.setattr(launcher, "_idle_ticks", Mock(side_effect=FileNotFoundError))
    assert launcher.idle_cores() == usable_cores()[1]


@pytest.mark.parametrize(
    "text, expected", [("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", sys.maxsize)]
)
def test_the_quota_of_a_container(text, expected, tmp_path):
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert launcher._quota(path) == expected
    assert launcher._quota(tmp_path / "none") == sys.maxsize


def test_importing_nnmpi_limits_numpy():
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
    code = (
        "import sys, nnmpi.comm.prove, nnmpi.comm.algorithms.registry, nnmpi.schedule.check\n"
        "print('numpy' in sys.modules, sum(name.startswith('nnmpi') for name in sys.modules) <"
        " 32)\n"
        "import threadpoolctl, nnmpi.ops\n"
        "print([pool['num_threads'] for pool in threadpoolctl.threadpool_info()])"
    )
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
    return [
        pool["num_threads"]
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]

runs = {n: nnmpi.simulate(main, n, parse_network("alpha_us=20,gbit=10", n)) for n in (1, 4)}
print(
    {threads for run in runs.values() for found in run for threads in found},
    runs[1].seconds / runs[4].seconds,
)
"""


@pytest.mark.host_only("the clocks are processor times")
def test_a_simulated_rank_has_one_thread_and_more_of_them_are_faster():
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
