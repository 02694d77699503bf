"""The harness itself: planted tests that fail, hang or vanish on one rank of three."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness.launch import NOT_STARTED
from tests.harness import job
from tests.harness.job import mpirun, run
from tests.harness.records import FAILED, PASSED, SKIPPED, Writer, read
from tests.harness.slow import HARNESS, once_more

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
THREE = "--no-serial --ranks 3"

# What one rank of three does while the others would wait for ever, and the words that its report
# must have.
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
    # on all ranks: PyDLL keeps the interpreter's lock during the call, so no Python code can notice
    # the time
    "deaf": ("ctypes.PyDLL(None).sleep(999)", ""),
}
FINE = """
@pytest.mark.timeout(60)
def test_with_more_time(group):
    time.sleep(13)

def test_slow(group):  # not to be blamed for what follows
    if group.rank == 2: time.sleep(2)

"""


def harness(folder, tests, options):
    """Run the harness on a file of tests, with the project's settings."""
    (folder / "test_planted.py").write_text(BEGIN + tests)
    command = (
        f"{sys.executable} -m tests.harness {options} -c {ROOT}/setup.cfg --rootdir {folder}"
        f" {folder}"
    )
    return run(command.split(), folder / "output", LIMIT_S, cwd=ROOT)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """All planted failures in one run, between tests that pass."""
    bodies = [
        f"def test_{name}(group):\n    {statement}\n    group.barrier()\n    group.barrier()\n"
        for name, (statement, _) in PLANTED.items()
    ]
    alike = "def test_alike(group):\n    print('said')\n    raise ValueError('alike')\n"
    tests = "".join([OK, FINE, *bodies, alike, LAST])
    ending = harness(tmp_path_factory.mktemp("planted"), tests, f"{THREE} --test-limit-s 12")
    assert ending.status == 1
    return ending.output


@pytest.mark.slow(HARNESS)
@pytest.mark.parametrize("name", PLANTED)
def test_one_rank_fails_and_so_do_all(name, planted):
    assert planted.count(f"FAILED on 3 ranks: test_planted.py::test_{name}\n") == 1, planted
    parts = re.split(r"The run on 3 ranks .* in test_planted.py::test_(\w+)\n", planted)
    reported = dict(zip(parts[1::2], parts[::2], strict=False))[name]
    words = PLANTED[name][1]
    assert ("has not ended after" in reported) == (name == "hangs"), reported
    if words:
        assert any(
            word in reported.partition("---- rank 1 of 3 ----")[2] for word in words.split("|")
        ), reported


@pytest.mark.slow(HARNESS)
def test_the_others_pass(planted):
    assert f"3 ranks:     4 passed, {len(PLANTED) + 1} failed" in planted
    # the deaf one: where it was, and with the failures
    assert planted.count("was killed after") == 2


@pytest.mark.slow(HARNESS)
def test_what_all_ranks_fail_in_is_shown_once(planted):
    assert len(re.findall("E +ValueError: alike", planted)) == 1, planted
    summary = (
        # with the other failures, at the end
        r"test_alike\n    ValueError: alike\n    at \S*test_planted.py:\d+\n"
    )
    assert re.search(summary, planted), planted
    assert planted.count("said") == 2  # in the source line, and as captured output


RUNS = {
    # tests, options, exit status, and what must be printed
    "sizes are counted apart": (
        (
            f"{OK}def test_planted(group): assert group.size != 2\n"
            "@pytest.mark.mpi(min_size=9)\ndef test_nine(group): pass\n"
        ),
        "--no-serial --ranks 1,2,3",
        1,
        (
            "1 rank:     2 passed, 0 failed, 1 skipped",
            "2 ranks:     1 passed, 1 failed, 1 skipped",
            "3 ranks:     2 passed, 0 failed, 1 skipped",
            *(
                f"skipped 1: Skipped: Test requires 9 MPI processes, only {size} MPI"
                for size in (1, 2, 3)
            ),
            "\n2 passed, 1 skipped",  # pytest's own line
            "5 passed, 1 failed\n",
        ),
    ),
    "a file that is skipped is counted": (
        "pytest.importorskip('no_such_library')\n",
        "--no-serial --ranks 2",
        0,
        (
            "2 ranks:     0 passed, 0 failed, 1 skipped",
            "skipped 1: Skipped: could not import 'no_such_library'",
        ),
    ),
    "a crash in the serial tests hides only itself": (
        (
            "pytestmark = []\ndef test_a(): pass\ndef test_b(): os.kill(os.getpid(), 11)\ndef"
            " test_c(): assert 0\n"
        ),
        "--ranks=",
        1,
        (
            "serial:     1 passed, 2 failed",
            *(f"FAILED on serial: test_planted.py::test_{name}" for name in "bc"),
        ),
    ),
    "a file that cannot be read is a failure": (
        "import no_such_module\n",
        THREE,
        1,
        ("1 failed", "test_planted.py"),
    ),
    "no tests are no success": ("", THREE, 1, ("0 passed, 0 failed",)),
    # no rank can tell here: all are stopped again and again, as mpirun lets them go on before it
    # ends them
    "a run has a limit": (
        (
            f"{OK}def test_planted(group):\n    while True:\n        os.kill(os.getpid(),"
            " signal.SIGSTOP)\n"
        ),
        "--no-serial --ranks 2 --limit-s 15",
        1,
        ("The run on 2 ranks was killed after ", " s in test_planted.py::test_planted\n"),
    ),
    "what is slow is left out and counted": (
        (
            "pytestmark = []\n@pytest.mark.mpi\n@pytest.mark.slow('starts much')\ndef"
            " test_a(group): assert 0\n@pytest.mark.slow('draws"
            " much')\n@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): assert 0\ndef test_c():"
            " pass\n"
        ),
        "--ranks 2 --quick",
        0,
        (
            "serial:     1 passed, 0 failed, 0 skipped, 2 left out",
            "2 ranks:     0 passed, 0 failed, 0 skipped, 1 left out",
            "left out 2: slow: draws much",
            "left out 1: slow: starts much",
        ),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        once_more(name, slow="skipped" not in name and "serial" not in name, reason=HARNESS)
        for name in RUNS
    ],
)
def test_a_run(name, tmp_path):
    tests, options, status, lines = RUNS[name]
    ending = harness(tmp_path, tests, options)
    assert ending.status == status, ending.output
    for line in lines:
        assert line in ending.output, ending.output


def test_without_the_runner_a_failing_rank_ends_all_too(tmp_path):
    planted = (
        "def test_planted(group):\n    assert group.rank != 1, 'planted'\n    group.barrier()\n"
    )
    (tmp_path / "test_planted.py").write_text(BEGIN + planted)
    options = [
        "-p",
        "tests.harness.plugin",
        "--with-mpi",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    ending = run(
        [*mpirun(3), sys.executable, "-m", "pytest", *options],
        tmp_path / "output",
        LIMIT_S,
        cwd=ROOT,
    )
    assert ending.status == 1
    assert ending.output.count("rank 1 of 3: ") == 1, ending.output
    assert ending.output.count("AssertionError: planted") == 1


@pytest.mark.slow(HARNESS)
def test_runs_side_by_side_share_the_serial_tests_and_hide_no_failure(tmp_path):
    """Every test runs once, a crash takes one test along, and the two sizes and the serial tests
    are counted apart.
    """
    once = "import os, time, pytest\n@pytest.mark.parametrize('n', range(3))\n"
    once += "def test_once(n): open(f'{__file__}-{n}', 'x').close(); time.sleep(0.2)\n"
    for name in "abcd":
        crash = "def test_crash(): os.kill(os.getpid(), 11)\n" * (name == "b")
        (tmp_path / f"test_{name}.py").write_text(once + crash)
    tests = f"{OK}def test_planted(group): assert group.size != 2\n"
    ending = harness(tmp_path, tests, "--jobs 2 --ranks 2,3")
    assert ending.status == 1
    for line in (
        "serial:    12 passed, 1 failed",
        "2 ranks:     1 passed, 1 failed",
        "3 ranks:     2 passed, 0 failed",
        "FAILED on serial: test_b.py::test_crash",
        "AssertionError",
    ):
        assert line in ending.output, ending.output


def test_what_failed_is_run_again_by_itself_where_that_is_asked_for(tmp_path):
    """What passes then is named and fails nothing; what fails again has failed; nothing else runs
    twice.
    """
    note = "    with open(__file__ + {!r}, 'a') as file: file.write('x')\n"
    tests = (
        f"def test_good(group):\n{note.format('.good')}def"
        f" test_once(group):\n{note.format('.once')}"
    )
    tests += "    assert os.path.getsize(__file__ + '.once') > 1\ndef test_bad(group): assert 0\n"
    tests = tests.replace(
        "def test_good(group):\n", "def test_good(group):\n    sum(range(10**7))\n"
    )
    ending = harness(tmp_path, tests, "--again --no-serial --ranks 1 --slowest 1")
    assert ending.status == 1, ending.output
    assert re.search(r"the 1 slowest tests.*\n +\d.* s +1 rank  \S*::test_good\n", ending.output)
    assert (
        "UNSTEADY (failed, and passed again by itself) on 1 rank: test_planted.py::test_once\n"
        in ending.output
    )
    assert "FAILED on 1 rank: test_planted.py::test_bad" in ending.output
    assert ending.output.rstrip().endswith("2 passed, 1 failed")
    assert (tmp_path / "test_planted.py.good").read_text() == "x"


@pytest.mark.slow(HARNESS)
def test_an_interruption_ends_all_runs(tmp_path):
    """Of the harness, by a signal; a rank of either run that outlived it would go on ticking."""
    tick = (
        "    for _ in range(999):\n        open(__file__ + {name!r}, 'w').close();"
        " time.sleep(0.1)\n"
    )
    mpi = BEGIN + "def test_planted(group):\n" + tick.format(name=".mpi")
    (tmp_path / "test_mpi.py").write_text(mpi)
    (tmp_path / "test_serial.py").write_text(
        "import time\ndef test_planted():\n" + tick.format(name=".serial")
    )
    ticks = [tmp_path / "test_mpi.py.mpi", tmp_path / "test_serial.py.serial"]
    command = (
        f"{sys.executable} -m tests.harness --jobs 2 --ranks 2 -c {ROOT}/setup.cfg --rootdir"
        f" {tmp_path} {tmp_path}"
    )
    with subprocess.Popen(command.split(), cwd=ROOT, stdout=subprocess.DEVNULL) as job:
        wait_until(lambda: all(tick.exists() for tick in ticks))
        job.terminate()
        assert job.wait(60) == 128 + signal.SIGTERM
    time.sleep(1)  # mpirun ends some 0.1 s before the ranks that it has killed
    for path in ticks:
        path.unlink()
    time.sleep(1)
    assert [path.name for path in ticks if path.exists()] == []


def wait_until(holds, limit_s=120):
    """Wait until something holds."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < limit_s
        time.sleep(0.1)


def test_help_needs_nothing_that_is_installed():
    """-I and -S: without what site-packages hold."""
    code = (
        "import runpy, sys; sys.path.insert(0, '.'); sys.argv[1:] = ['--help'];"
        " runpy.run_module('tests.harness')"
    )
    code = code.replace("('tests.harness')", "('tests.harness', run_name='__main__')")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "--ranks" in ran.stdout


def test_nothing_outlives_a_job(tmp_path, monkeypatch):
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


def test_records_of_several_ranks(tmp_path):
    """A line that was cut off is left out."""
    ranks = [Writer(tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        for line in (
            ("a", "started"),
            ("a", PASSED, "", 0.5),
            ("b", "started"),
            ("b", SKIPPED, "why"),
            ("c", "started"),
        ):
            rank.write(*line)
    ranks[1].write("c", FAILED)
    for outcome in ("started", PASSED):
        ranks[0].write("d", outcome)
    ranks[1].errors.write_text("words\n")
    ranks[1].finish()
    with (tmp_path / "1.log").open("a") as file:
        file.write('{"test": "d", "outco')
    result = read(tmp_path, 2)
    assert result.outcomes == {"a": PASSED, "b": SKIPPED, "c": FAILED}
    assert (result.culprit, result.reasons, result.complete) == ("c", {"b": "why"}, False)
    assert result.words == "---- rank 1 of 2 ----\nwords"
    assert result.cpu_s == {"a": 1.0, "b": 0.0, "c": 0.0}


def test_a_launcher_that_starts_nothing_is_asked_once_more(tmp_path):
    script = tmp_path / "launcher"
    script.write_text(f'#!/bin/sh\necho try >>"$0.tries"\necho "{NOT_STARTED}."\nexit 213\n')
    script.chmod(0o755)
    assert run([str(script)], tmp_path / "output", 10.0).status == 213
    assert (tmp_path / "launcher.tries").read_text().count("try") == 2
