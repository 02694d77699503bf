"""The limit of MPI's own start, and the word on a rank that is gone: of processes that only seem to be ranks."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nnmpi.comm.mpi.library import (
    NO_NETWORK,
    find_missing,
    read_start_limit,
    refuse_foreign_launcher,
    refuse_lonely_rank,
    stays_on_one_node,
)
from nnmpi.comm.mpi.mpi_world import name_library
from nnmpi.comm.mpi.shutdown import Shutdown, WatchedExit, read_code, watch_exit
from nnmpi.comm.mpi.watchdog import has_ended
from nnmpi.comm.world import World
from nnmpi.errors import DataError, LaunchError, UsageError
from nnmpi.launcher import Launch

ROOT = Path(__file__).parents[2]
LIMIT_S = 60

WAITS = """
import time
from nnmpi.comm.mpi.library import limited
from nnmpi.launcher import Launch
with limited(Launch("a launcher", 2, 0, 2, 0), {limit_s}):
    time.sleep({seconds})
print("up")
"""

DIES = """
import sys, time
from collections import deque
from types import SimpleNamespace
from nnmpi.comm.mpi import watchdog
from nnmpi.comm.mpi.watchdog import Watchdog

class Pair:
    size, told = 2, None
    def __init__(self, rank):
        self.rank = rank
    def share(self, value):
        Pair.told = value or Pair.told
        return Pair.told

world = SimpleNamespace(step=3, waiter=None)
said = []
watchdog.has_ended = lambda process: sys.argv[2] == "ended"
Watchdog._go_at_once = lambda self: self.rank or said.append("at once")
root, other = [Watchdog(Pair(rank), deque(), world, True, sys.argv[3] == "lingers") for rank in (0, 1)]
root._say, other._say = said.append, lambda text: None  # the connection ends for the other one, too
for _ in range(2):  # the first word may be of the start, which went on while it was looked at
    root._heard.pop(1, None)
    while 1 not in root._heard or not other._lines:
        time.sleep(0.01)
if sys.argv[1] == "leaves":
    other.leave()
for line in other._lines.values():
    line.link.shutdown(2)
while 1 not in root._gone or (sys.argv[1] == "dies" and not said):
    time.sleep(0.01)
time.sleep(2 * watchdog.ENDING_S)
print("gone", *said)
"""


def ranks(stack: ExitStack) -> Iterator[subprocess.Popen[bytes]]:
    for rank in range(3):
        told = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": str(rank)}
        process = stack.enter_context(subprocess.Popen(["sleep", "100"], env={**os.environ, **told}))
        stack.callback(process.kill)
        yield process


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_ranks_that_have_not_come_are_found() -> None:
    """Neither has a child that watches over it, and one is stopped."""
    with ExitStack() as stack:
        first, stopped, late = ranks(stack)
        stopped.send_signal(signal.SIGSTOP)
        end_s, found = time.monotonic() + LIMIT_S, {0: ""}
        while "stopped" not in found.get(1, "") or 2 not in found:
            assert time.monotonic() < end_s, found
            found = find_missing(first.pid)
    assert found[1] == f"is stopped (process {stopped.pid})"
    assert found[2] == f"has not come to it (process {late.pid})"
    assert 0 not in found


def run(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)


def test_a_start_that_takes_too_long_is_ended_with_a_sentence() -> None:
    ending = run(WAITS.format(limit_s=0.1, seconds=LIMIT_S))
    assert ending.returncode == -signal.SIGKILL
    assert "rank 0 of 2: the job is ended: it has waited for 0.1 s in MPI's start" in ending.stderr
    assert run(WAITS.format(limit_s=LIMIT_S, seconds=0)).stdout == "up\n"


@pytest.mark.parametrize("limit", ["0", "-1", "soon", "nan"])
def test_a_wrong_limit_is_refused(limit: str) -> None:
    with pytest.raises(UsageError, match="NNMPI_START_LIMIT_S is"):
        read_start_limit({"NNMPI_START_LIMIT_S": limit})


@pytest.mark.parametrize(
    ("how", "process", "launcher"),
    [
        ("dies", "ended", "lingers"),
        ("dies", "ended", "ends all at once"),
        ("dies", "goes on", "lingers"),  # its connection alone is lost
        ("leaves", "ended", "lingers"),
    ],
)
def test_a_rank_whose_connection_ends_without_a_word_is_told(how: str, process: str, launcher: str) -> None:
    """Open MPI's launcher gives the others half a second: where the rank has surely died, they end by themselves."""
    ending = run(DIES, how, process, launcher)
    said = " rank 1 has gone, killed or by an exit of its own; it was last heard of at "
    assert ending.stdout.startswith("gone" + said * (how == "dies")), ending
    assert (said in ending.stdout) == (how == "dies"), ending.stdout
    hurries = (how, process, launcher) == ("dies", "ended", "lingers")
    assert ("at once" in ending.stdout) == hurries, ending.stdout


def test_a_process_that_was_killed_has_ended_before_it_is_waited_for() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        assert not has_ended(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process.pid)
    assert has_ended(process.pid)


# Noticing an uncaught `sys.exit`; what it does to a job of several ranks is in test_start.


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, (0, "")),
        (0, (0, "")),
        (3, (3, "")),
        (True, (1, "")),
        (-1, (255, "")),
        (256, (0, "")),
        ("bye", (1, "bye")),
    ],
)
def test_the_status_is_what_the_interpreter_makes_of_it(code: object, expected: tuple[int, str]) -> None:
    assert read_code(code) == expected


def test_a_caught_exit_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, str]] = []
    monkeypatch.setattr(sys, "exit", sys.exit)
    watch_exit(lambda status, text: calls.append((status, text)))
    with pytest.raises(SystemExit) as caught:
        sys.exit(3)
    assert caught.value.code == 3
    assert caught.value.args == (3,)
    assert calls == []


def test_an_exit_travels_as_a_plain_one() -> None:
    """A pool of processes sends a worker's exception home: with its code, without our hook."""
    error = pickle.loads(pickle.dumps(WatchedExit(3, lambda status, text: None)))
    assert type(error) is SystemExit
    assert error.code == 3


# Which pairs of launcher and MPI library are refused.


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


def test_words_that_have_no_bytes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as the name of a file that is no text: the error must not fail in its turn, while others wait."""

    def gather(own: list[Any], everyones: list[Any]) -> SimpleNamespace:
        everyones[0][:] = own[0]
        return SimpleNamespace(Test=lambda: True)

    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, Iallgather=gather)
    mpi: Any = SimpleNamespace(BYTE=None, COMM_WORLD=SimpleNamespace(Dup=lambda: comm))
    shutdown = Shutdown(mpi, 1.0, cast(World, SimpleNamespace(step=None)))
    with pytest.raises(SystemExit):
        shutdown.on_exception(DataError, DataError("\udcff"), None)
    assert capsys.readouterr().err == "\\udcff\n"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\n", "Open MPI 5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri\nMPICH ABI: 18:2:6\n", "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", "Intel(R) MPI Library 2021.11 for Linux* OS"),
    ],
)
def test_the_library_in_short(version: str, expected: str) -> None:
    assert name_library(version) == expected
