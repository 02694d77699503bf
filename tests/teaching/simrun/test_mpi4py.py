"""mpi4py's own tests on simulated ranks: those that pass under mpirun on 3 ranks pass, but for a
list. The tests are taken from the registry, with mpi4py's sources.

    python -m tests.teaching.simrun.test_mpi4py        all files, in ten minutes or so: a line each
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.harness.job import run

VERSION = "4.1.2"
DOWNLOAD_S, RUN_S = 100, 600.0
SUITE = "mpi4py's own tests on simulated ranks; its defects and programs ran"

# For each file, the tests that pass under mpirun on 3 ranks, by Open MPI 5.0 and MPI 4.1 (874), and
# those of them that do not on simulated ranks, by class and name.
PASSES = {
    "test_p2p_obj": 92,
    "test_p2p_buf": 52,
    "test_p2p_obj_matched": 10,
    "test_p2p_buf_matched": 11,
    "test_cco_obj": 40,
    "test_cco_buf": 72,
    "test_cco_nb_buf": 70,
    "test_cco_nb_vec": 62,
    "test_cco_vec": 62,
    "test_cco_ngh_obj": 8,
    "test_cco_ngh_buf": 16,
    "test_msgspec": 142,
    "test_msgzero": 6,
    "test_status": 11,
    "test_request": 12,
    "test_group": 52,
    "test_comm": 89,
    "test_comm_topo": 32,
    "test_op": 11,
    "test_pickle": 5,
    "test_buffer": 16,
    "test_threads": 3,
}
LEFT_OUT = {
    "test_p2p_obj": "testCommLock",
    "test_op": "testCreateMany",
    "test_threads": "testIsThreadMain testIsThreadMainInThread",
    "test_msgspec": "TestMessageRMA TestMessageCAIBuf TestMessageDLPackCPUBuf testBuffer",
}
# a minute and more each: only in the program above
LONG = (
    "test_cco_buf",
    "test_cco_nb_buf",
    "test_cco_nb_vec",
    "test_cco_vec",
    "test_cco_ngh_obj",
    "test_cco_ngh_buf",
)


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """Return the folder of mpi4py's tests, with the program that runs a file of them."""
    return fetch(tmp_path_factory.mktemp("mpi4py"))


def fetch(folder):
    """Take mpi4py's sources into a folder; return that of its tests, with `suite.py`."""
    # not ":all:", by which pip would compile Cython, too: two minutes where its cache is empty
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "mpi4py"]
    ending = run([*command, "-d", str(folder), f"mpi4py=={VERSION}"], folder / "output", DOWNLOAD_S)
    archives = [*folder.glob("mpi4py-*.tar.gz")]
    if not archives:
        pytest.fail(
            f"mpi4py's tests cannot be had: pip found no source archive of mpi4py {VERSION}; they"
            f" need the network or a registry\n{ending.output[-500:]}",
            pytrace=False,
        )
    # not `extractall`, which wants a filter from 3.12 on, and knows none before 3.11.4
    subprocess.run(["tar", "-xf", archives[0], "-C", folder], check=True)
    tests = folder / f"mpi4py-{VERSION}" / "test"
    shutil.copy(Path(__file__).with_name("suite.py"), tests)
    return tests


def outcomes(suite, file):
    """Return the outcome of each test of a file, on 3 simulated ranks."""
    command = [sys.executable, "-m", "nnmpi", "simrun", "-n", "3", "suite.py", file]
    ending = subprocess.run(
        command, cwd=suite, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    lines = [line for line in ending.stdout.splitlines() if line.startswith("OUTCOMES ")]
    assert lines, ending.stderr[-2000:]
    return json.loads(lines[0].partition(" ")[2])


@pytest.mark.slow(SUITE)
@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("file", [file for file in PASSES if file not in LONG])
def test_tests_of_mpi4py_pass(file, suite):
    result = outcomes(suite, file)
    left_out = LEFT_OUT.get(file, "").split()
    failed = [name for name, outcome in result.items() if outcome in ("failed", "missing")]
    unnamed = [name for name in failed if not {*name.split(".")[1:]} & {*left_out}]
    assert not unnamed
    assert sum(outcome == "passed" for outcome in result.values()) >= PASSES[file] - len(failed)


def main():
    """Run all files, and print what passes."""
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch(Path(folder))
        for file, count in PASSES.items():
            passed = sum(outcome == "passed" for outcome in outcomes(tests, file).values())
            total += passed
            print(f"{file:24} {passed:4} of {count}", flush=True)
    print(f"{'all':24} {total:4} of {sum(PASSES.values())} that pass under mpirun")


if __name__ == "__main__":
    main()
