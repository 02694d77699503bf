"""The harness itself: planted tests that fail, hang or vanish on one rank of three."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nnmpi.launching import NOT_STARTED
from tests.harness import job
from tests.harness.job import Ending, mpirun, run
from tests.harness.records import FAILED, PASSED, SKIPPED, Writer, read
from tests.harness.slow import HARNESS

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0

pytestmark = pytest.mark.timeout(300)  # these start many jobs of several ranks

BEGIN = """
import ctypes, os, signal, sys, threading, time
import pytest
pytestmark = pytest.mark.mpi
"""

OK = "def test_ok(group): group.barrier()\n"
LAST = "def test_last(group): group.barrier()\n"

# What one rank of three does while the others would wait for ever, and the words that its report must have.
PLANTED = {
    "fails": ("assert group.rank != 1, 'planted'", "AssertionError: planted"),
    "raises": ("if group.rank == 1: raise ValueError('planted')", "ValueError: planted"),
    "exits_well": ("if group.rank == 1: sys.exit(0)", "SystemExit: 0|Exit: 0"),
    "breaks_off": ("if group.rank == 1: pytest.exit('planted')", "the session was broken off"),
    "thread": (
        "t = threading.Thread(target=lambda: 1 / (group.rank - 1)); t.start(); t.join()",
        "ZeroDivisionError",
    ),
    "killed": ("if group.rank == 1: os.kill(os.getpid(), signal.SIGKILL)", ""),
    "hangs": ("if group.rank == 1: time.sleep(999)", "time.sleep(999)"),
}


def harness(folder: Path, tests: str, *options: str) -> Ending:
    """Run the harness on a file of tests, with the project's settings."""
    (folder / "test_planted.py").write_text(BEGIN + tests)
    pytest_options = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(folder), str(folder)]
    command = [sys.executable, "-m", "tests.harness", *options, *pytest_options]
    return run(command, folder / "output", LIMIT_S, cwd=ROOT)


def on_three(folder: Path, tests: str, limit_s: float = 30) -> Ending:
    """Run MPI tests on three ranks."""
    return harness(folder, tests, "--no-serial", "--ranks", "3", "--test-limit-s", f"{limit_s:g}")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """All planted failures in one run, between tests that pass."""
    bodies = [
        f"def test_{name}(group):\n    {statement}\n    group.barrier()\n    group.barrier()\n"
        for name, (statement, _) in PLANTED.items()
    ]
    alike = "def test_alike(group):\n    print('said')\n    raise ValueError('alike')\n"
    return on_three(tmp_path_factory.mktemp("planted"), "".join([OK, *bodies, alike, LAST]), limit_s=12)


@pytest.mark.slow(HARNESS)
@pytest.mark.parametrize("name", PLANTED)
def test_one_rank_fails_and_so_do_all(name: str, planted: Ending) -> None:
    assert planted.output.count(f"FAILED on 3 ranks: test_planted.py::test_{name}\n") == 1, planted.output
    parts = re.split(r"The run on 3 ranks .* in test_planted.py::test_(\w+)\n", planted.output)
    reported = dict(zip(parts[1::2], parts[::2], strict=False))[name]
    words = PLANTED[name][1]
    assert ("has not ended after" in reported) == (name == "hangs"), reported
    if words:
        assert any(word in reported.partition("---- rank 1 of 3 ----")[2] for word in words.split("|")), reported


@pytest.mark.slow(HARNESS)
def test_the_others_pass(planted: Ending) -> None:
    assert planted.status == 1
    assert f"3 ranks:     2 passed, {len(PLANTED) + 1} failed" in planted.output
    assert "was killed after" not in planted.output  # every job ended by itself


@pytest.mark.slow(HARNESS)
def test_what_all_ranks_fail_in_is_shown_once(planted: Ending) -> None:
    assert len(re.findall("E +ValueError: alike", planted.output)) == 1, planted.output
    summary = (
        r"test_alike\n    ValueError: alike\n    at \S*test_planted.py:\d+\n"  # with the other failures, at the end
    )
    assert re.search(summary, planted.output), planted.output
    assert planted.output.count("said") == 2  # in the source line, and as captured output


@pytest.mark.slow(HARNESS)
def test_a_slow_rank_is_not_blamed_for_what_follows(tmp_path: Path) -> None:
    slow = "def test_slow(group):\n    if group.rank == 2: time.sleep(2)\n"
    planted = "def test_planted(group):\n    if group.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    ending = on_three(tmp_path, slow + planted)
    assert "3 ranks:     1 passed, 1 failed" in ending.output, ending.output
    assert "FAILED on 3 ranks: test_planted.py::test_planted" in ending.output


@pytest.mark.slow(HARNESS)
def test_a_hang_that_lets_no_other_thread_run_is_ended_too(tmp_path: Path) -> None:
    """PyDLL keeps the interpreter's lock during the call, so no Python code can notice the time."""
    planted = "def test_planted():\n    ctypes.PyDLL(None).sleep(999)\n"
    ending = on_three(tmp_path, OK + planted + LAST, limit_s=3)
    assert ending.status == 1
    assert "3 ranks:     2 passed, 1 failed" in ending.output, ending.output


@pytest.mark.slow(HARNESS)
def test_a_marker_gives_a_test_more_time(tmp_path: Path) -> None:
    planted = "@pytest.mark.timeout(60)\ndef test_planted(group):\n    time.sleep(3)\n"
    ending = on_three(tmp_path, planted, limit_s=1)
    assert ending.status == 0, ending.output


@pytest.mark.slow(HARNESS)
def test_sizes_are_counted_apart_and_rank_0_speaks_for_all(tmp_path: Path) -> None:
    planted = "def test_planted(group): assert group.size != 2\n"
    skipped = "@pytest.mark.mpi(min_size=9)\ndef test_nine(group): pass\n"
    ending = harness(tmp_path, OK + planted + skipped, "--no-serial", "--ranks", "1,2,3")
    assert ending.status == 1
    for line in (
        "1 rank:     2 passed, 0 failed",
        "2 ranks:     1 passed, 1 failed",
        "3 ranks:     2 passed, 0 failed",
    ):
        assert f"{line}, 1 skipped" in ending.output, ending.output
    assert ending.output.count("skipped 1: Skipped: Test requires 9 MPI processes") == 3  # each names its size
    assert ending.output.count("2 passed, 1 skipped") == 2  # pytest's own line, at 1 and 3 ranks
    assert ending.output.rstrip().endswith("5 passed, 1 failed")


def test_a_file_that_is_skipped_is_counted(tmp_path: Path) -> None:
    ending = on_three(tmp_path, "pytest.importorskip('no_such_library')\n")
    assert "3 ranks:     0 passed, 0 failed, 1 skipped" in ending.output, ending.output
    assert "skipped 1: Skipped: could not import 'no_such_library'" in ending.output


def test_a_crash_in_the_serial_tests_hides_only_itself(tmp_path: Path) -> None:
    tests = "pytestmark = []\ndef test_a(): pass\ndef test_b(): os.kill(os.getpid(), 11)\ndef test_c(): assert 0\n"
    ending = harness(tmp_path, tests, "--ranks", "")
    assert ending.status == 1
    assert "serial:     1 passed, 2 failed" in ending.output, ending.output
    assert "FAILED on serial: test_planted.py::test_b" in ending.output
    assert "FAILED on serial: test_planted.py::test_c" in ending.output


@pytest.mark.slow(HARNESS)
@pytest.mark.parametrize("tests", ["def test_planted(:\n", "import no_such_module\n"])
def test_a_file_that_cannot_be_read_is_a_failure(tests: str, tmp_path: Path) -> None:
    ending = on_three(tmp_path, tests)
    assert ending.status == 1
    assert "1 failed" in ending.output
    assert "test_planted.py" in ending.output


@pytest.mark.slow(HARNESS)
def test_no_tests_are_no_success(tmp_path: Path) -> None:
    assert on_three(tmp_path, "").status == 1


@pytest.mark.slow(HARNESS)
def test_a_run_has_a_limit(tmp_path: Path) -> None:
    """Here no rank can tell, since all are stopped: again and again, as mpirun lets them go on before it ends them."""
    planted = "def test_planted(group):\n    while True:\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
    ending = harness(tmp_path, OK + planted, "--no-serial", "--ranks", "2", "--limit-s", "15")
    assert ending.status == 1
    assert re.search("was killed after .* s in test_planted.py::test_planted", ending.output), ending.output


def test_without_the_runner_a_failing_rank_ends_all_too(tmp_path: Path) -> None:
    planted = "def test_planted(group):\n    assert group.rank != 1, 'planted'\n    group.barrier()\n"
    (tmp_path / "test_planted.py").write_text(BEGIN + planted)
    options = ["-p", "tests.harness.plugin", "--with-mpi", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ending = run([*mpirun(3), sys.executable, "-m", "pytest", *options], tmp_path / "output", LIMIT_S, cwd=ROOT)
    assert ending.status == 1
    assert ending.output.count("rank 1 of 3: ") == 1, ending.output
    assert ending.output.count("AssertionError: planted") == 1


@pytest.mark.slow(HARNESS)
def test_runs_side_by_side_share_the_serial_tests_and_hide_no_failure(tmp_path: Path) -> None:
    """Every test runs once, a crash takes one test along, and the two sizes and the serial tests are counted apart."""
    ran = tmp_path / "ran"
    ran.mkdir()
    for name in "abcd":
        lines = "".join(
            f"def test_{number}(): open({str(ran)!r} + '/{name}{number}', 'x').close(); time.sleep(0.2)\n"
            for number in range(3)
        )
        crash = "def test_crash(): os.kill(os.getpid(), 11)\n" * (name == "b")
        (tmp_path / f"test_{name}.py").write_text("import os, time\n" + lines + crash)
    ending = harness(
        tmp_path, OK + "def test_planted(group): assert group.size != 2\n", "--jobs", "2", "--ranks", "2,3"
    )
    assert ending.status == 1
    for line in (
        "serial:    12 passed, 1 failed",
        "2 ranks:     1 passed, 1 failed",
        "3 ranks:     2 passed, 0 failed",
    ):
        assert line in ending.output, ending.output
    assert "FAILED on serial: test_b.py::test_crash" in ending.output
    assert "AssertionError" in ending.output
    assert len(list(ran.iterdir())) == 12


def test_what_failed_is_run_again_by_itself_where_that_is_asked_for(tmp_path: Path) -> None:
    """What passes then is named and fails nothing; what fails again has failed; nothing else runs twice."""
    often = "    with open(__file__ + '.{name}', 'a') as file: file.write('x')\n"
    once = (
        "def test_once(group):\n" + often.format(name="once") + "    assert os.path.getsize(__file__ + '.once') > 1\n"
    )
    good = "def test_good(group):\n" + often.format(name="good")
    ending = harness(tmp_path, good + once, "--again", "--no-serial", "--ranks", "1")
    assert ending.status == 0, ending.output
    assert "UNSTEADY (failed, and passed again by itself) on 1 rank: test_planted.py::test_once\n" in ending.output
    assert ending.output.rstrip().endswith("2 passed, 0 failed")
    assert (tmp_path / "test_planted.py.good").read_text() == "x"
    ending = harness(tmp_path, "def test_bad(group): assert 0\n", "--again", "--no-serial", "--ranks", "1")
    assert ending.status == 1
    assert "FAILED on 1 rank: test_planted.py::test_bad" in ending.output


@pytest.mark.slow(HARNESS)
def test_an_interruption_ends_all_runs(tmp_path: Path) -> None:
    """Of the harness, by a signal; a rank of either run that outlived it would go on ticking."""
    tick = "    for _ in range(999):\n        open(__file__ + {name!r}, 'w').close(); time.sleep(0.1)\n"
    mpi = BEGIN + "def test_planted(group):\n" + tick.format(name=".mpi")
    (tmp_path / "test_mpi.py").write_text(mpi)
    (tmp_path / "test_serial.py").write_text("import time\ndef test_planted():\n" + tick.format(name=".serial"))
    ticks = [tmp_path / "test_mpi.py.mpi", tmp_path / "test_serial.py.serial"]
    options = ["--jobs", "2", "--ranks", "2", "-c", str(ROOT / "setup.cfg"), "--rootdir", str(tmp_path), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.harness", *options], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as job:
        wait_until(lambda: all(tick.exists() for tick in ticks))
        job.terminate()
        assert job.wait(60) == 128 + signal.SIGTERM
    time.sleep(1)  # mpirun ends some 0.1 s before the ranks that it has killed
    for path in ticks:
        path.unlink()
    time.sleep(1)
    assert [path.name for path in ticks if path.exists()] == []


def wait_until(holds: Callable[[], bool], limit_s: float = 120) -> None:
    """Wait until something holds."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < limit_s
        time.sleep(0.1)


def test_what_is_slow_is_left_out_and_counted(tmp_path: Path) -> None:
    tests = "".join(f"@pytest.mark.slow('starts much')\ndef test_{n}(group): assert 0\n" for n in "ab")
    serial = "import pytest\n@pytest.mark.slow('draws much')\ndef test_c(): assert 0\ndef test_d(): pass\n"
    (tmp_path / "test_serial.py").write_text(serial)
    ending = harness(tmp_path, OK + tests, "--ranks", "2", "--quick")
    assert ending.status == 0, ending.output
    for line in (
        "serial:     1 passed, 0 failed, 0 skipped, 1 left out",
        "2 ranks:     1 passed, 0 failed, 0 skipped, 2 left out",
        "left out 2: slow: starts much",
        "left out 1: slow: draws much",
    ):
        assert line in ending.output, ending.output


def test_help_needs_nothing_that_is_installed() -> None:
    """-I and -S: without what site-packages hold."""
    code = "import runpy, sys; sys.path.insert(0, '.'); sys.argv[1:] = ['--help']; runpy.run_module('tests.harness')"
    code = code.replace("('tests.harness')", "('tests.harness', run_name='__main__')")
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "--ranks" in ran.stdout


def test_nothing_outlives_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what ignores SIGTERM, and whose parent has ended."""
    monkeypatch.setattr(job, "TERM_S", 0.5)
    pid_file = tmp_path / "pid"
    script = f"trap '' TERM; (trap '' TERM; sleep 998 & echo $! >{pid_file}; wait) & sleep 998"
    assert run(["sh", "-c", script], tmp_path / "output", 1).status is None
    state = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    for _ in range(100):
        if not state.exists() or ") Z" in state.read_text():  # ended, and perhaps not yet collected
            return
        time.sleep(0.05)
    pytest.fail("sleep still runs")


def test_records_of_several_ranks(tmp_path: Path) -> None:
    ranks = [Writer(tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        rank.write("a", "started")
        rank.write("a", PASSED)
        rank.write("b", "started")
        rank.write("b", SKIPPED, "why")
        rank.write("c", "started")
    ranks[1].write("c", FAILED)
    ranks[0].write("d", "started")
    ranks[0].write("d", PASSED)
    ranks[1].errors.write_text("words\n")
    ranks[1].finish()
    found = read(tmp_path, 2)
    assert found.outcomes == {"a": PASSED, "b": SKIPPED, "c": FAILED}
    assert found.culprit == "c"
    assert found.reasons == {"b": "why"}
    assert not found.complete
    assert found.words == "---- rank 1 of 2 ----\nwords"


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    Writer(tmp_path, 0).write("a", PASSED)
    with (tmp_path / "0.log").open("a") as file:
        file.write('{"test": "b", "outco')
    assert read(tmp_path, 1).outcomes == {"a": PASSED}


def test_a_launcher_that_starts_nothing_is_asked_once_more(tmp_path: Path) -> None:
    script = tmp_path / "launcher"
    script.write_text(f'#!/bin/sh\necho try >>"$0.tries"\necho "{NOT_STARTED}."\nexit 213\n')
    script.chmod(0o755)
    assert run([str(script)], tmp_path / "output", 10.0).status == 213
    assert (tmp_path / "launcher.tries").read_text().count("try") == 2
