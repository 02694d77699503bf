"""The limit of MPI's own start, and launches that are refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nnmpi.base.errors import DataError, LaunchError
from nnmpi.base.launcher import Launch
from nnmpi.comm.mpi.shutdown import Shutdown
from nnmpi.comm.mpi.start import NO_NETWORK, refuse_mismatch, stays_on_one_node
from nnmpi.train.cli import rank_command
from tests.harness import job
from tests.harness.refusals import told

ROOT = Path(__file__).parents[2]
LIMIT_S = 60

WAITS = """
import time
from types import SimpleNamespace
from math import inf
from nnmpi.comm.mpi.start import wait_for_all_ranks_to_start
wait_for_all_ranks_to_start(
    SimpleNamespace(Init_thread=time.sleep, THREAD_MULTIPLE={seconds}), {limit_s}
)
print("up")
"""


def run(program, *words):
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False
    )


def test_a_start_that_takes_too_long_is_ended_with_its_stack():
    ending = run(WAITS.format(limit_s=0.1, seconds=LIMIT_S))
    assert ending.returncode == 1
    assert "wait_for_all_ranks_to_start" in ending.stderr
    assert run(WAITS.format(limit_s=LIMIT_S, seconds=0)).stdout == "up\n"
    assert run(WAITS.format(limit_s="inf", seconds=0)).stdout == "up\n"


# Which pairs of launcher and MPI library are refused.


OPEN_MPI = Launch("Open MPI's mpirun", 4, 0, 4)
MPICH = Launch("MPICH's mpirun", 4, 0, 4)
SRUN = Launch("srun", 4, 0, 4)
TORCHRUN = Launch("torchrun", 4, 0, 4)
HYDRA = {"HYDI_CONTROL_FD": "7"}


ONE = Launch("Open MPI's mpirun", 1, 0, 1)
FOREIGN = "started 4 processes, but mpi4py uses another MPI, {}, which sees one process each"


@pytest.mark.parametrize(
    "vendor, launch, environ, size, words",
    [
        # before MPI starts, as MPI's start would fail
        ("MPICH", OPEN_MPI, {}, None, FOREIGN.format("MPICH")),
        ("Open MPI", MPICH, HYDRA, None, FOREIGN.format("Open MPI")),
        ("Open MPI", OPEN_MPI, {}, None, ""),
        ("MPICH", MPICH, HYDRA, None, ""),
        ("MPICH", SRUN, {}, None, ""),
        ("Open MPI", SRUN, {}, None, ""),
        # srun --mpi=pmi2 sets the same variables as MPICH's mpirun
        ("Open MPI", MPICH, {}, None, ""),
        ("MPICH", ONE, {}, None, ""),
        ("MPICH", None, {}, None, ""),
        ("MPICH", OPEN_MPI, {}, 1, FOREIGN.format("MPICH")),  # a rank that is alone among several
        ("MPICH", MPICH, {}, 1, FOREIGN.format("MPICH")),
        ("Open MPI", SRUN, {}, 1, "or with srun --mpi=pmix"),
        ("MPICH", SRUN, {}, 4, ""),
        ("Open MPI", None, {}, 1, ""),
        ("Open MPI", ONE, {}, 1, ""),
        ("Open MPI", TORCHRUN, {}, None, ""),  # MPI may still join them
        ("Open MPI", TORCHRUN, {}, 4, ""),
        (
            "MPICH",
            TORCHRUN,
            {},
            1,
            "no ranks of MPI and would each train alone; start them with mpirun -n 4",
        ),
    ],
)
def test_launchers_of_another_library_are_refused(vendor, launch, environ, size, words):
    result = told(LaunchError, lambda: refuse_mismatch(vendor, launch, environ, size))
    assert words in result and bool(words) == bool(result)


@pytest.mark.parametrize(
    "launch, environ, stays",
    [
        (OPEN_MPI, {"PMIX_RANK": "0"}, True),
        (Launch("srun", 1, 0, 1), {}, True),
        (None, {"HOME": "/"}, True),
        (Launch("Open MPI's mpirun", 8, 0, 4), {}, False),
        (Launch("srun", 4, 0, None), {}, False),
        (None, {"PMIX_RANK": "0"}, False),  # of a launcher that is not known here
        (OPEN_MPI, {"OMPI_MCA_btl": "tcp,self"}, False),
        (OPEN_MPI, {"OMPI_MCA_pml": "cm"}, False),  # which needs an mtl
    ],
)
def test_only_a_job_on_one_node_does_without_a_network(launch, environ, stays):
    assert stays_on_one_node(launch, environ) == stays


def test_a_single_process_looks_for_no_network_cards():
    code = "import os; from nnmpi.comm.mpi.start import load_mpi; load_mpi(os.environ)\n"
    code += "print(os.environ['OMPI_MCA_btl'])"
    names = ("OMPI_", "PMIX_", "PMI_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.stdout.strip() == NO_NETWORK["OMPI_MCA_btl"], ended.stderr


def test_a_job_without_a_home_directory_starts():
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


def test_a_user_without_a_home_has_no_cache_after_the_start_either():
    """Open MPI needs a home to start: a folder that all can write became the cache's, too."""
    program = "import os, nnmpi; from nnmpi.base.files import *\n"
    program += "os.path.expanduser = lambda path: os.environ.get('HOME', path)\n"
    refused = "try: print(cache_folder())\nexcept UsageError: print('refused')\n"
    ran = subprocess.run(
        [sys.executable, "-c", f"{program}{refused}nnmpi.start()\n{refused}"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, "refused\nrefused\n"), ran.stderr


def test_a_launcher_that_ends_a_refused_job_adds_no_sentence(tmp_path):
    program = (
        "import atexit, os, nnmpi; from nnmpi.base.early import explain_signals\n"
        "explain_signals(); nnmpi.start(); atexit.register(os.kill, os.getpid(), 15)\n"
        "nnmpi.Layout(reduction='fixed', zero=1)"
    )
    words = [*job.mpirun(2), sys.executable, "-c", program]
    ending = job.run(words, tmp_path / "output", 60, cwd=ROOT)
    assert ending.status == 2 and ending.output.count("nnmpi:") == 1, ending.output


def test_signals_stay_as_they_are_when_mpi_starts():
    """UCX would take SIGHUP, so that a closed terminal ended nothing."""
    program = "import os, signal, nnmpi; nnmpi.start(); os.kill(os.getpid(), int({}))"
    for number in (signal.SIGHUP, signal.SIGTERM):
        ran = subprocess.run(
            [sys.executable, "-c", program.format(int(number))],
            env={name: value for name, value in os.environ.items() if name[:3] != "UCX"},
            cwd=ROOT,
            timeout=60,
            # under nohup it is ignored, and stays so
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        assert ran.returncode == -number


def test_an_error_without_an_output_is_one_sentence():
    """Python's stdout is None if it was closed before the start (`>&-`)."""
    words = f"{sys.executable} -m nnmpi predict nowhere none.csv >&-"
    ran = subprocess.run(["sh", "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.startswith("nnmpi: nowhere: there is no run") and ran.stderr.count("\n") == 1


def test_words_that_have_no_bytes_are_printed(capsys):
    """Such as the name of a file that is no text: the error must not fail in its turn, while others
    wait.
    """

    def gather(local, everyones):
        everyones[0][:] = local[0]
        return SimpleNamespace(Test=lambda: True)

    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, Iallgather=gather)
    mpi = SimpleNamespace(BYTE=None, COMM_WORLD=SimpleNamespace(Dup=lambda: comm))
    shutdown = Shutdown(
        mpi,
        1.0,
        SimpleNamespace(step=None, operations=[], wait_until=lambda ready, until_s: ready()),
    )
    with pytest.raises(SystemExit):
        shutdown.on_exception(DataError, DataError("\udcff"), None)
    assert capsys.readouterr().err == "nnmpi: \\udcff\n"


# What a process without a launcher leaves behind, and where MPI can write nothing.


VENDOR = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
"""


def vendor():
    """Return whose library mpi4py loads, asked in another process."""
    words = [sys.executable, "-c", VENDOR]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


# MPICH writes no files of its own there; a killed rank's shared memory is not removed by anybody.
open_mpis = pytest.mark.skipif(vendor() != "Open MPI", reason="Open MPI's files")

START = "import nnmpi, os; print(nnmpi.start().size, os.environ.get('TMPDIR'), flush=True)"
ENDS = {
    "its end": "",
    "an exception": "\nraise ValueError('planted')",
    "a kill": "\nos.kill(os.getpid(), 9)",
}


def alone(code, **environ):
    """Run a program without a launcher, whose variables a test under mpirun has, and without a
    chosen folder for temporary files, unless it is given one.
    """
    names = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "TMP")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=outside | environ, cwd=ROOT, capture_output=True, text=True)


MAPPED = """
for line in open("/proc/self/maps"):
    if "/dev/shm/" in line:
        print(line.split("/dev/shm/")[1].split()[0], flush=True)
"""


@open_mpis
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("chosen", [{}, {"OMPI_MCA_btl": "^ofi"}, {"OMPI_MCA_btl": "self,sm"}])
def test_a_single_process_leaves_no_files(tmp_path, end, chosen):
    ended = alone(START + MAPPED + ENDS[end], TMPDIR=str(tmp_path), **chosen)
    first, *mapped = ended.stdout.splitlines()
    assert first == f"1 {tmp_path}", ended.stderr
    assert [name for name in mapped if Path("/dev/shm", name).exists()] == []
    assert [*tmp_path.iterdir()] == []


@open_mpis
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that root cannot write")
@pytest.mark.parametrize("name", ["TMPDIR", "TMP"])
def test_a_temporary_folder_that_cannot_be_written_is_said(tmp_path, name):
    (tmp_path / "file").write_text("")
    for folder in ("/proc", tmp_path / "file", tmp_path / "file" / "below"):
        ended = alone(START, **{name: str(folder)})
        assert ended.returncode == LaunchError("").exit_status
        assert f"{name}={folder}, cannot be written (" in ended.stderr
        assert "set TMPDIR" in ended.stderr and "Traceback" not in ended.stderr


@open_mpis
def test_a_temporary_folder_is_made(tmp_path):
    assert alone(START, TMPDIR=str(tmp_path / "a" / "b")).returncode == 0
    assert [*(tmp_path / "a" / "b").iterdir()] == []


@open_mpis
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that root cannot write")
def test_ranks_are_not_started_where_mpi_can_write_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", "/proc")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    text = told(LaunchError, lambda: rank_command(["--ranks", "2"]))
    assert "TMPDIR=/proc, cannot be written" in text
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert "nnmpi.train" in rank_command(["--ranks", "2"])
    assert [*tmp_path.iterdir()] == []


def test_processes_of_torchrun_do_not_train_each_alone():
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    for rank, said in (("0", "torchrun started 2 processes"), ("1", "")):
        ended = alone(START, **environ | {"RANK": rank})
        assert ended.returncode == LaunchError("").exit_status
        assert said in ended.stderr and ended.stderr.count("\n") <= 2, ended.stderr
    # a program of PyTorch's may set them for itself
    assert alone(START, RANK="0", WORLD_SIZE="1").returncode == 0
